"""PackedLinear: a linear layer whose weight is packed in 2 to 8 bits, tile by tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.precision.adaptive.config import GROUP, TILE, WIDTHS
from tilesmith.precision.adaptive.quantizer import gptq, group_parameters
from tilesmith.precision.adaptive.sensitivity import pieces

SERVED = (torch.float32, torch.bfloat16, torch.float16)
PARTS = ("codes", "scale", "zero", "order", "strips")
WORDS_PER_BIT = TILE * GROUP // 32


class PackedLinear(nn.Module):
    """y = x W^T + bias with a packed W; see `ops.dequant_linear` for the tensors, which are buffers of these names.

    x, the argument `input`: [..., in_features], float32, bfloat16 or float16; y has its dtype. The weight is frozen, x
    and bias get gradients.
    """

    def __init__(self, packed: dict[str, Tensor], out_features: int, bias: nn.Parameter | None):
        super().__init__()
        check_packed(packed, out_features)
        for name in PARTS:
            self.register_buffer(name, packed[name])
        self.out_features, self.in_features = out_features, packed["order"].shape[1] * GROUP
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:  # by the name that `nn.Linear` has for it
        y = ops.dequant_linear(input, *(getattr(self, name) for name in PARTS), self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "PackedLinear has no weight, only codes; dequantized() makes one of them. Merge an adapter before its "
                "base layer is packed"
            )
        return super().__getattr__(name)

    def dequantized(self, dtype: str = "float32") -> Tensor:
        """The weight [out_features, in_features] that the codes stand for."""
        return ops.dequantize_packed(*(getattr(self, name) for name in PARTS), self.out_features, dtype)

    def tile_counts(self) -> dict[int, int]:
        """How many tiles have each width."""
        ends = self.strips[:, 1:].long().sum(0).tolist()
        ends = [0, *ends, self.order.numel()]
        return {width: ends[i + 1] - ends[i] for i, width in enumerate(WIDTHS)}

    def packed_bytes(self) -> int:
        """Bytes of codes, scales, zeros and tables."""
        return sum(getattr(self, name).nbytes for name in PARTS)

    def _apply(self, fn, recurse: bool = True) -> PackedLinear:
        """Move as other modules do; the scales keep their dtype."""
        kept = {name: getattr(self, name) for name in ("scale", "zero")}
        super()._apply(fn, recurse)
        for name, was in kept.items():
            now = getattr(self, name)
            if now.dtype != was.dtype:
                setattr(self, name, was.to(now.device))
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """What makes no packed weight together with what is here is not loaded, and said."""
        own = {name: getattr(self, name) for name in PARTS}
        given = {name: state_dict.get(prefix + name, x) for name, x in own.items()}
        if all(given[name].shape == x.shape and given[name].device.type != "meta" for name, x in own.items()):
            try:
                check_packed(given, self.out_features)
            except ValueError as problem:
                args[-1].append(f"{prefix.rstrip('.')}: {problem}")  # error_msgs
                return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        bits = 8 * self.packed_bytes() / (self.in_features * self.out_features)
        return f"in_features={self.in_features}, out_features={self.out_features}, {bits:.2f} bits a weight"


def misfit_of(layer: nn.Linear) -> str | None:
    """Why a layer's weight cannot be packed."""
    weight = layer.weight
    if weight.dtype not in SERVED:
        return f"its weight is {weight.dtype}; float32, bfloat16 and float16 are supported"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; a plain parameter is supported"
    if layer.in_features % GROUP or not layer.in_features or not layer.out_features:
        return f"in_features is {layer.in_features}; multiples of 64 are supported"
    return None


