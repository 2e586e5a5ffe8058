"""Low-rank adapters (LoRA) of the experts' weights: the launches around products that add them.

An adapter adds scale · b[e] · a[e] to a weight [E, outputs, features]; a is [E, R, features], b [E, outputs, R]. Rows
times aᵀ, [S, R], are a launch of their own; their product with bᵀ continues the sum of the weight's product, in the
same tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.ops.moe.gradient_kernels import weight_gradient_kernel
from tilesmith.ops.moe.index import Groups
from tilesmith.ops.moe.kernels import low_rank_kernel


class Adapter(NamedTuple):
    """The factors a [E, R, features] and b [E, outputs, R] in the dtype of products, and the scale of b · a."""

    a: Tensor
    b: Tensor
    scale: float


class Term(NamedTuple):
    """What a product adds for an adapter: low [S, R] in the order of experts, times lora [E, columns, R] of each."""

    low: Tensor
    lora: Tensor


def adapter(a: Tensor | None, b: Tensor | None, scale: float, dtype: torch.dtype) -> Adapter | None:
    """The adapter of an argument of the op, if it has one."""
    if a is None or b is None:
        return None
    return Adapter(_readable(a, dtype), _readable(b, dtype), float(scale))


def _readable(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor in a dtype, copied where an expert has no neighbouring elements: PEFT's lie expert beside expert."""
    if factor.dtype == dtype and 1 in factor.stride()[1:]:
        return factor
    return torch.empty(factor.shape, dtype=dtype, device=factor.device).copy_(factor)


def arguments(term: Term | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a product is told of a term, by position and by name."""
    if term is None:
        return (None, None, 0, 0, 0, 0), {"BLOCK_R": 16, "EVEN_RANK": True}
    rank = term.low.shape[1]
    block = _block(rank, 64)
    return (*term, rank, *term.lora.stride()), {"BLOCK_R": block, "EVEN_RANK": rank % block == 0}


def low_rank(
    rows: Tensor, factor: Tensor, scale: float, groups: Groups, sized: dict[str, int], top_k: int, num_stages: int
) -> Tensor:
    """scale · rows · factor[e]ᵀ, [S, R] in the order of experts; factor [E, R, features]. rows [S, features] in that
    order, or, where top_k is above 0, [T, features] of tokens with so many experts."""
    experts, rank, features = factor.shape
    out, block_n = rows.new_empty((groups.order.shape[0], rank)), _block(rank, 128)
    launch(
        low_rank_kernel, (groups.tiles * cdiv(rank, block_n),),
        rows, factor, out, *groups, experts, max(1, top_k), features, rank, rows.stride(0), *factor.stride(), scale,
        GATHERS=top_k > 0, EVEN=features % sized["BLOCK_K"] == 0, BLOCK_M=sized["BLOCK_M"], BLOCK_N=block_n,
        BLOCK_K=sized["BLOCK_K"], num_warps=4, num_stages=num_stages,
    )  # fmt: skip
    return out


def factor_gradient(
    rows: Tensor, low: Tensor, out: Tensor, groups: Groups, top_k: int, block_m: int, block_k: int, num_stages: int
) -> None:
    """out [E, columns, R] = Σ rows[r] ⊗ low[r] over the pairs of each expert. rows and top_k as in `low_rank`."""
    (experts, height, rank), block_n = out.shape, _block(low.shape[1], 128)
    if out.numel() == 0:
        return
    launch(
        weight_gradient_kernel, (experts * cdiv(height, block_m) * cdiv(rank, block_n),),
        rows, low, out, groups.order, groups.starts, max(1, top_k), height, rank, rows.stride(0), rank, *out.stride(),
        GATHERS="left" if top_k else "none", BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8,
        num_warps=4, num_stages=num_stages,
    )  # fmt: skip


def _block(rank: int, most: int) -> int:
    """Columns of a tile of a rank's: at least what a product of the hardware takes."""
    return min(most, max(16, next_power_of_2(rank)))
