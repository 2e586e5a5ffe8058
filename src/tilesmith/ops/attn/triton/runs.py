"""Triton kernels of copy_runs and add_runs: both tensors and all runs in one launch."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.alignment import is_16_byte_aligned
from tilesmith.engine import Space, launch, optimize_kernel, register_kernel, torch_private
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.engine.recording import each_time
from tilesmith.ops.attn.runs_reference import each_run

WIDEST = 4096  # columns of a tensor at most
HELD = 32  # elements of a tensor that a thread holds at most, where a line has no more for it
NO_TILE = 2**31 - 1  # behind all others


@triton.jit
def _lines(ptr, strides, batch, head, tokens, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the lines of some tokens of a head, and which columns they have."""
    offsets = batch * strides[0] + head * strides[1] + tokens * strides[2]
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 128 // ptr.dtype.element_ty.primitive_bitwidth)
    cols = tl.arange(0, BLOCK_D)[None, :]
    return ptr + offsets[:, None] + cols, cols < DIM


@triton.jit
def _copy_runs_kernel(
    a_ptr, b_ptr, into_a_ptr, into_b_ptr, runs_ptr, a_strides, b_strides, into_a_strides, into_b_strides, lanes, heads,
    RUNS: tl.constexpr, DIM_A: tl.constexpr, DIM_B: tl.constexpr, ALIGNED_A: tl.constexpr, ALIGNED_B: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # all heads of some tokens are neighbours in time: what is by token in memory is then moved in whole blocks
    tile = tl.program_id(0) // lanes
    lane = (tl.program_id(0) % lanes).to(tl.int64)
    batch, head = lane // heads, lane % heads
    first_tiles = tl.load(runs_ptr + tl.arange(0, RUNS))
    run = tl.sum((first_tiles <= tile).to(tl.int32)) - 1
    place = (tile - tl.load(runs_ptr + run)) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = (place < tl.load(runs_ptr + 3 * RUNS + run))[:, None]
    source = (tl.load(runs_ptr + RUNS + run) + place).to(tl.int64)
    target = (tl.load(runs_ptr + 2 * RUNS + run) + place).to(tl.int64)
    a_lines, cols = _lines(a_ptr, a_strides, batch, head, source, DIM_A, BLOCK_A, ALIGNED_A)
    a = tl.load(a_lines, mask=held & cols)
    if DIM_B > 0:  # both loads before the first store, which they could not pass
        b_lines, b_cols = _lines(b_ptr, b_strides, batch, head, source, DIM_B, BLOCK_B, ALIGNED_B)
        b = tl.load(b_lines, mask=held & b_cols)
    into_lines, _ = _lines(into_a_ptr, into_a_strides, batch, head, target, DIM_A, BLOCK_A, ALIGNED_A)
    tl.store(into_lines, a, mask=held & cols)
    if DIM_B > 0:
        into_lines, _ = _lines(into_b_ptr, into_b_strides, batch, head, target, DIM_B, BLOCK_B, ALIGNED_B)
        tl.store(into_lines, b, mask=held & b_cols)


@triton.jit
def _add_runs_kernel(
    a_ptr, b_ptr, more_a_ptr, more_b_ptr, into_a_ptr, into_b_ptr, runs_ptr,
    a_strides, b_strides, more_a_strides, more_b_strides, into_a_strides, into_b_strides, lanes, heads, tokens, count,
    RUNS: tl.constexpr, DIM_A: tl.constexpr, DIM_B: tl.constexpr, ALIGNED_A: tl.constexpr, ALIGNED_B: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """IN_PLACE: into lies where the sums do, so that tokens which no run meets are neither read nor written."""
    tile = tl.program_id(0) // lanes
    first, end = tile * BLOCK_T, tokens
    if IN_PLACE:
        first_tiles = tl.load(runs_ptr + 3 * RUNS + tl.arange(0, RUNS))
        span = runs_ptr + tl.sum((first_tiles <= tile).to(tl.int32)) - 1
        first = tl.load(span + 4 * RUNS) + (tile - tl.load(span + 3 * RUNS)) * BLOCK_T
        end = tl.load(span + 5 * RUNS)
    lane = (tl.program_id(0) % lanes).to(tl.int64)
    batch, head = lane // heads, lane % heads
    place = first + tl.arange(0, BLOCK_T)
    held, token = (place < end)[:, None], place.to(tl.int64)
    a_lines, cols = _lines(a_ptr, a_strides, batch, head, token, DIM_A, BLOCK_A, ALIGNED_A)
    a = tl.load(a_lines, mask=held & cols)
    b = a
    if DIM_B > 0:
        b_lines, b_cols = _lines(b_ptr, b_strides, batch, head, token, DIM_B, BLOCK_B, ALIGNED_B)
        b = tl.load(b_lines, mask=held & b_cols)
    for run in range(count):
        low = tl.load(runs_ptr + RUNS + run)
        high = low + tl.load(runs_ptr + 2 * RUNS + run)
        if (low < first + BLOCK_T) & (high > first):
            source = (tl.load(runs_ptr + run) + place - low).to(tl.int64)
            inside = ((place >= low) & (place < high))[:, None]
            lines, _ = _lines(more_a_ptr, more_a_strides, batch, head, source, DIM_A, BLOCK_A, ALIGNED_A)
            more = tl.load(lines, mask=inside & cols)
            # where, not + 0: -0 stays -0
            a = tl.where(inside, (a.to(tl.float32) + more.to(tl.float32)).to(a.dtype), a)
            if DIM_B > 0:
                lines, _ = _lines(more_b_ptr, more_b_strides, batch, head, source, DIM_B, BLOCK_B, ALIGNED_B)
                more = tl.load(lines, mask=inside & b_cols)
                b = tl.where(inside, (b.to(tl.float32) + more.to(tl.float32)).to(b.dtype), b)
    into_lines, _ = _lines(into_a_ptr, into_a_strides, batch, head, token, DIM_A, BLOCK_A, ALIGNED_A)
    tl.store(into_lines, a.to(into_a_ptr.dtype.element_ty), mask=held & cols)
    if DIM_B > 0:
        into_lines, _ = _lines(into_b_ptr, into_b_strides, batch, head, token, DIM_B, BLOCK_B, ALIGNED_B)
        tl.store(into_lines, b.to(into_b_ptr.dtype.element_ty), mask=held & b_cols)


def _rejects_copy(call) -> list[str]:
    return _rejects({"a": call.a, "b": call.b, "into_a": call.into_a, "into_b": call.into_b})


def _rejects_add(call) -> list[str]:
    names = ("a", "b", "more_a", "more_b", "into_a", "into_b")
    reasons = _rejects({name: getattr(call, name) for name in names})
    for name in names:
        if getattr(call, name).dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"{name} is {getattr(call, name).dtype}; float32, float16 and bfloat16 are supported")
    return reasons


def _rejects(tensors: dict) -> list[str]:
    reasons = []
    for name, x in tensors.items():
        if not x.unit:
            reasons.append(f"{name} has a last stride other than 1")
        if x.cols > WIDEST:
            reasons.append(f"{name} has head dim {x.cols}; at most {WIDEST} is supported")
    return reasons


class RunsConfig(NamedTuple):
    """block_tokens: tokens of a program, fewer where a thread would hold more than `HELD` elements of a tensor."""

    block_tokens: int
    num_warps: int


def _copy_dims(a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]) -> dict[str, int]:
    return _dims(a, b, sum(runs[2::3]))


