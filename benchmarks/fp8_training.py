"""FP8 training on one GPU: values first, then casts, linear layers, decoder layers and what a backward keeps.

    python benchmarks/fp8_training.py results.json [--part values --part casts ...] [--seconds 95] [--dry]

Parts, all of them by default:
  values   casts and products beside the reference, element by element, by the kernels themselves, those of fp32 tensors
           too, which `rejects` does not serve on a GPU. No other part follows a difference in what is served.
  casts    each cast kernel's bytes a second beside those of a copy of as many bytes, by the tiles named in PINS.
  products  the products of a layer by each kind of factor, and what the row-wise recipe does beside them.
  linears  forward and backward of one layer by each recipe, beside bf16, the bare products and torchao.
  layers   forward and backward of four layers of a Llama of 8 B beside bf16, with one attention for all.
  bytes    what the linear layers keep of their inputs for the backward, beside torchao.
  linears_compiled, layers_compiled   beside torchao under torch.compile, and for layers bf16 under it.

A part begins nothing that would not end within --seconds by what it usually takes. results.json is written after each
row; rows of parts that are not run again stay. --dry: tiny sizes on any device, to see that the program runs.
"""

import argparse
import copy
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, load, provenance, save, say
from torch import Tensor, nn

import tilesmith
from tilesmith import ops, use
from tilesmith.engine import ops as declared
from tilesmith.engine.timing import Timing, measure, peak_memory
from tilesmith.ops.quant import reference
from tilesmith.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8
from tilesmith.precision.config import RECIPES
from tilesmith.precision.scaling import roll

SHAPES = ((4096, 28_672), (14_336, 4096))  # in, out: the wide products of a Llama of 8 B
TOKENS = (8192, 16_384)
LAYOUTS = ((True, False), (True, True), (False, True))  # rows, columns
PEERS = {"tensorwise": ("delayed", "current"), "rowwise_with_gw_hp": ("rowwise",)}  # torchao's recipe -> ours like it


def tiles(*each: str) -> tuple[str, ...]:
    """Pins of tiles, each "rows columns warps bands", with the registers behind where a kernel may be held to them."""
    return pins("block_rows block_cols num_warps bands max_registers", *each)


def blocks(*each: str) -> tuple[str, ...]:
    """Pins of blocks, each "warps registers bands"."""
    return pins("num_warps max_registers bands", *each)


def pins(fields: str, *each: str) -> tuple[str, ...]:
    return tuple(":".join(["triton", *map("=".join, zip(fields.split(), values.split()))]) for values in each)


PINS = {
    "fp8_cast": ("triton",),
    "fp8_cast both": ("triton",),
    "fp8_cast after concatenation": ("triton",),
    "fp8_cast_beside": ("triton",),
    "fp8_cast_stack": ("triton",),
    "fp8_cast_stack three": ("triton",),
    "fp8_amax": pins("block num_warps programs", "8192 8 1056", "4096 8 1056"),
    "fp8_transpose": tiles("128 128 4 1", "128 64 4 8", "256 128 8 8"),
    "fp8_cast_rows": ("triton",),
    "fp8_cast_blocks": ("triton",),
    "fp8_cast_blocks rows": blocks("8 0 8", "8 128 8"),
    "fp8_cast_blocks square": ("triton",),
    "rms_norm_fp8": (
        "triton",
        *pins("max_registers weight_first", "0 1", "0 0", "40 0"),
        "triton:tile=4096:num_warps=8",
    ),
    "swiglu_fp8": ("triton",),
    "swiglu_vjp_fp8": tiles("128 64 8 8 0", "64 64 8 8 0"),
}


@dataclass
class Run:
    """Where rows go, and how long a part may take."""

    out: Path
    seconds: float
    dry: bool
    document: dict[str, Any] = field(default_factory=dict)
    part: str = ""
    until: float = 0.0

    def begin(self, part: str) -> None:
        self.part, self.until = part, time.monotonic() + self.seconds
        self.document[part] = []

    def row(self, **values: Any) -> None:
        """Keep a row and print it."""
        self.document[self.part].append(values)
        save(self.out, self.document)
        say(f"{self.part}: {json.dumps(values)}")

    def late(self, what: str, needs: float = 5.0) -> bool:
        """Whether there is no time left for this, which needs so many seconds; says so if there is not."""
        if time.monotonic() + (0 if self.dry else needs) < self.until:
            return False
        self.row(skipped=what, why=f"the part had {self.seconds:g} s")
        return True

    def timed(self, variants: dict[str, Callable[[], object]], budget_ms: float = 20.0) -> dict[str, Timing]:
        rounds, budget = (2, 1.0) if self.dry else (5, budget_ms)
        return measure(variants, DEVICE, rounds=rounds, budget_ms=budget, warmup=2)