@torch.no_grad()
def pack_layer(
    layer: nn.Linear, widths: Tensor, information: Tensor | None = None, hessian: Tensor | None = None
) -> PackedLinear:
    """A layer whose tiles have these widths, int [S, G]. information: [N, K], what squared errors count. hessian:
    [K, K]; where it is given, GPTQ rounds. The bias is the same parameter."""
    weight = layer.weight.detach()
    bits = widths.to(weight.device).repeat_interleave(TILE, 0)[: weight.shape[0]]
    if hessian is not None:
        values, scale, zero = gptq(weight.float(), hessian, bits)
    else:
        values, found = weight, []
        for rows in pieces(weight):
            share = None if information is None else information[rows].float().unflatten(1, (-1, GROUP))
            found.append(group_parameters(weight[rows].float().unflatten(1, (-1, GROUP)), bits[rows], share))
        scale, zero = (torch.cat(parts) for parts in zip(*found))
    return PackedLinear(packed_of(values, scale, zero, widths), layer.out_features, layer.bias)


def packed_of(values: Tensor, scale: Tensor, zero: Tensor, widths: Tensor) -> dict[str, Tensor]:
    """The tensors of a packed weight from values [N, K], scale and zero [N, G] and the tiles' widths [S, G]."""
    widths = widths.to(values.device)
    order = widths.argsort(dim=1, stable=True)
    counts = torch.stack([(widths == w).sum(1) for w in WIDTHS], 1)
    sizes = widths.sum(1) * WORDS_PER_BIT
    total = int(sizes.sum())
    if total >= 2**31:
        raise ValueError(
            f"a weight of {values.numel()} elements takes {total} words of codes; below 2^31 are supported"
        )
    strips = torch.cat(((sizes.cumsum(0) - sizes)[:, None], counts.cumsum(1)[:, :4]), 1).to(torch.int32)
    parts = []
    for x in (scale, zero):
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[0] % TILE)).view(-1, TILE, x.shape[1]).transpose(1, 2)
        slots = padded.gather(1, order[:, :, None].expand(-1, -1, TILE))
        parts.append(slots.to(torch.float16).contiguous())
    order = order.to(torch.int16)
    codes = ops.quantize_packed(values, *parts, order, strips, total)
    return dict(zip(PARTS, (codes, *parts, order, strips)))


def check_packed(packed: dict[str, Tensor], rows: int) -> None:
    """Raise ValueError where tensors are no packed weight: kernels address memory by what they hold."""
    order, strips = packed["order"].long().cpu(), packed["strips"].long().cpu()
    groups = order.shape[1]
    if not torch.equal(order.sort(1).values, torch.arange(groups).expand_as(order)):
        raise ValueError("packed weight: order is not a permutation of the groups in each strip")
    ends = torch.cat((strips[:, 1:], strips.new_full((len(strips), 1), groups)), 1)
    counts = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
    sizes = (counts * torch.tensor(WIDTHS)).sum(1) * WORDS_PER_BIT
    if bool((counts < 0).any()) or not torch.equal(strips[:, 0], sizes.cumsum(0) - sizes):
        raise ValueError("packed weight: strips do not follow one another, or count tiles that are not there")
    if packed["codes"].numel() != int(sizes.sum()):
        raise ValueError(
            f"packed weight: codes has {packed['codes'].numel()} words; its strips need {int(sizes.sum())}"
        )
    if packed["scale"].shape != (*order.shape, TILE) or packed["zero"].shape != packed["scale"].shape:
        raise ValueError(f"packed weight: scale and zero must be {[*order.shape, TILE]}")
    if not (len(order) - 1) * TILE < rows <= len(order) * TILE:
        raise ValueError(f"packed weight: {len(order)} strips of 16 rows do not hold {rows} rows")


def overhead_bytes(out_features: int, in_features: int) -> int:
    """Bytes of a packed weight that do not depend on its widths: scales, zeros and tables."""
    strips, groups = -(-out_features // TILE), in_features // GROUP
    return strips * (groups * (2 * 2 * TILE + 2) + 5 * 4)


def code_bytes(width: int) -> int:
    """Bytes of a tile's codes."""
    return 4 * WORDS_PER_BIT * width
