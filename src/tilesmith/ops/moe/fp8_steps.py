"""Steps of launchers of experts in 8 bits that backends share: the casts between two products, and a backward whose
products a backend brings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.device.rows import dense, rows
from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import plan, steps
from tilesmith.ops.moe.fp8_kernels import (
    experts_activation_cast_kernel,
    experts_gradient_cast_kernel,
    experts_largest_factors_kernel,
    experts_turned_kernel,
)
from tilesmith.ops.moe.index import Groups
from tilesmith.ops.moe.reference import GATED

EIGHT = torch.float8_e4m3fn
LONGEST = 2048  # elements of a row that a program holds in registers
# eps of sums of 8-bit products on Ada and Hopper, which keep 13 bits behind the leading one (arXiv:2412.19437, 3.3.2)
SUMS = 2.0**-13
# What comes of such a sum may be cast to the neighbouring one of 8 bits, up to 2^-3 away: of a product of 16 features
# that is 2^-3 of one of 16 terms, beside a largest result of about three times the root of their number.
NEIGHBOUR = 2.0**-6


def dims(x8: Tensor, x_factor: Tensor, gate_up8: Tensor, factor: Tensor, down8: Tensor, *rest: Any) -> dict[str, int]:
    """The sizes of a call of experts_fp8 by which its configuration is chosen."""
    return plan.dims(rest[1].numel(), gate_up8.shape[0], x8.shape[-1], down8.shape[2])


def dims_vjp(*args: Any) -> dict[str, int]:
    """The same of a call of its gradients."""
    down8_t, indices = args[8], args[10]
    return plan.dims(indices.numel(), down8_t.shape[0], down8_t.shape[2], down8_t.shape[1])


def reasons(call: Any) -> list[str]:
    """Why no kernel of a backend can serve a call of experts_fp8 or of its gradients."""
    first, tensor = ("x8", call.x8) if hasattr(call, "x8") else ("dy8", call.dy8)
    arch = call.arch
    found = [f"{first} is float64; e4m3 is supported"] if tensor.dtype != EIGHT else []
    if call.weights.dtype == torch.float64:
        found.append("weights is torch.float64; this kernel sums in float32")
    if arch.kind == "cuda" and arch.capability < (8, 9):
        found.append(f"{arch.name} has no 8-bit floats; compute capability 8.9 and up does")
    if arch.kind not in ("cuda", "cpu"):
        found.append(f"{arch.kind} was not tried with float8_e4m3fn")
    inner = call.down8.cols if hasattr(call, "down8") else call.pre.cols
    return found + [f"{name} has no columns" for name, n in ((first, tensor.cols), ("the activation", inner)) if not n]


def eps(call: Any) -> dict[str, float]:
    """Tensor cores of Ada and Hopper add 8-bit products up in fewer bits than fp32 has."""
    arch, forward = call.arch, hasattr(call, "x8")
    wide = call.dtype == "float32" if forward else call.dy.dtype == torch.float32
    if not wide or arch.kind != "cuda" or not (8, 9) <= arch.capability < (10, 0):
        return {}
    if forward:
        return {"pre": SUMS, "y": NEIGHBOUR}
    return {"dweights": SUMS, **dict.fromkeys(("dx", "dgate_up", "ddown"), NEIGHBOUR)}


def saturates(x: Tensor) -> bool:
    """Whether a conversion to 8 bits saturates where x is, as NVIDIA's instruction does."""
    return arch_of(x.device).kind == "cuda"


