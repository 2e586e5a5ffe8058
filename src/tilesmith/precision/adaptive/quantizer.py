"""Codes, scales and zeros of groups of weights: the least squared error, and GPTQ on top of it."""

from __future__ import annotations

import torch
from torch import Tensor

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
ROUNDS = 3
_NORMAL, _LEAST = 2.0**-14, 2.0**-24  # of float16: the least normal number, and the least of all
_ZEROS = 60000.0  # the largest zero point
DAMPING = 0.01  # of the mean of a Hessian's diagonal, as GPTQ has it


def group_parameters(weight: Tensor, bits: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scale, zero) of each group, in fp32 but of values that float16 holds, for codes round(w / scale + zero).

    weight: [..., 64] fp32. bits: int, broadcast to weight's leading dims. importance: what the square of each weight's
    error counts, broadcast to weight; None: 1.

    The weighted squared error is made small: codes at several clippings of the group's range, then, alternating, the
    line code -> weight by least squares and codes by that line. The best line counts.
    """
    top = (2.0 ** bits.to(weight.dtype) - 1)[..., None].expand(*weight.shape[:-1], 1)
    share = torch.ones_like(weight) if importance is None else importance.to(weight.dtype).expand(weight.shape)
    share = share + 1e-6 * share.mean(-1, keepdim=True) + 1e-30
    share = share / share.sum(-1, keepdim=True)
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best, kept = torch.full_like(low, torch.inf), (torch.zeros_like(low), torch.zeros_like(low))
    codes = torch.zeros_like(weight)
    for clip in CLIPS:
        scale, offset = 2 * half * clip / top, middle - half * clip
        for again in range(ROUNDS):
            if again:
                scale, offset = _line(weight, codes, share)
            scale, zero = _held(scale, offset)
            codes = _codes(weight, scale, zero, top)
            error = (share * (weight - (codes - zero) * scale).square()).sum(-1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            kept = tuple(torch.where(better, new, old) for new, old in zip((scale, zero), kept))
    return kept[0].squeeze(-1), kept[1].squeeze(-1)


def _line(weight: Tensor, codes: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(slope, offset) of the least squares of weight over codes; a slope of 0 where all codes are alike."""
    mean_w, mean_q = ((share * t).sum(-1, keepdim=True) for t in (weight, codes))
    spread = (share * (codes - mean_q).square()).sum(-1, keepdim=True)
    slope = (share * (codes - mean_q) * (weight - mean_w)).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
    slope = torch.where(spread > 1e-12, slope, 0.0)
    return slope, mean_w - slope * mean_q


def _held(scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero) as float16 holds them. A group of one value c has codes 0 and 1 at a distance of |c|; so has one of
    values so near to c that float16 has no zero for their scale. Where float16 is coarse, scales are rounded up: by a
    smaller one the codes would not reach the ends of the group."""
    scale = torch.where(scale.abs() < _NORMAL, (scale / _LEAST).ceil() * _LEAST, scale)
    flat = (scale == 0) | (offset.abs() > _ZEROS * scale.abs())
    scale = torch.where(flat, offset.abs(), scale).to(torch.float16).to(offset.dtype)
    zero = torch.where(flat, (offset < 0).to(offset.dtype), -offset / torch.where(scale == 0, 1.0, scale))
    return scale, zero.clamp(-_ZEROS, _ZEROS).to(torch.float16).to(offset.dtype)


def _codes(weight: Tensor, scale: Tensor, zero: Tensor, top: Tensor) -> Tensor:
    step = torch.where(scale == 0, 1.0, scale)
    return torch.minimum(torch.round(weight / step + zero).clamp(min=0), top)


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, bits: Tensor) -> Tensor:
    """What groups [..., 64] become with scale and zero [...]: the code nearest to each weight, as a number again."""
    scale, zero = scale[..., None], zero[..., None]
    codes = _codes(weight, scale, zero, (2.0 ** bits.to(weight.dtype) - 1)[..., None])
    return (codes - zero) * scale


def gptq(weight: Tensor, hessian: Tensor, bits: Tensor, group: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """(weight [N, K], scale [N, G], zero [N, G]) after GPTQ: the returned weight's nearest codes are the result.

    weight: [N, K] fp32. hessian: [K, K], the mean of x x^T. bits: int [N, G]. The columns are taken in their order; the
    scales of a group are found when the errors of all columns before it have been made good.
    """
    work, columns = weight.clone(), weight.shape[1]
    inverse = _inverse_factor(hessian)
    scales, zeros, out = [], [], torch.empty_like(work)
    for first in range(0, columns, group):
        last = first + group
        width, block = bits[:, first // group], work[:, first:last].clone()
        diagonal = torch.diagonal(inverse)[first:last]
        scale, zero = group_parameters(block, width, diagonal.reciprocal().square()[None])
        top = 2.0 ** width.to(block.dtype) - 1
        errors = torch.empty_like(block)
        for i in range(group):
            column = block[:, i : i + 1]
            value = (_codes(column, scale[:, None], zero[:, None], top[:, None]) - zero[:, None]) * scale[:, None]
            error = (column - value) / diagonal[i]
            block[:, i:] -= error * inverse[first + i, first + i : last][None]
            out[:, first + i], errors[:, i] = value[:, 0], error[:, 0]
        work[:, last:] -= errors @ inverse[first:last, last:]
        scales.append(scale)
        zeros.append(zero)
    return out, torch.stack(scales, 1), torch.stack(zeros, 1)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped hessian's inverse; damped more where that is not positive definite."""
    diagonal = torch.diagonal(hessian)
    mean = diagonal.mean().clamp(min=1e-12)
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    for damping in (DAMPING, 0.1, 1.0):
        factor, info = torch.linalg.cholesky_ex(hessian + damping * mean * identity)
        if not info.item():
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not info.item():
                return upper
    return identity
