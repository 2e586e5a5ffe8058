"""Rows wider than a program, in Gluon, for kernels whose work on a row takes longer than its mail: parts of rows flow
through shared memory, programs that share a row swap sums.

As rows_gluon.py, but a program posts what it found of its part in memory, and reads what the others posted a few rows
later, when it has long arrived; the parts stay in their slots for so long.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.replay import each_time
from tilesmith.ops import rows_gluon
from tilesmith.ops.gluon_shim import arrive, expect, fence, fetch, gl, gluon, reinterpret, wait
from tilesmith.ops.rows_gluon import LINE, MOST_PARTS, PLAIN, word

# Rows whose sums a mailbox holds. A program may be 2 LAG + 1 rows ahead of another's reading.
DEPTH = 16
MAILS = 2  # numbers that a program posts of a row
_LINE, _DEPTH, _MAILS = gl.constexpr(LINE), gl.constexpr(DEPTH), gl.constexpr(MAILS)
PARTS_LANES = gl.constexpr(32)  # of a warp, which reads what all of them posted
MAILS_OF_PART = gl.constexpr(DEPTH * MAILS)
_MOST_MAILS = gl.constexpr(DEPTH * MAILS * MOST_PARTS)


@gluon.jit
def feed(a_desc, b_desc, a, b, full, empty, first, step, mine, part, WIDTH: gl.constexpr):
    """Fill the slots of two rings with the parts of rows first, first + step, ..., `mine` in all, each slot when its
    last reader has left. For a partition of one warp."""
    SLOTS: gl.constexpr = full.shape[0]
    for i in range(mine):
        slot = i % SLOTS
        wait(empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        fetch(a_desc, [first + i * step, part * (WIDTH // _LINE), 0], full.index(slot), a.index(slot))
        fetch(b_desc, [first + i * step, part * (WIDTH // _LINE), 0], full.index(slot), b.index(slot))


@gluon.jit
def flat(slots, slot, WIDTH: gl.constexpr):
    """A slot as one row."""
    return reinterpret(slots.index(slot), slots.dtype, [WIDTH], PLAIN)


@gluon.jit
def widened(tile, WIDTH: gl.constexpr):
    """A row of WIDTH columns in shared memory in fp32, 8 neighbours a thread. Of bf16 a word is read as an integer and
    taken apart by a shift and a mask: the compiler takes three instructions for its two values."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    if tile.dtype == gl.bfloat16:
        WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        words = reinterpret(tile, gl.int32, [WIDTH // 2], PLAIN).load(WORDS)
        pairs = gl.join((words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True))
        x = gl.convert_layout(gl.reshape(pairs, [WIDTH]), LANES, assert_trivial=True)
    else:
        x = tile.load(LANES).to(gl.float32)
    return x


@gluon.jit
def release(empty, slot):
    """Give a slot that has been read back to `feed`. A warp that has asked shared memory for its values need not have
    them yet, not even behind a barrier, and the tensor memory accelerator does not queue behind it: without the fence
    it may overwrite them first."""
    fence()
    arrive(empty.index(slot))


@gluon.jit
def scratch(NUMBERS: gl.constexpr):
    """Shared memory for what each warp found of NUMBERS sums."""
    return gl.allocate_shared_memory(gl.float32, [NUMBERS, gl.num_warps()], PLAIN)


@gluon.jit
def post(mail_ptr, i, parts, part, WHICH: gl.constexpr, value):
    """Tell the group what this program found of its i-th row."""
    at = mail_ptr + ((i % _DEPTH) * _MAILS + WHICH) * parts + part
    gl.store(at, word(value, i))


@gluon.jit
def peek(mail_ptr, i, parts, WHICH: gl.constexpr):
    """What is in the mailbox for the i-th row: to be asked for early, as it takes a while, and given to `collect`."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, PARTS_LANES, WARP)
    at = mail_ptr + ((i % _DEPTH) * _MAILS + WHICH) * parts + lane
    return gl.load(at, mask=lane < parts, other=0, volatile=True)


@gluon.jit
def collect(words, mail_ptr, i, parts, WHICH: gl.constexpr):
    """What the programs of the group found of their i-th row: fp32 [PARTS_LANES], 0 beyond `parts`, the same in every
    warp. words: from `peek`; the mailbox is read again until all have posted."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    missing = gl.arange(0, PARTS_LANES, WARP) < parts
    while gl.max((missing & ((words >> 32).to(gl.int32) != i + 1)).to(gl.int32), 0) != 0:
        words = peek(mail_ptr, i, parts, WHICH)
    return (words & 0xFFFFFFFF).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def leave(mail_ptr, count_ptr, parts):
    """The last program of a group to end empties its mailbox for the next launch."""
    gone = gl.atomic_add(count_ptr, 1, sem="acq_rel")
    if gone == parts - 1:
        ALL: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        lane = gl.arange(0, _MOST_MAILS, ALL)
        gl.store(mail_ptr + lane, gl.full([_MOST_MAILS], 0, gl.int64, ALL), mask=lane < parts * MAILS_OF_PART)
        gl.store(count_ptr, 0)


_boxes: dict[tuple[int, int], Tensor] = {}  # (device, stream) -> zeros


def mailbox(device: torch.device, groups: int, parts: int) -> Tensor:
    """Zeros for a launch whose programs swap sums, set back by it: a mailbox for each group, then its counters."""
    return each_time(partial(_mailbox, device, groups * (parts * DEPTH * MAILS + 1)))


def _mailbox(device: torch.device, words: int) -> Tensor:
    """Launches on one stream follow each other and share one; one in a CUDA graph, which may run at any time, has its
    own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch.cuda.current_stream(device).cuda_stream
    box = _boxes.get(key)
    if box is None or box.shape[0] < words:
        box = _boxes[key] = torch.zeros(words, dtype=torch.int64, device=device)
    return box


class PartsConfig(NamedTuple):
    """width: columns of a part. slots: how many a program has in shared memory. lag: rows between posting sums of a row
    and reading the others'. per_sm: programs of a multiprocessor. max_registers: of a thread, so that so many fit; 0
    leaves it to the compiler."""

    width: int
    slots: int
    lag: int
    num_warps: int
    per_sm: int
    max_registers: int


def parts_flags(cols: int, parts: int, config: PartsConfig) -> dict[str, Any]:
    """What a kernel is compiled and launched with."""
    return {**rows_gluon.parts_flags(cols, parts, config), "LAG": config.lag}


def fitted(dims: Mapping[str, int], arch: Any, config: PartsConfig, per_sm: int) -> PartsConfig:
    """`config` with as many slots as fit beside each other; one program a multiprocessor where fewer than two would."""
    slots = (arch.shared_memory // per_sm - 2048) // (config.width * dims["bytes"])
    if slots < 2 and per_sm > 1:
        return fitted(dims, arch, config._replace(max_registers=0), 1)
    slots = max(1, min(6, slots))
    return config._replace(slots=slots, lag=min(config.lag, slots - 1), per_sm=per_sm)