def shown(timings: dict[str, Timing]) -> dict[str, dict[str, float]]:
    """Medians in ms and spreads."""
    return {name: {"ms": round(t.median_us / 1e3, 5), "spread": round(t.spread, 4)} for name, t in timings.items()}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def one(value: float) -> Tensor:
    return torch.full((1,), value, device=DEVICE)


# Values


def same_bits(found: Tensor, want: Tensor) -> int:
    """How many numbers differ, any NaN equal to any."""
    if found.element_size() == 1:
        nan = found.float().isnan() & want.float().isnan()
        return int(((found.view(torch.uint8) != want.view(torch.uint8)) & ~nan).sum())
    return int((found.nan_to_num(nan=-1.0) != want.nan_to_num(nan=-1.0)).sum())


def values(run: Run) -> bool:
    """Casts are exact but for their one rounding, which is the reference's: no bit may differ. Of fp32 tensors a
    difference is told, and does not count: they are not served."""
    right = True
    small, large = ((33, 70), (64, 128)) if run.dry else ((1200, 530), (8192, 4096))
    calls = [(torch.bfloat16, format, shape) for format in ("e4m3", "e5m2") for shape in (small, large)]
    calls += [(torch.float32, "e4m3", small), (torch.float32, "e5m2", small), (torch.float32, "e4m3", large)]
    for dtype, format, (m, n) in (*calls, (torch.float16, "e4m3", small)):
        what = f"{m}x{n} {str(dtype)[6:]} {format}"
        if run.late(what, 15.0):
            return right
        same = casts_alike(run, drawn(m, n, dtype=dtype) * 3, format, what)
        run.row(call=what, same=same)
        right &= same or dtype is torch.float32
    for m, n in ((33, 70),) if run.dry else ((1200, 530), (2048, 14_336)):
        right &= producers_agree(run, m, n)
    for name in ("swiglu_fp8", "swiglu_vjp_fp8", "rms_norm_fp8", "add_rms_norm_fp8", "scaled_matmul"):
        right &= within_budgets(run, name)
    return right