def _add_dims(
    a: Tensor, b: Tensor, more_a: Tensor, more_b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]
) -> dict[str, int]:
    return _dims(a, b, sum(runs[2::3]) if _is(a, into_a) and _is(b, into_b) else a.shape[2])


def _dims(a: Tensor, b: Tensor, tokens: int) -> dict[str, int]:
    return {"rows": a.shape[0] * a.shape[1] * tokens, "dim": max(a.shape[3], b.shape[3])}


def _default(dims, arch, dtype) -> RunsConfig:
    return RunsConfig(max(1, 4096 // next_power_of_2(dims["dim"])), 4)


CHOICES = {"block_tokens": (8, 16, 32, 64, 128), "num_warps": (2, 4, 8)}


@register_kernel("copy_runs", backend="triton", rank=20, rejects=_rejects_copy)
@optimize_kernel(space=Space(dims=_copy_dims, default=_default, choices=CHOICES))
def copy_runs(
    a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int], *, config: RunsConfig
) -> None:  # fmt: skip
    """One launch: a program moves some tokens of a run, of one head, of both tensors."""
    spans = [(0, tokens) for tokens in runs[2::3]]
    _launch(_copy_runs_kernel, config, (a, b, into_a, into_b), runs, spans, _copy_rows)


@register_kernel("add_runs", backend="triton", rank=20, rejects=_rejects_add)
@optimize_kernel(space=Space(dims=_add_dims, default=_default, choices=CHOICES))
def add_runs(
    a: Tensor,
    b: Tensor,
    more_a: Tensor,
    more_b: Tensor,
    into_a: Tensor,
    into_b: Tensor,
    runs: Sequence[int],
    *,
    config: RunsConfig,
) -> None:
    """One launch: a program reads some tokens of a head once, adds what meets them, and rounds at the end. Of sums that
    are written in place it has the tokens that runs meet alone."""
    in_place = _is(a, into_a) and _is(b, into_b)
    spans = _met(runs) if in_place else [(0, a.shape[2])]
    tensors, sizes = (a, b, more_a, more_b, into_a, into_b), (a.shape[2], len(runs) // 3)
    _launch(_add_runs_kernel, config, tensors, runs, spans, _add_rows, *sizes, IN_PLACE=in_place)


def _is(x: Tensor, into: Tensor) -> bool:
    """Whether one lies where the other does, element by element."""
    return x.numel() == 0 or (x.data_ptr(), x.dtype, x.stride()) == (into.data_ptr(), into.dtype, into.stride())


def _met(runs: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of the sum that runs meet, as ranges that are apart."""
    found: list[tuple[int, int]] = []
    for low, high in sorted((to, to + tokens) for _, to, tokens in each_run(runs) if tokens):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _launch(
    kernel, config: RunsConfig, tensors: Sequence[Tensor], runs: Sequence[int], spans: Sequence[tuple[int, int]],
    rows: Callable[..., list[tuple[int, ...]]], *sizes: int, **more: bool,
) -> None:  # fmt: skip
    """spans: ranges of tokens that programs divide among themselves. rows: makes the table that the kernel reads."""
    a, b = tensors[:2]
    if a.shape[3] == 0:  # b alone
        tensors = [x for pair in zip(tensors[1::2], tensors[::2]) for x in pair]
        a, b = b, a
    batch, heads, _, dim = a.shape
    block_a, block_b = next_power_of_2(dim), next_power_of_2(b.shape[3])
    block_t = max(1, min(config.block_tokens, HELD * 32 * config.num_warps // max(block_a, block_b)))
    tiles = sum(cdiv(high - low, block_t) for low, high in spans)
    if batch * heads * dim * tiles == 0:
        return
    table = each_time(partial(_table, rows, tuple(runs), block_t, a.device))
    launch(
        kernel, (batch * heads * tiles,), *tensors, table, *(x.stride()[:3] for x in tensors), batch * heads, heads,
        *sizes, RUNS=table.shape[1], DIM_A=dim, DIM_B=b.shape[3],
        ALIGNED_A=all(map(is_16_byte_aligned, tensors[::2])), ALIGNED_B=all(map(is_16_byte_aligned, tensors[1::2])),
        BLOCK_T=block_t, BLOCK_A=block_a, BLOCK_B=block_b, **more, num_warps=config.num_warps,
    )  # fmt: skip


def _table(
    rows: Callable[..., list[tuple[int, ...]]], runs: tuple[int, ...], block_t: int, device: torch.device
) -> Tensor:  # fmt: skip
    """What `rows` gives, int32, on the device."""
    if device.type != "cuda":
        return _kept(rows, runs, block_t, device, 0)
    if not torch.cuda.is_current_stream_capturing():
        return _kept(rows, runs, block_t, device, torch_private.raw_stream(torch_private.current_device()))
    made = rows(runs, block_t)  # a graph would read memory of the host again at each replay
    table = torch.empty(len(made), len(made[0]), dtype=torch.int32, device=device)
    for place, value in zip(table.view(-1), (number for row in made for number in row)):
        place.fill_(value)
    return table


@lru_cache(maxsize=512)
def _kept(
    rows: Callable[..., list[tuple[int, ...]]], runs: tuple[int, ...], block_t: int, device: torch.device, stream: int
) -> Tensor:  # fmt: skip
    """stream: on which it is written, and read by later launches."""
    made = torch.tensor(rows(runs, block_t), dtype=torch.int32)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)  # the host does not wait for what the stream does before


def _copy_rows(runs: tuple[int, ...], block_t: int) -> list[tuple[int, ...]]:
    """[4, runs], of which there are a power of two: the first tile of each, where it begins, where it goes, its
    tokens."""
    found, tiles = [], 0
    for at, to, tokens in each_run(runs):
        found.append((tiles, at, to, tokens))
        tiles += cdiv(tokens, block_t)
    return list(zip(*_padded(found, len(found), (NO_TILE, 0, 0, 0))))


def _add_rows(runs: tuple[int, ...], block_t: int) -> list[tuple[int, ...]]:
    """[6, runs], of which there are a power of two: where each begins, where it goes, its tokens; then, of as many
    ranges of tokens that runs meet, the first tile of each, its first token, and the one behind its last."""
    each, spans, tiles = list(each_run(runs)), [], 0
    for low, high in _met(runs):
        spans.append((tiles, low, high))
        tiles += cdiv(high - low, block_t)
    found = _padded(each, len(each), (0, 0, 0)), _padded(spans, len(each), (NO_TILE, 0, 0))
    return [row for some in found for row in zip(*some)]


def _padded(rows: list[tuple[int, ...]], count: int, rest: tuple[int, ...]) -> list[tuple[int, ...]]:
    """As many rows as the next power of two after `count`."""
    return rows + [rest] * (next_power_of_2(max(1, count)) - len(rows))
