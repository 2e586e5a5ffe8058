"""All arguments of an op of the norm family as one named tuple; a forward and a backward of any norm."""

from typing import Any, NamedTuple

from torch import Tensor

from tilesmith.device.rows import row_order
from tilesmith.engine.arguments import together
from tilesmith.ops.norm import dropout_reference, reference

rms_norm_arguments = together(reference.rms_norm)
rms_norm_vjp_arguments = together(reference.rms_norm_vjp)
layer_norm_arguments = together(reference.layer_norm)
layer_norm_vjp_arguments = together(reference.layer_norm_vjp)
add_rms_norm_arguments = together(reference.add_rms_norm)
add_rms_norm_vjp_arguments = together(reference.add_rms_norm_vjp)
add_layer_norm_arguments = together(reference.add_layer_norm)
add_layer_norm_vjp_arguments = together(reference.add_layer_norm_vjp)
dropout_add_norm_arguments = together(dropout_reference.dropout_add_norm)
dropout_add_norm_vjp_arguments = together(dropout_reference.dropout_add_norm_vjp)


class Norm(NamedTuple):
    """A forward of any norm: y = norm(x), or s = x + residual and y = norm(s), with x dropped out first by seed and p.

    center: layer norm, which subtracts the mean; else RMS norm. offset: added to the weight. llama: x · rstd is rounded
    before the weight multiplies it. rounded: the statistics are too, operation by operation.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    center: bool
    llama: bool
    rounded: bool
    seed: Tensor | None
    p: float


def norm_of(call: Any) -> Norm:
    """The named tuple of a forward op's arguments as a `Norm`."""
    given = call._asdict()
    center = given["kind"] == "layer" if "kind" in given else "bias" in given
    x, casting = call.x, given.get("casting")
    if "seed" in given and row_order(x) is not None:  # the mask counts the elements of a contiguous tensor
        x = x.contiguous()
    return Norm(
        x, given.get("residual"), call.weight, given.get("bias"), call.eps, given.get("offset", 0.0), center,
        casting in ("llama", "none"), casting == "none", given.get("seed"), given.get("p", 0.0),
    )  # fmt: skip


def unserved(call: Any) -> list[str]:
    """Why kernels with one weight for all rows and statistics in fp32 do not serve a call's metadata."""
    reasons = []
    weight = getattr(call, "weight", None)
    if weight is not None and weight.ndim == 2:
        reasons.append("weight is [H, N]; this kernel has one weight for all rows")
    if getattr(call, "casting", None) == "none":
        reasons.append("casting is 'none'; this kernel rounds no statistics")
    return reasons


class NormGradient(NamedTuple):
    """A backward of any norm. x: what was normalised; ds: its gradient from elsewhere; mean: None for RMS norm;
    output_mask: which of dx, dweight and dbias are wanted."""

    dy: Tensor | None
    ds: Tensor | None
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    offset: float
    output_mask: tuple[bool, bool, bool]


def gradient_of(call: Any) -> NormGradient:
    """The named tuple of a backward op's arguments as a `NormGradient`; of `dropout_add_norm_vjp`, that of the sum."""
    given = call._asdict()
    x = given.get("x", given.get("s"))
    mean = None if given.get("kind") == "rms" else given.get("mean")
    mask = (*call.output_mask, False)[:3] if "seed" not in given else tuple(call.output_mask[1:])
    return NormGradient(
        call.dy, given.get("ds"), x, call.weight, given.get("bias"), mean, call.rstd, given.get("offset", 0.0), mask
    )
