"""Measure an op at shapes of published models, drawn at random: what a user's own model gets, not what was tuned."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilesmith.bench.document import document, summary
from tilesmith.bench.run import case_rows, ceilings
from tilesmith.bench.sweep_inputs import INPUTS, LARGE
from tilesmith.engine import Case, T, ops
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.inits import tokens_first

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

TOKENS = 32768  # of all sequences of a call, at most
SHORTEST = 256
CACHES = (1024, 4096, 16384, 65536)
DRAFTS = (1, 1, 4, 16)  # query tokens of a decode
ELEMENTS = 2**31  # of a product's input or output, at most
LAYERS = ("q", "k and v", "q down", "q up", "kv down", "kv up", "o", "up", "down", "head")
PRODUCTS = {
    "matmul": LAYERS,
    "linear": LAYERS,
    "norm_linear": tuple(name for name in LAYERS if name not in ("o", "down")),
    "linear_act": ("up",),
    "memory_efficient_linear": ("up",),
}
GATED = ("swiglu", "geglu", "silu", "gelu", "sigmoid", "relu_squared", "bias_gelu", "add_relu")


@dataclass(frozen=True)
class Model:
    """Sizes of a published model; see `models.toml`."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int = 0
    value_dim: int = 0
    window: int = 0
    windows: str = "some"
    sides: int = 1
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True
    longest: int = 131072
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_dim: int = 0
    output_gate: bool = False

    def attention(self, chance: random.Random) -> dict[str, Any]:
        """Options of one of its layers, those that have a window or those that have none."""
        found: dict[str, Any] = {"causal": self.causal}
        if self.window and (self.windows == "all" or chance.random() < 0.5):
            found["window_left"] = self.window - 1 if self.sides == 1 else self.window
            if self.sides == 2:
                found["window_right"] = self.window
        if self.softcap:
            found["softcap"] = self.softcap
        if self.sinks:
            found["sinks"] = T(self.heads)
        return found

    def products(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of a block, and of the output layer; `up` stands for a gate too."""
        queries, values = self.heads * self.head_dim, self.heads * (self.value_dim or self.head_dim)
        if self.kv_lora_rank:
            found = {
                "kv down": (self.hidden, self.kv_lora_rank + self.rope_dim),
                "kv up": (self.kv_lora_rank, queries - self.heads * self.rope_dim + values),
            }
        else:
            found = {"k and v": (self.hidden, self.kv_heads * self.head_dim)}
        if self.q_lora_rank:
            found |= {"q down": (self.hidden, self.q_lora_rank), "q up": (self.q_lora_rank, queries)}
        else:
            found["q"] = self.hidden, queries * (2 if self.output_gate else 1)
        found["o"] = values, self.hidden
        found |= {"up": (self.hidden, self.intermediate), "down": (self.intermediate, self.hidden)}
        return {**found, "head": (self.hidden, self.vocabulary)} if self.vocabulary else found


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """The models of `models.toml`, in its order."""
    text = (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    return tuple(Model(**row) for row in tomllib.loads(text)["model"])


def served() -> list[str]:
    """Names of the ops that can be measured at models' shapes."""
    return ["attention", *(name for name, axes in INPUTS.items() if {"columns", "vocabulary"} & set(axes))]


def sample(op: str, seed: int, count: int, decode: bool = False) -> list[Case]:
    """`count` cases of an op, which follow from the seed alone.

    Attention: heads and mask of a model, 256 to 32,768 tokens log-uniform in multiples of 8, as many sequences as make
    32,768 tokens at most; decode: 1, 4 or 16 query tokens on a cache, which is latent where the model's is. Products:
    a number of rows and a linear layer of a model. Other ops on rows: a number of rows and a model's width. Losses: a
    model's vocabulary and hidden size. Raises ValueError for an op that follows no model's shape, and for more calls
    than differ.
    """
    if op not in served():
        raise ValueError(f"{op} cannot be drawn from models; ops that can: {', '.join(sorted(served()))}")
    if decode and op != "attention":
        raise ValueError(f"decode is a call of attention, not of {op}")
    chance = random.Random(f"{op} {decode} {seed}")
    draw = _decode if decode else _draw(op)
    found: dict[str, Case] = {}
    for _ in range(100 * count):
        case = draw(op, chance)
        found.setdefault(case.name, case)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{op}: only {len(found)} calls that differ could be drawn, not {count}; ask for fewer")


def _draw(op: str) -> Callable[[str, random.Random], Case]:
    if op == "attention":
        return _attention
    if op in PRODUCTS:
        return _product
    return _losses if _has_classes(op) else _rows


def _log_uniform(chance: random.Random, least: int, most: int, step: int = 1) -> int:
    drawn = math.exp(chance.uniform(math.log(least), math.log(max(most, least))))
    return max(step, round(drawn / step) * step)


def _attention(op: str, chance: random.Random) -> Case:
    model = chance.choice(models())
    tokens = _log_uniform(chance, min(SHORTEST, model.longest // 2), min(TOKENS, model.longest), 8)
    batch = _log_uniform(chance, 1, max(1, TOKENS // tokens))
    options = model.attention(chance)
    dims = model.head_dim, model.head_dim, model.value_dim or model.head_dim
    heads = model.heads, model.kv_heads, model.kv_heads
    args = {n: T(batch, h, tokens, d, init=tokens_first) for n, h, d in zip("qkv", heads, dims)}
    return Case(f"{model.name} {batch} x {tokens}{_said(options)}", {**args, **options})


def _said(options: Mapping[str, Any]) -> str:
    return f", window {options['window_left'] + 1}" if "window_left" in options else ""


def _decode(op: str, chance: random.Random) -> Case:
    model = chance.choice([m for m in models() if m.causal])
    tokens, keys, batch = chance.choice(DRAFTS), chance.choice(CACHES), _log_uniform(chance, 1, 64)
    batch = max(1, min(batch, 2**20 // keys))
    options = {n: v for n, v in model.attention(chance).items() if n != "sinks"}
    if model.sinks:
        options["sinks"] = T(model.heads, dtype=torch.float32, grad=False)
    name = f"{model.name} decode {batch} x {tokens} on {keys}{_said(options)}"
    args = _latent(model, batch, tokens, keys) if model.kv_lora_rank else _cached(model, batch, tokens, keys)
    return Case(name, {**args, **options})


def _cached(model: Model, batch: int, tokens: int, keys: int) -> dict[str, Any]:
    """Queries, and a cache of the model's heads of keys and values."""
    dims = model.head_dim, model.head_dim, model.value_dim or model.head_dim
    sizes = (model.heads, tokens), (model.kv_heads, keys), (model.kv_heads, keys)
    return {n: T(batch, *s, d, grad=False, init=tokens_first) for n, s, d in zip("qkv", sizes, dims)}


def _latent(model: Model, batch: int, tokens: int, keys: int) -> dict[str, Any]:
    """Absorbed MLA: one head of keys, latents beside rotated columns, whose latents are the values.

    Scores keep the scale of the heads that the latents stand for.
    """
    rank = model.kv_lora_rank
    return {
        "q": T(batch, model.heads, tokens, rank + model.rope_dim, grad=False, init=tokens_first),
        "k": T(batch, 1, keys, rank + model.rope_dim, grad=False, init=tokens_first),
        "v": T(batch, 1, keys, rank, grad=False, columns_of="k"),
        "scale": model.head_dim**-0.5,
    }


def _has_classes(op: str) -> bool:
    return "vocabulary" in INPUTS[op]


def _losses(op: str, chance: random.Random) -> Case:
    model = chance.choice([m for m in models() if m.vocabulary > 1000])
    tokens = _log_uniform(chance, 1024, 16384)
    held = replace(LARGE, tokens=tokens, hidden=model.hidden, vocab=model.vocabulary)
    (args,) = INPUTS[op]["vocabulary"].build(model.vocabulary, held).values()
    return Case(f"{model.name} {_tokens(args)} x {model.hidden} x {model.vocabulary}", args)


def _product(op: str, chance: random.Random) -> Case:
    model = chance.choice(models())
    layers = {name: sizes for name, sizes in model.products().items() if name in PRODUCTS[op]}
    layer = chance.choice(list(layers))
    inputs, outputs = layers[layer]
    rows = _log_uniform(chance, SHORTEST, min(2 * TOKENS, ELEMENTS // max(inputs, outputs))) | 1
    name = f"{model.name} {layer} {rows} x {inputs} x {outputs}"
    if op == "matmul":  # a layer's weight is [outputs, inputs] in memory
        return Case(name, {"a": T(rows, inputs), "b": T(inputs, outputs, layout="transposed")})
    (args,) = INPUTS[op]["columns"].build(inputs, replace(LARGE, tokens=rows)).values()
    args = {**args, "weight": T(outputs, inputs, init=args["weight"].init)}
    return Case(name, {**args, "bias": T(outputs)} if "bias" in args else args)


def _rows(op: str, chance: random.Random) -> Case:
    model = chance.choice(models())
    columns = model.intermediate if op in GATED else model.hidden
    rows = _log_uniform(chance, SHORTEST, 2 * TOKENS) | 1
    (args,) = INPUTS[op]["columns"].build(columns, replace(LARGE, tokens=rows)).values()
    return Case(f"{model.name} {_tokens(args)} x {columns}", args)


def _tokens(args: Mapping[str, Any]) -> str:
    """The dims before the last of a call's first tensor: less than was drawn where a call would not fit."""
    first = next(value for value in args.values() if isinstance(value, T))
    return " x ".join(map(str, first.shape[:-1]))


def run(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int,
    count: int,
    command: str,
    decode: bool = False,
    only: Sequence[str] = (),
    rounds: int = 5,
    forward: bool = False,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document of `count` calls drawn by `seed`: rows as `bench.run.run` makes them, and `summary`.

    so_far: is given the document after each call, for a run that may not reach its end. Raises ValueError as `sample`.
    """
    wanted = sample(op, seed, count, decode)
    found = document(
        f"{op}-{'decode-' if decode else ''}zoo",
        device,
        command,
        [],
        dtype=dtype_name(dtype),
        rounds=rounds,
        ceilings=asdict(ceilings(device)),
        seed=seed,
    )
    for number, case in enumerate(wanted, 1):
        progress(f"{number} of {count}, {case.name}")
        found["rows"] += case_rows(ops()[op], case, device, dtype, only, rounds, forward or decode)
        found["summary"] = summary(found["rows"])
        so_far(found)
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    return found