def casts_alike(run: Run, x: Tensor, format: str, what: str) -> bool:
    """Each cast of one tensor, which is given numbers that are none, infinite, zero and too large."""
    x[1, 2], x[2, 3], x[3, 4], x[4], x[5, 6] = torch.nan, torch.inf, -torch.inf, 0, 6e4
    whole, wide = x[: x.shape[0] // 16 * 16].nan_to_num(), x[:, : x.shape[1] // 16 * 16]
    heights, widths = thirds(whole.shape[0]), thirds(wide.shape[1])
    calls: list[tuple[str, tuple]] = [
        *(("fp8_cast", (x, one(4.0), one(0.0), format, *wanted)) for wanted in LAYOUTS),
        ("fp8_cast_rows", (x, format)),
        *(("fp8_cast_blocks", (x, format, True, True, square)) for square in (False, True)),
        ("fp8_transpose", (reference.cast(x.float(), format),)),
        ("fp8_cast_stack", (whole, whole.flip(0) / 4, None, format)),
        ("fp8_cast_stack", (*whole.split(heights), format)),
        *(("fp8_cast_beside", (*wide.split(widths, 1), one(4.0), one(0.0), format, *wanted)) for wanted in LAYOUTS),
        ("fp8_amax", (whole, whole[:5], whole.flip(0) * 2)),
    ]
    if x.dtype is torch.bfloat16 and format == "e4m3":
        calls += [("fp8_cast_blocks", (x, format, rows, not rows)) for rows in (False, True)]
        calls += [("fp8_cast_blocks", (x[:, 1:], format, True, True))]  # columns that are no pairs
    same = [alike(run, name, args, what) for name, args in calls]  # each is run, whatever was found of another
    return all(same)


def thirds(size: int) -> tuple[int, int, int]:
    """A multiple of 16 as three of them, as far as there are so many."""
    part = size // 64 * 16
    return size - 2 * part, part, part


def alike(run: Run, name: str, args: tuple, what: str) -> bool:
    """One call of the kernel itself beside the reference; amax is compared too."""
    kernel = declared()[name].kernel("triton").fn if DEVICE.type != "cpu" else getattr(reference, name)
    copies = [tuple(a.clone() if isinstance(a, Tensor) else a for a in args) for _ in range(2)]
    found, want = kernel(*copies[0]), getattr(reference, name)(*copies[1])
    found, want = (r if isinstance(r, tuple) else (r,) for r in (found, want))
    if at := {"fp8_cast": 2, "fp8_cast_beside": 4}.get(name):
        found, want = (*found, copies[0][at]), (*want, copies[1][at])
    wrong = [same_bits(f, w) for f, w in zip(found, want)]
    if any(wrong):
        run.row(op=name, call=what, options=[a for a in args if not isinstance(a, Tensor)], differing=wrong)
    return not any(wrong)


def producers_agree(run: Run, m: int, n: int) -> bool:
    """What kernels that cast their result give beside the reference's cast of it, and beside each other, bit by bit."""
    gate, up, dh = (drawn(m, n) for _ in range(3))
    gate[1, 2], up[2, 3], dh[3, 4], up[4] = torch.nan, torch.inf, -torch.inf, 0
    bound, factor, wrong = one(4.0), one(2.0**-5), {}

    def kernel(name: str) -> Callable[..., Any]:
        return declared()[name].kernel("triton").fn if DEVICE.type != "cpu" else getattr(reference, name)

    def differ(what: str, found: Tensor, want: Tensor) -> None:
        if count := same_bits(found, want):
            wrong[what] = count

    for name, args in (("rms_norm_fp8", (gate, up[0])), ("add_rms_norm_fp8", (gate, up, dh[0]))):
        seen, told = one(0.0), one(0.0)
        y, *_, y8, used, _ = kernel(name)(*args, bound, seen)
        want8, _, want = reference.fp8_cast(y, bound, told)
        for what, found, right in (("y8", y8, want8), ("factor", used, want), ("amax", seen, told)):
            differ(f"{name} {what}", found, right)
    h8, _ = kernel("swiglu_fp8")(gate, up, factor * 448, one(0.0))
    d8, d8_t, h8_t, _ = kernel("swiglu_vjp_fp8")(dh, gate, up, bound, one(0.0), factor)
    differ("h8 transposed", h8_t, reference.fp8_transpose(h8))
    differ("d8 transposed", d8_t, reference.fp8_transpose(d8))
    run.row(producers=f"{m}x{n}", differing=wrong)
    return not wrong


def within_budgets(run: Run, name: str, tags: tuple[str, ...] = ("test",)) -> bool:
    """The op's own small cases, or those with one of the tags that are not for timing, by every kernel that is here."""
    from tilesmith.engine import cases
    from tilesmith.engine.backends import REFERENCE
    from tilesmith.validate.cases import backends_on, check

    op, wrong, checked = declared()[name], [], 0
    for case in cases(name):
        if not case.tags.intersection(tags) or "bench" in case.tags or run.late(f"{name} {case.name}", 3.0):
            continue
        for backend in backends_on(op, DEVICE):
            if backend == REFERENCE and "gpu" in case.tags:
                continue  # it is the yardstick there
            result = check(op, backend, case, DEVICE, case.dtypes[0])
            checked += 1
            if not result.passed:
                wrong.append(f"{backend} {case.name}: {result.message}")
    run.row(op=name, checked=checked, wrong=wrong)
    return not wrong


# Casts


def cast_calls(m: int, n: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls by name, and the bytes that each moves for an element of x."""
    x, up, dh = (drawn(m, n) for _ in range(3))
    x8, bound, amax, factor = reference.cast(x.float(), "e4m3"), one(6.0), one(0.0), one(2.0**-5)
    beside, both = [part.contiguous() for part in x.split(thirds(n), 1)], (bound, amax, "e5m2", True, True)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "fp8_cast": (lambda: ops.fp8_cast(x, bound, amax, "e4m3"), 3),
        "fp8_cast both": (lambda: ops.fp8_cast(x, bound, amax, "e5m2", True, True), 4),
        "fp8_cast after concatenation": (lambda: ops.fp8_cast(torch.cat(beside, 1), *both), 4),
        "fp8_cast_beside": (lambda: ops.fp8_cast_beside(*beside, *both), 4),
        "fp8_cast_stack": (lambda: ops.fp8_cast_stack(x, up), 12),  # the weights are read twice
        "fp8_cast_stack three": (lambda: ops.fp8_cast_stack(*x.split(thirds(m))), 6),
        "fp8_amax": (lambda: ops.fp8_amax(x), 2),
        "fp8_transpose": (lambda: ops.fp8_transpose(x8), 2),
        "fp8_cast_rows": (lambda: ops.fp8_cast_rows(x), 3),
        "fp8_cast_blocks": (lambda: ops.fp8_cast_blocks(x, "e4m3", True, True), 4),
        "fp8_cast_blocks rows": (lambda: ops.fp8_cast_blocks(x, "e4m3"), 3),
        "fp8_cast_blocks square": (lambda: ops.fp8_cast_blocks(x, "e4m3", True, True, True), 4),
        "swiglu_fp8": (lambda: ops.swiglu_fp8(x, up, bound, amax), 5),
        "swiglu_vjp_fp8": (lambda: ops.swiglu_vjp_fp8(dh, x, up, bound, amax, factor), 11),
    }
    if n <= 16_384:
        calls["rms_norm_fp8"] = (lambda: ops.rms_norm_fp8(x, x[0], bound, amax), 5)
    return calls


def casts(run: Run) -> None:
    """Bytes a second of each kernel over those of a copy that moves as many."""
    for m, n in ((64, 128),) if run.dry else ((8192, 4096), (8192, 28_672), (16_384, 14_336)):
        for name, (call, bytes_each) in cast_calls(m, n).items():
            if run.late(f"{name} {m}x{n}"):
                return
            moved, op = bytes_each * m * n, name.split()[0]
            source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
            variants: dict[str, Callable[[], object]] = {"copy": partial(torch.empty_like(source).copy_, source)}
            for pin in PINS[name] if DEVICE.type != "cpu" else ("reference",):
                variants[pin] = partial(pinned, op, pin, call)
            found = run.timed(variants)
            copied = found["copy"].median_us
            share = {pin: round(copied / t.median_us, 3) for pin, t in found.items() if pin != "copy"}
            rate = round(moved / copied / 1e6, 3)
            run.row(op=name, rows=m, cols=n, copy_tb_s=rate, share_of_copy=share, times=shown(found))


def pinned(op: str, pin: str, call: Callable[[], object]) -> object:
    with use(**{op: pin}):
        return call()


# Linear layers


def raw_products(m: int, k: int, n: int) -> dict[str, Callable[[], object]]:
    """The three products of a layer alone, in bf16 and in 8 bits from operands that are there."""
    x, w, dy = drawn(m, k), drawn(n, k), drawn(m, n)
    x8, w8, d8, w8_t = (t.to(torch.float8_e4m3fn) for t in (x, w, dy, w.t().contiguous()))
    d8_t, x8_t = (t.to(torch.float8_e4m3fn) for t in (dy.t().contiguous(), x.t().contiguous()))
    factor = one(1.0)

    def bf16() -> None:
        torch.mm(x, w.t()), torch.mm(dy, w), torch.mm(dy.t(), x)

    def fp8() -> None:
        for a, b, fast in ((x8, w8, True), (d8, w8_t, False), (d8_t, x8_t, False)):
            ops.scaled_matmul(a, b, factor, factor, None, "bfloat16", fast)

    return {"bf16 products": bf16, "fp8 products": fp8}


def products(run: Run) -> None:
    """Times of a layer's products by each kind of factor, and of the passes of the row-wise recipe."""
    for (k, n), m in sizes(run):
        if run.late(f"products {k}x{n} {m} tokens", 4.0):
            return
        run.row(layer=f"{k} -> {n}", tokens=m, times=shown(run.timed(pieces(drawn(m, k), drawn(n, k), drawn(m, n)))))


def pieces(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Callable[[], object]]:
    """Forward and the gradient of x, with partial sums in the tensor cores' registers (fast) and not; the weight's
    gradient; then passes."""
    variants: dict[str, Callable[[], object]] = {"bf16 dweight": lambda: torch.mm(dy.t(), x)}
    for kind, (name, a, b) in itertools.product(
        ("tensor", "rows", "blocks"), (("y", x, w), ("dx", dy, w.t().contiguous()))
    ):
        operands = factored(a, b, kind)
        for fast in (False, True) if kind != "blocks" else (False,):
            call = partial(ops.scaled_matmul, *operands, None, "bfloat16", fast)
            variants[f"{name} {kind}{' fast' * fast}"] = call
    for kind in ("tensor", "blocks"):
        operands = factored(dy.t().contiguous(), x.t().contiguous(), kind, square=False)
        variants[f"dweight {kind}"] = partial(ops.scaled_matmul, *operands, None, "bfloat16", False)
    x8, factor = ops.fp8_cast_rows(x)
    variants["cast x"], variants["cast dy"] = partial(ops.fp8_cast_rows, x), partial(ops.fp8_cast_rows, dy)
    variants["widen x, then scale it"] = lambda: x8.to(torch.bfloat16) * factor.to(torch.bfloat16)
    variants["widen x, scale dy"] = lambda: (x8.to(torch.bfloat16), dy * factor.to(torch.bfloat16))
    return variants


def factored(a: Tensor, b: Tensor, kind: str, square: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of a product, cast by factors of tensors, rows or blocks. square: blocks of b, as of a weight."""
    if kind == "tensor":
        return *(t.to(torch.float8_e4m3fn) for t in (a, b)), one(1.0), one(1.0)
    if kind == "rows":
        (a8, a_factor), (b8, b_factor) = ops.fp8_cast_rows(a), ops.fp8_cast_rows(b)
    else:
        a8, a_factor = ops.fp8_cast_blocks(a)[:2]
        b8, b_factor = ops.fp8_cast_blocks(b, "e4m3", True, False, square)[:2]
    return a8, b8, a_factor, b_factor


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients dropped."""

    def once() -> None:
        layer(x).backward(dy)
        x.grad = None
        for p in layer.parameters():
            p.grad = None

    return once


def ours(layer: nn.Linear, recipe: str, run: Run) -> nn.Module:
    """A converted copy whose scales are known."""
    config = FP8Config(recipe=recipe, min_features=16, min_tokens=1) if run.dry else FP8Config(recipe=recipe)
    model = convert_model_to_fp8(nn.Sequential(copy.deepcopy(layer)), config).train()
    x = drawn(256, layer.in_features).requires_grad_()
    step(model, x, drawn(256, layer.out_features))()
    roll(model)
    return model


def torchao(model: nn.Module, recipe: str) -> nn.Module:
    """A copy as torchao converts it; ImportError without it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        copy.deepcopy(model),
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: "lm_head" not in name,
    )


def compiled(model: nn.Module, run: Run) -> Any:
    return torch.compile(model, dynamic=False, backend="aot_eager" if run.dry else "inductor")


def sizes(run: Run) -> list[tuple[tuple[int, int], int]]:
    """(in, out) and tokens of the layers."""
    return [((64, 128), 32), ((128, 64), 32)] if run.dry else list(itertools.product(SHAPES, TOKENS))


def linears(run: Run) -> None:
    """Times of each recipe over those of bf16, as a share of what the bare products gain, R."""
    for (k, n), m in sizes(run):
        if run.late(f"{k}x{n} {m} tokens"):
            return
        torch.manual_seed(0)
        plain = nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
        x, dy = drawn(m, k).requires_grad_(), drawn(m, n)
        variants: dict[str, Callable[[], object]] = {"bf16": step(plain, x, dy), **raw_products(m, k, n)}
        models = {recipe: ours(plain, recipe, run) for recipe in RECIPES}
        variants |= {recipe: step(model, x, dy) for recipe, model in models.items()}
        variants["delayed, weight cast"] = casting_anew(models["delayed"], x, dy)
        missing = eager_peers(variants, plain, x, dy)
        found = run.timed(variants)
        gain = found["bf16 products"].median_us / found["fp8 products"].median_us
        run.row(
            layer=f"{k} -> {n}", tokens=m, R=round(gain, 3), peers=missing or "torchao eager", **gains(found, gain),
            times=shown(found),
        )  # fmt: skip


def casting_anew(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """A step whose weight is cast in it, as the first after an optimizer's is."""
    layers, once = [m for m in model.modules() if isinstance(m, FP8LinearLayer)], step(model, x, dy)

    def anew() -> None:
        for layer in layers:
            layer.refresh()
        once()

    return anew


def eager_peers(variants: dict[str, Callable[[], object]], plain: nn.Linear, x: Tensor, dy: Tensor) -> str:
    """Add torchao's layers; why not, where it cannot be imported or refuses."""
    try:
        for recipe in PEERS:
            once = step(torchao(nn.Sequential(plain), recipe), x, dy)
            once()
            variants[f"torchao {recipe}"] = once
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as problem:
        return f"{type(problem).__name__}: {str(problem)[:300]}"
    return ""


def gains(found: dict[str, Timing], raw: float) -> dict[str, Any]:
    """Over bf16, as a share of R, and over the peer of the same recipe."""
    base = found["bf16"].median_us
    over = {name: base / found[name].median_us for name in found if name.split(",")[0] in RECIPES}
    beside = {
        f"{mine} / {peer}": round(found[name].median_us / found[mine].median_us, 3)
        for peer, kinds in PEERS.items()
        for name in found
        if name.startswith("torchao") and peer in name
        for mine in kinds
        if mine in found
    }
    return {
        "over_bf16": {name: round(value, 3) for name, value in over.items()},
        "share_of_R": {name: round(value / raw, 3) for name, value in over.items()},
        "over_torchao": beside,
    }


def linears_compiled(run: Run) -> None:
    """Ours as it is beside torchao's compiled layers."""
    for (k, n), m in sizes(run):
        for peer, kinds in PEERS.items():
            if run.late(f"torchao {peer} compiled, {k} -> {n}, {m} tokens", 20.0):
                return
            torch._dynamo.reset()
            plain = nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
            x, dy = drawn(m, k).requires_grad_(), drawn(m, n)
            try:
                once = step(compiled(torchao(nn.Sequential(plain), peer), run), x, dy)
                once()
            except (ImportError, RuntimeError, NotImplementedError, ValueError) as problem:
                run.row(peer=peer, refused=f"{type(problem).__name__}: {str(problem)[:300]}")
                continue
            variants = {"bf16": step(plain, x, dy), f"torchao {peer} compiled": once}
            variants |= {kind: step(ours(plain, kind, run), x, dy) for kind in kinds}
            found = run.timed(variants)
            told = gains(found, 1.0)
            run.row(layer=f"{k} -> {n}", tokens=m, over_torchao_compiled=told["over_torchao"], times=shown(found))


# Decoder layers


def llama(run: Run) -> nn.Module:
    """Four layers of a Llama of 8 B without a head, all with the same attention."""
    from transformers import LlamaConfig, LlamaModel

    tilesmith.register_for_transformers()
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if run.dry:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=1024, max_position_embeddings=8192)
    config._attn_implementation = "tilesmith"
    torch.manual_seed(0)
    with DEVICE:  # drawn on a CPU, the weights take ten seconds
        return LlamaModel(config).to(torch.bfloat16).train()


def ours_in_layers(run: Run, ids: Tensor, recipes: tuple[str, ...]) -> dict[str, Callable[[], None]]:
    """Steps of our bf16 and of recipes, their scales known."""
    config = {"min_features": 16, "min_tokens": 1} if run.dry else {}
    models = {"bf16, optimised": tilesmith.optimize(llama(run))}
    for recipe in recipes:
        models[recipe] = convert_model_to_fp8(tilesmith.optimize(llama(run)), FP8Config(recipe=recipe, **config))
    steps = {name: model_step(model, ids) for name, model in models.items()}
    for name, once in steps.items():
        once()
        roll(models[name])
    return steps


def batches(run: Run) -> list[Tensor]:
    shapes = ((2, 16),) if run.dry else ((2, 4096), (4, 4096))
    return [torch.randint(1024, shape, device=DEVICE) for shape in shapes]


def layers(run: Run) -> None:
    """Steps of four layers by each recipe."""
    for ids in batches(run):
        if run.late(f"layers {list(ids.shape)}", 25.0):
            return
        variants = ours_in_layers(run, ids, RECIPES)
        found = run.timed(variants, 200.0)
        base = found["bf16, optimised"].median_us
        run.row(
            tokens=list(ids.shape), over_ours_bf16={k: round(base / t.median_us, 3) for k, t in found.items()},
            peak_gb={k: round(peak_memory(fn, DEVICE) / 1e9, 2) for k, fn in variants.items()}, times=shown(found),
        )  # fmt: skip
        del variants
        gc.collect()


def layers_compiled(run: Run) -> None:
    """Steps of four layers of torchao and in bf16, compiled, beside ours."""
    for ids in batches(run):
        variants = {}
        for name in ("tensorwise", "bf16"):
            if run.late(f"{name} compiled, {list(ids.shape)}", 50.0):
                return
            variants = variants or ours_in_layers(run, ids, ("delayed", "rowwise"))
            torch._dynamo.reset()
            try:
                model = llama(run) if name == "bf16" else torchao(llama(run), name)
                once = model_step(compiled(model, run), ids)
                once()
                once()
            except (ImportError, RuntimeError, NotImplementedError, ValueError) as problem:
                run.row(peer=f"{name}, compiled", refused=f"{type(problem).__name__}: {str(problem)[:300]}")
                continue
            variants[f"{name}, compiled"] = once
            found = run.timed(variants, 200.0)
            delayed = found["delayed"].median_us
            run.row(
                tokens=list(ids.shape), delayed_over={k: round(t.median_us / delayed, 3) for k, t in found.items()},
                peak_gb={f"{name}, compiled": round(peak_memory(once, DEVICE) / 1e9, 2)}, times=shown(found),
            )  # fmt: skip
        del variants
        gc.collect()


def model_step(model: Any, ids: Tensor) -> Callable[[], None]:
    dy: list[Tensor] = []

    def once() -> None:
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        if not dy:
            dy.append(drawn(*out.shape))
        out.backward(dy[0])
        for p in model.parameters():
            p.grad = None

    return once


# Bytes


def kept_bytes(layer: nn.Module, x: Tensor, own: set[int]) -> int:
    """Bytes that a call keeps for its backward, each storage once, those of `own` left out."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(size for place, size in found.items() if place not in own)


def storages(*tensors: Tensor | None) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def bytes_kept(run: Run) -> None:
    """Bytes of activations over torchao's."""
    for k, n in ((64, 128),) if run.dry else SHAPES:
        plain = nn.Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
        x = drawn(64 if run.dry else TOKENS[0], k).requires_grad_()
        mine, peers = {}, {}
        for recipe in RECIPES:
            layer = ours(plain, recipe, run)[0]
            mine[recipe] = kept_bytes(layer, x, storages(layer.weight, *layer.weight_cast()))
        try:
            for peer in PEERS:
                layer = torchao(nn.Sequential(plain), peer)[0]
                peers[peer] = kept_bytes(layer, x, storages(layer.weight))
        except (ImportError, RuntimeError, NotImplementedError, ValueError) as problem:
            run.row(peer="torchao", refused=f"{type(problem).__name__}: {str(problem)[:300]}")
        share = {f"{a} / {p}": round(mine[a] / peers[p], 3) for p, kinds in PEERS.items() if p in peers for a in kinds}
        run.row(layer=f"{k} -> {n}", tokens=x.shape[0], ours=mine, torchao=peers, share=share)


PARTS: dict[str, Callable[[Run], Any]] = {
    "values": values, "casts": casts, "products": products, "linears": linears, "layers": layers, "bytes": bytes_kept,
    "linears_compiled": linears_compiled, "layers_compiled": layers_compiled,
}  # fmt: skip


def run_parts(parts: dict[str, Callable[[Run], Any]], about: str | None) -> int:
    """Run the parts that the command names; 1 where values are wrong."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", action="append", choices=list(parts))
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if DEVICE.type == "cpu" and not given.dry:
        parser.error("this needs a GPU; --dry runs tiny sizes on a CPU")
    run = Run(given.out, given.seconds, given.dry, load(given.out) | provenance())
    for part in given.part or list(parts):
        run.begin(part)
        right = parts[part](run)
        run.row(seconds=round(run.seconds - (run.until - time.monotonic()), 1), right=right is not False)
        if right is False:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_parts(PARTS, __doc__))
