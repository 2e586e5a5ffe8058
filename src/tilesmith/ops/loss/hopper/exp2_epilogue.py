"""linear_cross_entropy on Hopper without a pass over the logits: the epilogue of the matmul that would store logits
stores their exp2.

Let z be a row's scores in base 2 and r its reference, the score of the label. The epilogue stores E = 2^(z - r) in
bf16, whose exponents reach as far as fp32's, and the sums of E over each tile. With s, the sum of a row, the loss is ln
s, and the gradient of the logits is hit · (E / s - 1 at the label), that is f · (E - s at the label) with f = hit / s.
The matmuls of the gradients therefore take E, less s at the label, in place of the logits' gradient; f multiplies x on
the one side and dx on the other.

Where the exponentials of a row overflow, because its largest score is some 40 nats above the label's, those of the
whole chunk are computed again, relative to the maximum in such rows. The host cannot know this: the kernels are
launched each time and end at once unless a flag in memory is 1. (After Quack's pipeline of scaled exponentials, which
has a reference for each tile of a row, and factors between the tiles of its matmuls.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilesmith.device.gluon.matmul import (
    COLS,
    matmul_arguments,
    persistent_matmul,
    split_columns,
    store_half_tile,
    tma_accepts,
)
from tilesmith.device.gluon.shim import gl, gluon, grid_dependency_wait
from tilesmith.device.triton.column_sums import chained
from tilesmith.engine import cdiv, launch
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.loss.chunks import Chunks, add_product
from tilesmith.ops.loss.reference import Terms
from tilesmith.ops.loss.token_sums import scaled_rows

LOG2E, LN2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(2.0**60)  # of a sum, so that matmuls of E with weight stay far from overflow
LAUNCHES, LAUNCH = 5, 2e-6  # in the place of a pass over logits, and seconds of each
MOST_FEATURES = 2048  # of a token; with 3,072 this takes 0.99 of the time of a pass over logits, with 4,096 1.01
_COLS = gl.constexpr(COLS)


@triton.jit
def label_scores_kernel(
    x_ptr, weight_ptr, target_ptr, scores_ptr, references_ptr, x_stride, weight_stride, hidden, classes, ignore_index,
    again_ptr, power, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The score of each token's label, in base 2, and the token's reference: that score, or inf where the token is
    ignored, so that its exponentials are 0. The flag becomes 0. CHAINED, here and below: launched by PDL."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(again_ptr, 0)
    target = tl.load(target_ptr + row).to(tl.int64)
    label = tl.where((target >= 0) & (target < classes), target, 0)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < hidden, other=0.0).to(tl.float32)
        products += x * tl.load(weight_ptr + label * weight_stride + at, mask=at < hidden, other=0.0).to(tl.float32)
    score = tl.sum(products, 0) * power
    tl.store(scores_ptr + row, score)
    tl.store(references_ptr + row, tl.where(target == ignore_index, float("inf"), score))


@gluon.jit
def _references(row, LAYOUT: gl.constexpr, references_ptr, sums_ptr, rows, cols, power, EVEN: gl.constexpr):
    """Those of 64 rows: loaded before the products, they cost no wait after them."""
    index = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return gl.load(references_ptr + index, mask=index < rows, other=0.0)


@gluon.jit
def _factors(row, LAYOUT: gl.constexpr, references_ptr, factors_ptr, rows, cols, power):
    index = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return gl.load(factors_ptr + index, mask=index < rows, other=0.0)


@gluon.jit
def _exp2_of(scores, references, col, cols, power, EVEN: gl.constexpr):
    """2^(score - reference) for some columns of 64 rows, and their sums."""
    exps = gl.exp2(scores * power - references[:, None])
    if not EVEN:
        within = col + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)) < cols
        exps = gl.where(within[None, :], exps, 0.0)
    return exps, gl.sum(exps, 1)


@gluon.jit
def _exp2_epilogue(
    acc, references, row, col, out_desc, tile, references_ptr, sums_ptr, rows, cols, power, EVEN: gl.constexpr
):  # fmt: skip
    """The epilogue. One half of the tile is stored by TMA while the exponentials of the other are computed."""
    left, right = split_columns(acc)
    references = gl.convert_layout(references, gl.SliceLayout(1, left.type.layout))
    exps, total = _exp2_of(left, references, col, cols, power, EVEN)
    store_half_tile(exps, row, col, out_desc, tile)
    exps, more = _exp2_of(right, references, col + _COLS // 2, cols, power, EVEN)
    index = row + gl.arange(0, 64, total.type.layout)
    gl.store(sums_ptr + (col // _COLS).to(gl.int64) * rows + index, total + more, mask=index < rows)
    store_half_tile(exps, row, col + _COLS // 2, out_desc, tile)


@gluon.jit
def _max_epilogue(acc, factors, row, col, out_desc, tile, references_ptr, factors_ptr, rows, cols, power):
    index = row + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    within = col + gl.arange(0, _COLS, gl.SliceLayout(0, acc.type.layout)) < cols
    most = gl.max(gl.where(within[None, :], acc * power, float("-inf")), 1)
    gl.atomic_max(references_ptr + index, most, mask=factors == float("inf"))


@gluon.jit
def exp2_matmul_kernel(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, steps, references_ptr, sums_ptr, again_ptr, rows, cols, power,
    EVEN: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """2^(score - reference) of x [C, K] and w [V, K] into out [C, V], their sums over tiles into sums [V / 256, C]."""
    if CHAINED:
        grid_dependency_wait()
    if again_ptr is not None:
        tiles_m *= gl.load(again_ptr)
    extra = (references_ptr, sums_ptr, rows, cols, power, EVEN)
    persistent_matmul(x_desc, w_desc, out_desc, extra, tiles_m, tiles_n, steps, _references, _exp2_epilogue)


@gluon.jit
def max_matmul_kernel(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, steps, references_ptr, factors_ptr, again_ptr, rows, cols, power,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """The largest score of each row whose factor is inf, into its reference, which is -inf."""
    if CHAINED:
        grid_dependency_wait()
    extra = (references_ptr, factors_ptr, rows, cols, power)
    tiles_m *= gl.load(again_ptr)
    persistent_matmul(x_desc, w_desc, out_desc, extra, tiles_m, tiles_n, steps, _factors, _max_epilogue)


@triton.jit
def settle_rows_kernel(
    sums_ptr, scores_ptr, references_ptr, again_ptr, x_ptr, target_ptr, class_weight_ptr, e_ptr, losses_ptr, lse_ptr,
    factors_ptr, scaled_ptr, rows, tiles, x_stride, hidden, classes, ignore_index, scale,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Losses and lse from sums [tiles, C]; e at the label; factors, and x times them. Where a sum is too large, the
    factor becomes inf, the reference -inf and the flag 1. AGAIN: only if that is 1."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
    if AGAIN:
        if tl.load(again_ptr) == 0:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    found = tl.zeros([TILES, ROWS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = tile.to(tl.int64)[:, None] * rows + row[None, :]
        found += tl.load(sums_ptr + at, mask=(tile < tiles)[:, None] & there[None, :], other=0.0)
    total = tl.sum(found, 0)
    target = tl.load(target_ptr + row, mask=there, other=ignore_index).to(tl.int64)
    counted, valid = target != ignore_index, (target >= 0) & (target < classes)
    label = tl.where(valid, target, 0)
    label_weight = 1.0
    if class_weight_ptr is not None:
        label_weight = tl.load(class_weight_ptr + label, mask=there, other=0.0).to(tl.float32)
    hit = tl.where(counted & valid, label_weight, 0.0) * scale
    score = tl.load(scores_ptr + row, mask=there, other=0.0)
    reference = tl.load(references_ptr + row, mask=there, other=0.0)
    factor = tl.where(counted, tl.where(valid, hit / total, float("nan")), 0.0)
    overflowed = counted & (total > LARGEST)
    if not AGAIN:
        tl.store(again_ptr + row * 0, 1, mask=there & overflowed)
        tl.store(references_ptr + row, float("-inf"), mask=there & overflowed)
        factor = tl.where(overflowed, float("inf"), factor)
    more = reference + tl.log2(total)
    loss = tl.where(valid, label_weight * (more - score) * LN2, float("nan"))
    tl.store(losses_ptr + row, tl.where(counted, loss, 0.0), mask=there)
    tl.store(lse_ptr + row, tl.where(counted, more * LN2, 0.0), mask=there)
    tl.store(factors_ptr + row, factor, mask=there)
    grad = tl.exp2(score - reference) - total
    tl.store(e_ptr + row.to(tl.int64) * classes + label, grad.to(e_ptr.dtype.element_ty), mask=there & counted)
    if scaled_ptr is not None:
        for start in range(0, hidden, COLS):
            col = start + tl.arange(0, COLS)
            inside = there[:, None] & (col < hidden)[None, :]
            x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
            scaled = tl.where(factor[:, None] == 0, 0.0, x.to(tl.float32) * factor[:, None])
            at = row.to(tl.int64)[:, None] * hidden + col[None, :]
            tl.store(scaled_ptr + at, scaled.to(scaled_ptr.dtype.element_ty), mask=inside)


def reasons(x: Tensor, classes: int, bias: Tensor | None, dx: bool, z_loss: float, kept: bool) -> list[str]:
    """Why `gradients` does not serve a call, or, where the gradient of its logits is `kept`, `exponentials` does not,
    wherever its matrices lie (`tma_accepts`). dx: is x's gradient computed along with the loss."""
    found = []
    if x.dtype != torch.bfloat16:
        found.append(f"x is {str(x.dtype).removeprefix('torch.')}, not bfloat16")
    if x.shape[-1] > MOST_FEATURES:
        found.append(f"x has {x.shape[-1]:,} features, more than {MOST_FEATURES:,}")
    if bias is not None:
        found.append("bias is given")
    if z_loss != 0:
        found.append("z_loss is given")
    if kept and not pass_outlasts_launches(x.numel() // x.shape[-1] * classes, arch_of(x.device).bandwidth):
        found.append("it takes less time than the launches in its place")
    if not kept and not dx:
        found.append("x asks for no gradient")
    return found


def pass_outlasts_launches(logits: int, bandwidth: float) -> bool:
    """Whether a pass that reads and writes so many bf16 logits takes longer than the launches that stand for it; where
    nobody knows the bandwidth, it does."""
    return 2 * 2 * logits > LAUNCHES * LAUNCH * bandwidth


def applies(chunks: Chunks, terms: Terms, kept: bool) -> bool:
    """`ExponentialSteps.applies`."""
    x, weight = chunks.x, chunks.weight
    plain = not reasons(x, weight.shape[0], chunks.bias, chunks.mask[0], terms.z_loss, kept)
    return plain and tma_accepts(x, weight)


def gradients(
    chunks: Chunks,
    tokens: slice,
    target: Tensor,
    class_weight: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    terms: Terms,
) -> None:
    """`ExponentialSteps.gradients`. chunks: x, weight and where their gradients go. tokens: those of this chunk, whose
    target, losses and lse [C] come along; the last two are written."""
    dx, factors = chunks.dx.view_as(chunks.x)[tokens], torch.empty_like(losses)
    scaled = dx if chunks.mask[1] else None
    e = exponentials(chunks, tokens, target, class_weight, losses, lse, factors, terms, scaled)
    if chunks.mask[1]:  # before dx, whose place the scaled x takes
        add_product(chunks.sum, e.t(), dx, first=tokens.start == 0)
    torch.mm(e, chunks.weight, out=dx)
    scaled_rows(dx, factors, None, losses.new_empty(0), True)


def exponentials(
    chunks: Chunks,
    tokens: slice,
    target: Tensor,
    class_weight: Tensor | None,
    losses: Tensor,
    lse: Tensor,
    factors: Tensor,
    terms: Terms,
    scaled: Tensor | None = None,
) -> Tensor:
    """`ExponentialSteps.kept`: E [C, V] in the buffer, less s at the labels, with what comes along: losses, lse and
    factors [C], and x times the factors into `scaled` [C, K]."""
    x, weight = chunks.x[tokens], chunks.weight
    (rows, hidden), classes = x.shape, weight.shape[0]
    e = chunks.buffer[: rows * classes].view(rows, classes)
    scores, references = torch.empty_like(losses), torch.empty_like(losses)
    sums, again = losses.new_empty(cdiv(classes, COLS) * rows), target.new_empty(1, dtype=torch.int32)
    power, early = terms.scale * LOG2E, chained(x.device)
    launch(
        label_scores_kernel, (rows,),
        x, weight, target, scores, references, x.stride(0), weight.stride(0), hidden, classes, terms.ignore_index,
        again, power, BLOCK=1024, num_warps=4, **early,
    )  # fmt: skip
    ctas, product = matmul_arguments(x, weight, e)
    sizes = rows, classes, power

    def launch_exp2(flag: Tensor | None) -> None:
        even = classes % COLS == 0
        launch(exp2_matmul_kernel, (ctas,), *product, references, sums, flag, *sizes, EVEN=even, num_warps=4, **early)

    def settle(second: bool) -> None:
        launch(
            settle_rows_kernel, (cdiv(rows, 8),),
            sums, scores, references, again, x, target, class_weight, e, losses, lse, factors, scaled,
            rows, product[4], x.stride(0), hidden, classes, terms.ignore_index, terms.scale,
            AGAIN=second, ROWS=8, TILES=256, COLS=256, num_warps=4, **early,
        )  # fmt: skip

    launch_exp2(None)
    settle(False)
    launch(max_matmul_kernel, (ctas,), *product, references, factors, again, *sizes, num_warps=4, **early)
    launch_exp2(again)
    settle(True)
    return e