def _casting(inner: int, largest: int) -> dict[str, Any]:
    """Rows and columns of a program of a cast."""
    block_n = min(largest, max(16, next_power_of_2(inner)))
    block_m = max(1, largest // block_n)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "HELD": block_n >= inner, "num_warps": 8 if block_n > 512 else 4}


def activated(pre: Tensor, groups: Groups, experts: int, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of pre [S, 2 I] in 8 bits and its factors [S, 1], in the order of experts."""
    pairs, inner = pre.shape[0], pre.shape[1] // 2
    out, factor = pre.new_empty((pairs, inner), dtype=EIGHT), pre.new_empty((pairs, 1), dtype=torch.float32)
    how = _casting(inner, LONGEST)
    launch(
        experts_activation_cast_kernel, (cdiv(pairs, how["BLOCK_M"]),),
        pre, out, factor, groups.starts, pairs, experts, inner, ACTIVATION=GATED[activation],
        SATURATES=saturates(pre), **how,
    )  # fmt: skip
    return out, factor


def dense_weights(call: Any) -> Any:
    """A call of experts_fp8 whose weights and factors are contiguous."""
    names = "x_factor", "gate_up8", "gate_up_factor", "down8", "down_factor"
    return call._replace(**{name: dense(getattr(call, name)) for name in names})


def combined(each: Tensor, indices: Tensor, scales: Tensor | None, like: Tensor, experts: int, place: Any) -> Tensor:
    """`steps.combined` in the dtype of `each` and the shape of `like`, which may be of 8 bits."""
    return steps.combined(each, indices, scales, like.new_empty(like.shape, dtype=each.dtype), experts, place)


class Turned(NamedTuple):
    """An operand of a weight's gradient: [columns, tiles · pairs of a tile] in 8 bits, and the factors [E]."""

    values: Tensor
    factor: Tensor


class Backward:
    """The launches of one backward in 8 bits, beside a backend's `steps.Backward`, whose products of weights' gradients
    it takes where the tokens are not in 8 bits. A backend has what raises NotImplementedError here."""

    def enter(self, call: Any) -> None:
        """What `steps.Backward` has of a call, from one of experts_vjp_fp8."""
        names = "dy_factor", "x_factor", "gate_up8_t", "gate_up_factor", "down8_t", "down_factor"
        self.call = call = call._replace(**{name: dense(getattr(call, name)) for name in names})
        self.x, self.dy, self.indices = rows(call.x), rows(call.dy), call.indices.contiguous()
        self.scales = call.weights.contiguous()
        self.pairs, self.top_k = self.indices.numel(), self.indices.shape[-1]
        self.experts, self.inner, self.hidden = call.down8_t.shape

    def product(self, a8: Tensor, a_factor: Tensor, weight8: Tensor, factor: Tensor, gathers: bool) -> Tensor:
        """a8 · weight8[e]ᵀ with factors, in dy's dtype: with `gathers` of rows of tokens, in the order of experts, else
        of rows in that order, where `sum_over_k` expects them."""
        raise NotImplementedError

    def sum_over_k(self, each: Tensor) -> Tensor:
        """Σ_k of what `product` made, in x's shape."""
        raise NotImplementedError

    def weight_product(self, left: Turned, right: Turned, out: Tensor, firsts: Tensor) -> None:
        """out[e] = Σ left[., k] ⊗ right[., k] over the places k of an expert's tiles, times their factors."""
        raise NotImplementedError

    def gradients(self, groups: Groups, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """groups: with tiles of `tile` pairs."""
        call, mask, self.groups = self.call, self.call.output_mask, groups
        dy8 = rows(call.dy8)
        dhidden = self.product(dy8, call.dy_factor, call.down8_t, call.down_factor, True)
        dpre, scaled, scaled_factor, d8, factor, dweights = self._casts(dhidden)
        none = self.dy.new_empty(0)
        dx = none
        if mask[0]:
            dx = self.sum_over_k(self.product(d8, factor, call.gate_up8_t, call.gate_up_factor, False))
        outs = [self.dy.new_empty(n) if wanted else None for n, wanted in zip(self._weight_shapes(), mask[1:3])]
        if scaled_factor is not None:
            operands = (self.x, call.x_factor), (dy8, call.dy_factor), (d8, factor), (scaled, scaled_factor)
            self._weights_in_8_bits(operands, outs, tile)
        else:
            for out, how in zip(outs, ((dpre, self.x, False), (self.dy, scaled, True))):
                if out is not None:
                    self.weight_gradient(how[0], how[1], out, gathers_left=how[2])
        dgate_up, ddown = (none.clone() if out is None else out for out in outs)
        return dx, dgate_up, ddown, dweights if mask[3] else none.clone()

    def zeros(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of a call without pairs."""
        mask, shapes = self.call.output_mask, (self.call.x.shape, *self._weight_shapes())
        made = [self.dy.new_zeros(shape if wanted else 0) for shape, wanted in zip(shapes, mask)]
        return *made, self.scales.new_zeros(self.call.weights.shape) if mask[3] else self.dy.new_empty(0)

    def _weight_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        return (self.experts, 2 * self.inner, self.hidden), (self.experts, self.hidden, self.inner)

    def _casts(self, dhidden: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """The gradient of pre where x is not in 8 bits, the weighted activation, its factors where x is; the gradient
        of pre in 8 bits, its factors; the gradients of the routing weights."""
        pre, eight = self.call.pre.contiguous(), self.call.x_factor is not None
        d8, factor = pre.new_empty(pre.shape, dtype=EIGHT), pre.new_empty((self.pairs, 1), dtype=torch.float32)
        dpre = None if eight else torch.empty_like(pre)
        scaled = torch.empty_like(dhidden, dtype=EIGHT if eight else None)
        scaled_factor = torch.empty_like(factor) if eight else None
        dweights = self.scales.new_empty(self.scales.shape)
        how = _casting(self.inner, LONGEST // 2)
        launch(
            experts_gradient_cast_kernel, (cdiv(self.pairs, how["BLOCK_M"]),),
            dhidden, pre, self.scales, dpre, scaled, scaled_factor, d8, factor, dweights,
            self.groups.order, self.groups.starts, self.pairs, self.experts, self.inner,
            ACTIVATION=GATED[self.call.activation], SATURATES=saturates(pre), **how,
        )  # fmt: skip
        return dpre, scaled, scaled_factor, d8, factor, dweights

    def _weights_in_8_bits(
        self, operands: tuple[tuple[Tensor, Tensor], ...], outs: list[Tensor | None], tile: int
    ) -> None:
        """The gradients of both weights. operands: x and dy of tokens, the gradient of pre and the weighted activation
        in the order of experts, each with its factors."""
        groups, experts = self.groups, self.experts
        largest = self.dy.new_empty((4, experts), dtype=torch.float32)
        firsts = torch.empty_like(groups.starts)
        launch(
            experts_largest_factors_kernel, (experts + 1,),
            *(factor for _, factor in operands), largest, firsts, groups.order, groups.starts, self.top_k, experts,
            TILE=tile, BLOCK=1024, EXPERTS=next_power_of_2(experts + 1), num_warps=4,
        )  # fmt: skip
        for out, (left, right) in zip(outs, ((2, 0), (1, 3))):
            if out is not None:
                turned = (self._turned(*operands[i], largest[i], i < 2, tile) for i in (left, right))
                self.weight_product(*turned, out, firsts)

    def _turned(self, a: Tensor, factor: Tensor, wide: Tensor, gathers: bool, tile: int) -> Turned:
        """Rows of 8 bits in the order of experts, cast again by the factors `wide` of experts, transposed."""
        groups, cols = self.groups, a.shape[1]
        out = a.new_empty((cols, groups.tiles * tile))
        launch(
            experts_turned_kernel, (groups.tiles * cdiv(cols, 64),),
            a, factor, wide, out, out.view(torch.int32), *groups, self.experts, groups.tiles, self.top_k, cols,
            a.stride(0), GATHERS=gathers, SATURATES=saturates(a), TILE=tile, BLOCK_COLS=64, num_warps=4,
        )  # fmt: skip
        return Turned(out, wide)
