"""Steps of launchers of experts in 8 bits that backends share: the casts between two products, and a backward whose
products a backend brings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.device.rows import rows
from tilesmith.engine import cdiv, launch, next_power_of_2
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.moe import steps
from tilesmith.ops.moe.fp8_kernels import experts_activation_cast_kernel, experts_gradient_cast_kernel
from tilesmith.ops.moe.index import Groups
from tilesmith.ops.moe.reference import GATED

EIGHT = torch.float8_e4m3fn
LONGEST = 2048  # elements of a row that a program holds in registers
# eps of sums of 8-bit products on Ada and Hopper, which keep 13 bits behind the leading one (arXiv:2412.19437, 3.3.2)
SUMS = 2.0**-13


def reasons(call: Any) -> list[str]:
    """Why no kernel of a backend can serve a call of experts_fp8 or of its gradients."""
    first, tensor = ("x8", call.x8) if hasattr(call, "x8") else ("dy8", call.dy8)
    arch = call.arch
    found = [f"{first} is float64; e4m3 is served"] if tensor.dtype != EIGHT else []
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
    if call.arch.kind != "cuda" or not (8, 9) <= call.arch.capability < (10, 0):
        return {}
    names = ("y", "pre") if hasattr(call, "x8") else ("dx", "dgate_up", "ddown", "dweights")
    return dict.fromkeys(names, SUMS)


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


class Backward:
    """The launches of one backward in 8 bits, beside a backend's `steps.Backward`, whose products of weights' gradients
    it takes. A backend has `product` besides.

    call: the arguments of experts_vjp_fp8; block_m: pairs of a tile.
    """

    def enter(self, call: Any) -> None:
        """What `steps.Backward` has of a call, from one in 8 bits."""
        self.call = call
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

    def gradients(self, groups: Groups) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call, mask, self.groups = self.call, self.call.output_mask, groups
        dhidden = self.product(rows(call.dy8), call.dy_factor, call.down8_t, call.down_factor, True)
        dpre, scaled, d8, factor, dweights = self._casts(dhidden)
        made = [self.x.new_empty(0) for _ in mask]
        if mask[0]:
            made[0] = self.sum_over_k(self.product(d8, factor, call.gate_up8_t, call.gate_up_factor, False))
        if mask[1]:
            out = self.x.new_empty((self.experts, 2 * self.inner, self.hidden))
            made[1] = self.weight_gradient(dpre, self.x, out, gathers_left=False)
        if mask[2]:
            out = self.x.new_empty((self.experts, self.hidden, self.inner))
            made[2] = self.weight_gradient(self.dy, scaled, out, gathers_left=True)
        if mask[3]:
            made[3] = dweights
        return tuple(made)

    def zeros(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of a call without pairs."""
        shapes = (
            self.call.x.shape,
            (self.experts, 2 * self.inner, self.hidden),
            (self.experts, self.hidden, self.inner),
        )
        mask = self.call.output_mask
        made = [self.x.new_zeros(shape if wanted else 0) for shape, wanted in zip(shapes, mask)]
        return *made, self.scales.new_zeros(self.call.weights.shape) if mask[3] else self.x.new_empty(0)

    def _casts(self, dhidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The gradient of pre, the weighted activation, the former in 8 bits with its factors, and the gradients of the
        routing weights."""
        pre = self.call.pre.contiguous()
        dpre, scaled = torch.empty_like(pre), torch.empty_like(dhidden)
        d8, factor = pre.new_empty(pre.shape, dtype=EIGHT), pre.new_empty((self.pairs, 1), dtype=torch.float32)
        dweights = self.scales.new_empty(self.scales.shape)
        how = _casting(self.inner, LONGEST // 2)
        launch(
            experts_gradient_cast_kernel, (cdiv(self.pairs, how["BLOCK_M"]),),
            dhidden, pre, self.scales, dpre, scaled, d8, factor, dweights, self.groups.order, self.groups.starts,
            self.pairs, self.experts, self.inner, ACTIVATION=GATED[self.call.activation],
            SATURATES=saturates(pre), **how,
        )  # fmt: skip
        return dpre, scaled, d8, factor, dweights


def combined(each: Tensor, indices: Tensor, scales: Tensor | None, like: Tensor, experts: int, place: Any) -> Tensor:
    """`steps.combined` in the dtype of `each` and the shape of `like`, which may be of 8 bits."""
    return steps.combined(each, indices, scales, like.new_empty(like.shape, dtype=each.dtype), experts, place)
