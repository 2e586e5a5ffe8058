"""Inputs of each op along each axis of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import T
from tilesmith.engine.inits import around_one, dropout_seed, log_probs, tokens_first, unit_outputs
from tilesmith.ops.loss.formulas import PairOptions

Args = dict[str, Any]
Panels = Mapping[str, Args]  # by name; "" where there is only one


@dataclass(frozen=True)
class Held:
    """What does not change along an axis. head_dims: of attention, one panel each; total: tokens of all sequences."""

    tokens: int
    hidden: int
    vocab: int
    total: int
    heads: int
    kv_heads: int
    head_dims: tuple[int, ...]


LARGE = Held(16384, 4096, 128256, 16384, 32, 8, (64, 128, 256))
SMALL = Held(32, 64, 100, 64, 4, 2, (16,))


@dataclass(frozen=True)
class Inputs:
    """How inputs follow from a value. values: on an accelerator, and label, where the axis's do not suit."""

    build: Callable[[int, Held], Panels]
    values: tuple[int, ...] = ()
    label: str = ""


def _probs(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=device).softmax(-1)


def _angles(function: Callable[[Tensor], Tensor]):
    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(shape[1], dtype=torch.float64, device=device) / shape[1])
        return function(torch.arange(shape[0], dtype=torch.float64, device=device)[:, None] * frequencies)

    return init


def _labels(classes: int, *sizes: int) -> T:
    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.randint(classes, tuple(shape), generator=generator, device=device)

    return T(*sizes, dtype=torch.int64, init=init)


def _one(args: Args) -> Panels:
    return {"": args}


def _both(build: Callable[[int, int, Held], Args]) -> dict[str, Inputs]:
    """Along hidden size and along tokens, of rows [tokens, hidden]."""
    return {
        "columns": Inputs(lambda n, held: _one(build(held.tokens, n, held))),
        "tokens": Inputs(lambda n, held: _one(build(n, held.hidden, held))),
    }


def _rows(names: str, vectors: str = "", **options: Any) -> dict[str, Inputs]:
    """An op on rows of the same size, with vectors of their width."""

    def build(tokens: int, columns: int, held: Held) -> Args:
        wide = {name: T(tokens, columns) for name in names.split()}
        narrow = {n: T(columns, init=around_one if n == "weight" else "normal") for n in vectors.split()}
        return {**wide, **narrow, **options}

    return _both(build)


DROPPED = {"seed": T(2, dtype=torch.int64, init=dropout_seed), "p": 0.1}


def _linear(bias: bool = True, norm: bool = False, **options: Any) -> dict[str, Inputs]:
    """A square layer along its width, and along tokens."""

    def build(tokens: int, columns: int, held: Held) -> Args:
        args = {"x": T(tokens, columns), "weight": T(columns, columns, init=unit_outputs)}
        args |= {"bias": T(columns)} if bias else {}
        args |= {"norm_weight": T(columns, init=around_one)} if norm else {}
        return {**args, **options}

    sizes = (256, 512, 1024, 2048, 4096, 8192, 16384)
    return {n: Inputs(i.build, sizes if n == "columns" else ()) for n, i in _both(build).items()}


def _product(n: int, held: Held) -> Panels:
    return _one({"a": T(n, n), "b": T(n, n)})


def _classes(build: Callable[[int, int, Held], Args], tokens: int = 8192) -> dict[str, Inputs]:
    """A loss along its vocabulary, and along tokens."""
    return {
        "vocabulary": Inputs(lambda n, held: _one(build(min(tokens, held.tokens), n, held))),
        "tokens": Inputs(lambda n, held: _one(build(n, held.vocab, held))),
    }


def _cross_entropy(tokens: int, vocab: int, held: Held) -> Args:
    return {"logits": T(tokens, vocab), "target": _labels(vocab, tokens)}


def _distance(init: Callable[..., Tensor], **options: Any) -> dict[str, Inputs]:
    return _classes(
        lambda tokens, vocab, held: {
            "x": T(tokens, vocab, init=init),
            "target": T(tokens, vocab, grad=False, init=init),
            **options,
        },
        tokens=4096,
    )


def _output_layer(tokens: int, vocab: int, held: Held) -> Args:
    return {
        "x": T(tokens, held.hidden),
        "weight": T(vocab, held.hidden, init=unit_outputs),
        "target": _labels(vocab, tokens),
    }


def _distillation(tokens: int, vocab: int, held: Held) -> Args:
    teacher = {"teacher": T(tokens, held.hidden, grad=False)}
    teacher["teacher_weight"] = T(vocab, held.hidden, grad=False, init=unit_outputs)
    return {**_output_layer(tokens, vocab, held), **teacher}


