"""rope and rope_vjp in Triton: one launch rotates queries and keys, by the angles or, backward, by their opposites."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.engine import Space, cdiv, launch, next_power_of_2, optimize_kernel, register_kernel, rehearsed
from tilesmith.ops.rotary.arguments import rope_arguments, rope_vjp_arguments
from tilesmith.ops.rotary.rows import row_stride, rows_grid

# integers that change from call to call, which no address is a multiple of
VARYING = (
    "offset", "num_positions", "num_rows", "token_blocks", "tiles", "strips", "documents", "search_steps",
)  # fmt: skip


@triton.jit
def positions_of(
    row, tokens, positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step,
    cu_seqlens_ptr, cu_seqlens_step, offset, documents, search_steps, num_tokens,
    POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """int64 positions of a block of tokens."""
    if POSITIONS:
        entry = positions_ptr + row * positions_row + tokens.to(tl.int64) * positions_token
        return tl.load(entry, mask=tokens < num_tokens, other=0).to(tl.int64)
    position = tokens.to(tl.int64) + offset
    if PACKED:
        # The last document that starts at or before the token, by halving [low, high].
        low = tl.zeros_like(tokens)
        high = low + (documents - 1)
        for _ in range(search_steps):
            middle = (low + high + 1) // 2
            after = tl.load(cu_seqlens_ptr + middle.to(tl.int64) * cu_seqlens_step) > tokens
            high = tl.where(after, middle - 1, high)
            low = tl.where(after, low, middle)
        document = low.to(tl.int64)
        position -= tl.load(cu_seqlens_ptr + document * cu_seqlens_step).to(tl.int64)
        if OFFSETS:
            position += tl.load(offsets_ptr + document * offsets_step).to(tl.int64)
    elif OFFSETS:
        position += tl.load(offsets_ptr + row * offsets_step).to(tl.int64)
    return position


@triton.jit
def line_pointers(ptr, row_step, head_step, token_step, row, heads, tokens):
    """Pointers [tokens, heads, 1] to the lines of a row of the batch."""
    line = heads.to(tl.int64)[None, :, None] * head_step + tokens.to(tl.int64)[:, None, None] * token_step
    return ptr + row * row_step + line


@triton.jit
def split_line(x_ptr, x_dim, inside, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two features of each pair, fp32; x_ptr: [tokens, heads, 1] pointers to the lines."""
    if INTERLEAVED:
        # Whole lines are loaded and split in registers: accesses with a stride of two elements would not coalesce.
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        x = tl.load(x_ptr + both * x_dim, mask=inside & (both < 2 * PAIRS), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_PAIRS, 2)))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = inside & (cols < PAIRS)
        first = tl.load(x_ptr + cols * x_dim, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + (PAIRS + cols) * x_dim, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def join_line(
    y_ptr, y_dim, first, second, inside,
    PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store what `split_line` loads."""
    first, second = first.to(y_ptr.dtype.element_ty), second.to(y_ptr.dtype.element_ty)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        y = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_PAIRS))
        tl.store(y_ptr + both * y_dim, y, mask=inside & (both < 2 * PAIRS))
    else:
        cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = inside & (cols < PAIRS)
        tl.store(y_ptr + cols * y_dim, first, mask=mask)
        tl.store(y_ptr + (PAIRS + cols) * y_dim, second, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _rope_kernel(
    q_ptr, q_row, q_head, q_token, q_dim, q_out_ptr, q_out_row, q_out_head, q_out_token, q_out_dim,
    k_ptr, k_row, k_head, k_token, k_dim, k_out_ptr, k_out_row, k_out_head, k_out_token, k_out_dim,
    cos_ptr, sin_ptr, cos_row, sin_row,
    positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step, cu_seqlens_ptr, cu_seqlens_step,
    offset, num_positions, num_rows, num_tokens, q_heads, k_heads, documents, search_steps,
    COS_POSITION: tl.constexpr, COS_PAIR: tl.constexpr, SIN_POSITION: tl.constexpr, SIN_PAIR: tl.constexpr,
    PER_TOKEN: tl.constexpr, POSITIONS: tl.constexpr, OFFSETS: tl.constexpr, PACKED: tl.constexpr,
    OPPOSITE: tl.constexpr, LOAD_INTERLEAVED: tl.constexpr, STORE_INTERLEAVED: tl.constexpr, LAST: tl.constexpr,
    PAIRS: tl.constexpr, Q_REST: tl.constexpr, K_REST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Program: a block of tokens of one row, STEPS blocks of heads of q or, after those, of k, all by the same angles.
    Neighbours share tokens. Q_REST, K_REST: features of a head that are copied, LAST: before the rotated ones."""
    head_block = tl.program_id(0) % HEAD_BLOCKS
    token_block = tl.program_id(0) // HEAD_BLOCKS
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    if row >= num_rows:
        return
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS * STEPS)
    is_q = head_block < q_blocks
    num_heads = tl.where(is_q, q_heads, k_heads)
    x_head = tl.where(is_q, q_head, k_head).to(tl.int64)
    x_dim = tl.where(is_q, q_dim, k_dim).to(tl.int64)
    y_head = tl.where(is_q, q_out_head, k_out_head).to(tl.int64)
    y_dim = tl.where(is_q, q_out_dim, k_out_dim).to(tl.int64)
    tokens = token_block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    heads = tl.where(is_q, head_block, head_block - q_blocks) * (BLOCK_HEADS * STEPS) + tl.arange(0, BLOCK_HEADS)
    x_ptr = line_pointers(
        tl.where(is_q, q_ptr, k_ptr), tl.where(is_q, q_row, k_row), x_head, tl.where(is_q, q_token, k_token),
        row, heads, tokens,
    )  # fmt: skip
    y_ptr = line_pointers(
        tl.where(is_q, q_out_ptr, k_out_ptr), tl.where(is_q, q_out_row, k_out_row), y_head,
        tl.where(is_q, q_out_token, k_out_token), row, heads, tokens,
    )  # fmt: skip

    num_rest = Q_REST if Q_REST == K_REST else tl.where(is_q, Q_REST, K_REST)
    rotated = num_rest if LAST else 0
    rest = tl.arange(0, BLOCK_REST)[None, None, :]
    copied = rest if LAST else 2 * PAIRS + rest

    # The tiles are asked for before the angles, so that their longer way from DRAM overlaps with theirs.
    x, unturned = (), ()
    for step in tl.static_range(STEPS):
        inside = (tokens[:, None, None] < num_tokens) & (heads[None, :, None] + step * BLOCK_HEADS < num_heads)
        x_line = x_ptr + step * BLOCK_HEADS * x_head
        x += (split_line(x_line + rotated * x_dim, x_dim, inside, PAIRS, BLOCK_PAIRS, LOAD_INTERLEAVED),)
        if Q_REST + K_REST > 0:
            unturned += (tl.load(x_line + copied * x_dim, mask=inside & (rest < num_rest)),)

    if PER_TOKEN:
        position = tokens.to(tl.int64)
    else:
        position = positions_of(
            row, tokens, positions_ptr, positions_row, positions_token, offsets_ptr, offsets_step,
            cu_seqlens_ptr, cu_seqlens_step, offset, documents, search_steps, num_tokens, POSITIONS, OFFSETS, PACKED,
        )  # fmt: skip
    # Every head of the tile asks for its angles again: loads of one shape share one layout, and L1 serves the repeats.
    # With [tokens, 1, pairs] angles the whole tile changes threads through shared memory, there and back.
    cols = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    position = tl.broadcast_to(position[:, None, None], (BLOCK_TOKENS, BLOCK_HEADS, 1))
    held = (position >= 0) & (position < num_positions) & (cols < PAIRS)
    cos_ptr += row * cos_row + position * COS_POSITION + cols * COS_PAIR
    sin_ptr += row * sin_row + position * SIN_POSITION + cols * SIN_PAIR
    # What streams through the L2 cache would drive angles out between a token of one row of the batch and the next.
    cos = tl.load(cos_ptr, mask=held, other=float("nan"), eviction_policy="evict_last").to(tl.float32)
    sin = tl.load(sin_ptr, mask=held, other=float("nan"), eviction_policy="evict_last").to(tl.float32)
    if OPPOSITE:
        sin = -sin

    for step in tl.static_range(STEPS):
        inside = (tokens[:, None, None] < num_tokens) & (heads[None, :, None] + step * BLOCK_HEADS < num_heads)
        y_line = y_ptr + step * BLOCK_HEADS * y_head
        first, second = x[step]
        y_first, y_second = first * cos - second * sin, second * cos + first * sin
        y_rotated = y_line + rotated * y_dim
        join_line(y_rotated, y_dim, y_first, y_second, inside, PAIRS, BLOCK_PAIRS, STORE_INTERLEAVED)
        if Q_REST + K_REST > 0:
            tl.store(y_line + copied * y_dim, unturned[step], mask=inside & (rest < num_rest))


class RopeConfig(NamedTuple):
    """block_tokens, block_heads: a tile. steps: tiles of heads that a program turns by the same angles."""

    block_tokens: int
    block_heads: int
    steps: int
    num_warps: int


def _rotate(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    last: bool,
    halved: bool,
    opposite: bool,
    config: RopeConfig,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, either of which may be absent; an absent one yields an empty tensor."""
    given = q if q is not None else k
    if given is None:
        return cos.new_empty(0), cos.new_empty(0)
    q_out, k_out = (given.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k))
    batch, _, num_tokens, _ = given.shape
    q_dim, k_dim = (given.shape[3] if x is None else x.shape[3] for x in (q, k))
    q_heads, k_heads = (0 if x is None else x.shape[1] for x in (q, k))
    heads = config.block_heads * config.steps
    head_blocks = cdiv(q_heads, heads) + cdiv(k_heads, heads)
    token_blocks = cdiv(num_tokens, config.block_tokens)
    if batch * token_blocks * head_blocks * (q_dim + k_dim) == 0:
        return q_out, k_out
    pairs, documents = cos.shape[-1], 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Absent tensors are stood in for by one that is never read through them.
    q, q_write = (k, k_out) if q is None else (q, q_out)
    k, k_write = (q, q_out) if k is None else (k, k_out)
    rest = q_dim - 2 * pairs, k_dim - 2 * pairs
    stored = interleaved and not halved
    by_position, by_row, by_document = (cos if x is None else x for x in (positions, offsets, cu_seqlens))
    launch(
        _rope_kernel, (head_blocks * token_blocks, *rows_grid(batch)),
        q, *q.stride(), q_write, *q_write.stride(), k, *k.stride(), k_write, *k_write.stride(),
        cos, sin, row_stride(cos, 3), row_stride(sin, 3),
        by_position, row_stride(by_position, 2), by_position.stride(-1), by_row, by_row.stride(0),
        by_document, by_document.stride(0),
        offset, cos.shape[-2], batch, num_tokens, q_heads, k_heads, documents, (documents - 1).bit_length(),
        COS_POSITION=cos.stride(-2), COS_PAIR=cos.stride(-1), SIN_POSITION=sin.stride(-2), SIN_PAIR=sin.stride(-1),
        PER_TOKEN=cos.ndim == 3, POSITIONS=positions is not None, OFFSETS=offsets is not None,
        PACKED=cu_seqlens is not None, OPPOSITE=opposite, LAST=last,
        LOAD_INTERLEAVED=stored if opposite else interleaved, STORE_INTERLEAVED=interleaved if opposite else stored,
        PAIRS=pairs, Q_REST=rest[0], K_REST=rest[1], BLOCK_TOKENS=config.block_tokens, BLOCK_HEADS=config.block_heads,
        HEAD_BLOCKS=head_blocks, STEPS=config.steps, BLOCK_PAIRS=next_power_of_2(max(1, pairs)),
        BLOCK_REST=next_power_of_2(max(1, *rest)), num_warps=config.num_warps,
    )  # fmt: skip
    return q_out, k_out


def _wanted(dq_out: Tensor | None, dk_out: Tensor | None, output_mask: Sequence[bool]) -> list[Tensor | None]:
    return [d if want else None for d, want in zip((dq_out, dk_out), output_mask, strict=True)]


def _reasons(call) -> list[str]:
    return double_reasons({"q": call.q, "cos": call.cos})


def _vjp_reasons(call) -> list[str]:
    return double_reasons({"dq_out": call.dq_out, "dk_out": call.dk_out, "cos": call.cos})


def double_reasons(tensors: dict) -> list[str]:
    return [
        f"{name} is float64; this kernel computes in float32"
        for name, x in tensors.items()
        if x is not None and x.dtype == torch.float64
    ]


def _dims(q, k, *_) -> dict[str, int]:
    shapes = [x.shape for x in (q, k) if x is not None] or [(0, 0, 0, 0)]
    batch, _, tokens, _ = shapes[0]
    dim = max(shape[3] for shape in shapes)
    return {"tokens": batch * tokens, "heads": sum(shape[1] for shape in shapes), "dim": dim}


def _vjp_dims(dq_out, dk_out, *rest) -> dict[str, int]:
    return _dims(*_wanted(dq_out, dk_out, rest[-1]))


def _default(dims, arch, dtype) -> RopeConfig:
    # One warp per CTA; each of its threads has one 16-byte access for each half of a bfloat16 head, twice. H200, head
    # dims 128 / 64: 0.957 / 0.956 of the copy rate. What was tried without gain: docs/log/rotary.md.
    lines = max(1, 512 // next_power_of_2(max(1, dims["dim"])))
    heads = min(8, next_power_of_2(max(1, dims["heads"])))
    if dims["tokens"] * dims["heads"] <= 4 * heads * arch.sms:  # few tokens: spread them over the device
        return RopeConfig(1, heads, steps=1, num_warps=1)
    each = min(heads, lines)
    return RopeConfig(lines // each, each, min(2, max(1, next_power_of_2(dims["heads"]) // each)), num_warps=1)


CHOICES = {
    "block_tokens": (1, 2, 4, 8, 16),
    "block_heads": (1, 2, 4, 8, 16, 32),
    "steps": (1, 2, 4),
    "num_warps": (1, 2, 4, 8),
}
ROPE_SPACE = Space(default=_default, dims=_dims, choices=CHOICES)
ROPE_VJP_SPACE = Space(default=_default, dims=_vjp_dims, choices=CHOICES)


@register_kernel("rope", backend="triton", rank=20, rejects=_reasons, plans=rehearsed)
@optimize_kernel(space=ROPE_SPACE)
@rope_arguments
def rope(call, *, config: RopeConfig) -> tuple[Tensor, Tensor]:
    """Launch over (row, block of tokens, block of heads of q and k)."""
    return _rotate(*call, False, config)


@register_kernel("rope_vjp", backend="triton", rank=20, rejects=_vjp_reasons, plans=rehearsed)
@optimize_kernel(space=ROPE_VJP_SPACE)
@rope_vjp_arguments
def rope_vjp(call, *, config: RopeConfig) -> tuple[Tensor, Tensor]:
    """The same launch with opposite angles."""
    wanted = _wanted(call.dq_out, call.dk_out, call.output_mask)
    return _rotate(*wanted, *call[2:-1], True, config)
