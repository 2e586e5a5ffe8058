"""Combines the partial results of split-KV attention: a Triton kernel that both Triton's and Hopper's decode launch."""

import triton
import triton.language as tl


@triton.jit
def join_sink(lse, sink):
    """A sink's logit joins the denominator: the share that stays with the keys, and the new lse."""
    top = tl.maximum(lse, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    keys = tl.exp(lse - shift)
    both = keys + tl.exp(sink - shift)
    return keys / tl.where(both == 0.0, 1.0, both), shift + tl.log(both)


@triton.jit(do_not_specialize=("rows", "tokens", "heads", "splits"))
def _attention_combine_kernel(
    part_out_ptr, part_lse_ptr, sinks_ptr, out_ptr, out_row, out_head, out_token, lse_ptr, rows, tokens, heads, splits,
    DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """CTA (batch row, query head, token): the mean of the splits' results, weighted by exp(lse). CHAINED: it may
    have started before they are there."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in tl.range(0, splits, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        at = chunk.to(tl.int64) * rows + row
        mask = (chunk < splits)[:, None] & (features < DIM_V)[None, :]
        part = tl.load(part_out_ptr + at[:, None] * DIM_V + features[None, :], mask=mask, other=0.0).to(tl.float32)
        part_lse = tl.load(part_lse_ptr + at, mask=chunk < splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(part_lse - shift)
        decay = tl.exp(top - shift)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        top = new_top
    out = acc / tl.where(total == 0.0, 1.0, total)
    lse = top + tl.log(total)
    head = row // tokens % heads
    if sinks_ptr is not None:
        share, lse = join_sink(lse, tl.load(sinks_ptr + head).to(tl.float32))
        out *= share
    tl.store(lse_ptr + row, lse)
    out_at = out_ptr + row // tokens // heads * out_row + head * out_head + row % tokens * out_token
    tl.store(out_at + features, out.to(out_ptr.dtype.element_ty), mask=features < DIM_V)