def _preference(tokens: int, vocab: int, held: Held) -> Args:
    """Pairs of sequences, the first halves preferred."""
    batch = 8 if tokens % 8 == 0 and tokens > 8 else 2
    length = max(1, tokens // batch)

    def rows(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        found = torch.randn(tuple(shape), generator=generator, device=device)
        found[0], found[2] = 1 / length, 0.1 / length
        found[2, shape[1] // 2 :] = 0
        return found

    return {
        "x": T(batch, length, held.hidden),
        "weight": T(vocab, held.hidden, init=unit_outputs),
        "target": _labels(vocab, batch, length),
        "sequences": T(3, batch, dtype=torch.float32, grad=False, init=rows),
        "formula": "sigmoid",
        "options": list(PairOptions(beta=0.5)),
    }


def _batch(tokens: int, total: int) -> int:
    return max(1, total // tokens)


def _attention(tokens: int, held: Held) -> Panels:
    """The same number of tokens and features at each length, so that sequences get fewer as they get longer."""

    def args(dim: int, causal: bool) -> Args:
        heads = max(1, held.hidden // 2 // dim)
        shape = (_batch(tokens, held.total), heads, tokens, dim)
        return {**{name: T(*shape, init=tokens_first) for name in "qkv"}, "causal": causal}

    kinds = {"full": False, "causal": True}
    return {f"head dim {dim}, {kind}": args(dim, causal) for dim in held.head_dims for kind, causal in kinds.items()}


def _quantized(tokens: int, held: Held) -> Panels:
    dim = held.head_dims[len(held.head_dims) // 2]
    shape = (_batch(tokens, held.total), max(1, held.hidden // 2 // dim), tokens, dim)
    return _one({name: T(*shape, grad=False, init=tokens_first) for name in "qkv"})


def _heads(tokens: int, held: Held) -> Args:
    dim = held.head_dims[len(held.head_dims) // 2]
    batch, table = _batch(tokens, held.total), {"dtype": torch.float32, "grad": False}
    return {
        "q": T(batch, held.heads, tokens, dim, init=tokens_first),
        "k": T(batch, held.kv_heads, tokens, dim, init=tokens_first),
        "cos": T(tokens, dim // 2, init=_angles(torch.cos), **table),
        "sin": T(tokens, dim // 2, init=_angles(torch.sin), **table),
    }


def _normed_heads(tokens: int, held: Held) -> Panels:
    args = _heads(tokens, held)
    weight = T(args["q"].shape[-1], init=around_one)
    return _one({"q": args["q"], "k": args["k"], "q_weight": weight, "k_weight": weight, **args})


def _scores(tokens: int, held: Held, lse: bool) -> Panels:
    dim = held.head_dims[len(held.head_dims) // 2]
    batch, heads = _batch(tokens, held.total // 2), max(1, held.heads // 2)
    args: Args = {name: T(batch, heads, tokens, dim) for name in "qk"}
    if lse:
        rows = lambda g, shape, d: 5 + torch.rand(tuple(shape), generator=g, device=d)  # noqa: E731
        args["lse"] = T(batch, heads, tokens, dtype=torch.float32, init=rows)
    return {kind: {**args, "causal": causal} for kind, causal in (("full", False), ("causal", True))}


def _parts(tokens: int, held: Held) -> Panels:
    dim = held.head_dims[len(held.head_dims) // 2]
    shape = (_batch(tokens, held.total), held.heads, tokens)
    out, lse = T(*shape, dim, init=tokens_first), T(*shape, dtype=torch.float32)
    return _one({"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse})


def _append(tokens: int, held: Held) -> Panels:
    args = {**_heads(tokens, held)}
    batch, _, _, dim = args["k"].shape
    cache = T(batch, held.kv_heads, tokens, dim, grad=False)
    nothing = lambda g, shape, d: torch.zeros(tuple(shape), device=d)  # noqa: E731
    new = {"k": T(*args["k"].shape, grad=False), "v": T(*args["k"].shape, grad=False)}
    lengths = T(batch, dtype=torch.int32, grad=False, init=nothing)
    q = T(*args["q"].shape, grad=False)
    rotation = {"q": q, "cos": args["cos"], "sin": args["sin"]}
    return _one({"k_cache": cache, "v_cache": cache, **new, "lengths": lengths, **rotation})


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _sequences(build: Callable[[int, Held], Panels], values: tuple[int, ...] = LENGTHS) -> dict[str, Inputs]:
    return {"tokens": Inputs(build, values, "sequence length")}


INPUTS: dict[str, dict[str, Inputs]] = {
    "rms_norm": _rows("x", "weight"),
    "layer_norm": _rows("x", "weight bias"),
    "add_rms_norm": _rows("x residual", "weight"),
    "add_layer_norm": _rows("x residual", "weight bias"),
    "dropout_add_norm": _rows("x residual", "weight bias", **DROPPED),
    "softmax": _rows("x"),
    "softmax_dropout": _rows("x", **DROPPED),
    "silu": _rows("x"),
    "gelu": _rows("x"),
    "sigmoid": _rows("x"),
    "relu_squared": _rows("x"),
    "swiglu": _rows("gate up"),
    "geglu": _rows("gate up"),
    "add_relu": _rows("x y"),
    "bias_gelu": _rows("x", "bias"),
    "bias_dropout": _rows("x", "bias", **DROPPED),
    "bias_dropout_residual": _rows("x residual", "bias", **DROPPED),
    "matmul": {"columns": Inputs(_product, (256, 512, 1024, 2048, 4096, 8192, 16384), "rows and columns")},
    "linear": _linear(),
    "linear_act": _linear(activation="gelu_tanh"),
    "norm_linear": _linear(bias=False, norm=True, kind="rms"),
    "memory_efficient_linear": _linear(activation="gelu"),
    "cross_entropy": _classes(_cross_entropy),
    "kl_div": _distance(log_probs, log_target=True, reduction="batchmean"),
    "jsd": _distance(log_probs),
    "tvd": _distance(_probs),
    "linear_cross_entropy": _classes(_output_layer),
    "linear_distillation": _classes(_distillation, tokens=4096),
    "linear_preference": _classes(_preference),
    "attention": _sequences(_attention),
    "attention_quantize": _sequences(_quantized),
    "rope": _sequences(lambda tokens, held: _one(_heads(tokens, held))),
    "rms_norm_rope": _sequences(_normed_heads),
    "attention_weights": _sequences(lambda n, held: _scores(n, held, lse=True), LENGTHS[:-1]),
    "attention_stats": _sequences(lambda n, held: _scores(n, held, lse=False), LENGTHS[:-1]),
    "merge_attention": _sequences(_parts),
    "kv_cache_append": _sequences(_append),
}
