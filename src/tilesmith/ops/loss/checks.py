"""What the arguments of the losses must be: errors that name the argument, before anything is launched."""

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import INTEGERS, floating
from tilesmith.ops.loss.arguments import linear_cross_entropy_arguments

REDUCTIONS = ("mean", "sum", "none")
MODES = ("", "keep", "chunks", "recompute")


def check_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    softcap: float,
    reduction: str,
) -> None:
    """Raise ValueError or TypeError for arguments of `cross_entropy` that do not fit together."""
    floating("cross_entropy", "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits has shape {tuple(logits.shape)}; it must be [..., V] with V of at least 1"
        )
    check_tokens("cross_entropy", "logits", logits, target)
    check_ignored("cross_entropy", "target", target, ignore_index)
    check_class_weight("cross_entropy", "weight", weight, logits, logits.shape[-1])
    check_terms("cross_entropy", label_smoothing, z_loss, softcap, reduction)


@linear_cross_entropy_arguments
def check_linear_cross_entropy(call) -> None:
    """The same for `linear_cross_entropy`."""
    x, weight, bias, mode, grad_mask = call.x, call.weight, call.bias, call.mode, call.grad_mask
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is None:
            continue
        floating("linear_cross_entropy", name, value)
        if value.device != x.device:
            raise ValueError(
                f"linear_cross_entropy: {name} is on {value.device}, x on {x.device}; move them to one device"
            )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"linear_cross_entropy: x has shape {tuple(x.shape)}; it must be [..., K] with K of at least 1"
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"linear_cross_entropy: weight has shape {tuple(weight.shape)}; for this x it must be [V, {x.shape[-1]}] "
            "with V of at least 1, as torch.nn.Linear keeps it"
        )
    classes = weight.shape[0]
    if bias is not None and bias.shape != (classes,):
        raise ValueError(f"linear_cross_entropy: bias has shape {tuple(bias.shape)}; it must be [{classes}]")
    if call.chunk_tokens < 0:
        raise ValueError(
            f"linear_cross_entropy: chunk_tokens is {call.chunk_tokens}; it must be 0 (the library chooses) or more"
        )
    if mode not in MODES:
        raise ValueError(
            f"linear_cross_entropy: mode is {mode!r}; it must be {', '.join(map(repr, MODES[1:]))} or '' (the library "
            "chooses)"
        )
    if mode == "keep" and x.dtype == torch.float16:
        raise ValueError("linear_cross_entropy: mode is 'keep' with a float16 x; it must be 'chunks' or 'recompute'")
    if grad_mask is not None and len(grad_mask) != 3:
        raise ValueError(
            f"linear_cross_entropy: grad_mask is {list(grad_mask)}; it must have 3 entries: x, weight, bias"
        )
    check_tokens("linear_cross_entropy", "x", x, call.target)
    check_ignored("linear_cross_entropy", "target", call.target, call.ignore_index)
    check_class_weight("linear_cross_entropy", "class_weight", call.class_weight, x, classes)
    check_terms("linear_cross_entropy", call.label_smoothing, call.z_loss, call.softcap, call.reduction)


def check_tokens(op: str, name: str, x: Tensor, target: Tensor) -> None:
    """Raise unless target holds a label for each row of the tensor x, which the op calls `name`."""
    if target.dtype not in INTEGERS:
        raise TypeError(
            f"{op}: target has dtype {target.dtype}; it must hold labels, int64 or int32; give probabilities to "
            "torch.nn.functional.cross_entropy"
        )
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: target has shape {tuple(target.shape)}; for {name} of shape {tuple(x.shape)} "
            f"it must be {tuple(x.shape[:-1])}{_moved(name, x, target)}"
        )
    if target.device != x.device:
        raise ValueError(f"{op}: target is on {target.device}, {name} on {x.device}; move them to one device")


def check_ignored(op: str, name: str, labels: Tensor, ignore_index: int) -> None:
    """Raise unless labels, which the op calls `name`, can hold ignore_index: PyTorch compares what is left of it in
    their dtype, so that 2**40 would ignore the label 0."""
    limits = torch.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(
            f"{op}: ignore_index is {ignore_index}, and {name}, of dtype {labels.dtype}, cannot hold it; it must be "
            f"between {limits.min} and {limits.max}, or give {name}.long()"
        )


def _moved(name: str, x: Tensor, target: Tensor) -> str:
    """What to do with logits of torch's layout, whose second dim are the classes."""
    torchs = name == "logits" and x.ndim > 2 and (x.shape[0], *x.shape[2:]) == tuple(target.shape)
    return ": the classes are the last dim, so give logits.movedim(1, -1)" if torchs else ", a label for each row"


def check_class_weight(op: str, name: str, weight: Tensor | None, x: Tensor, classes: int) -> None:
    """Raise unless weight is None or one number for each class, without gradient."""
    if weight is None:
        return
    floating(op, name, weight)
    if weight.shape != (classes,):
        raise ValueError(f"{op}: {name} has shape {tuple(weight.shape)}; it must be [{classes}], one for each class")
    if weight.device != x.device:
        raise ValueError(
            f"{op}: {name} is on {weight.device}, the other tensors on {x.device}; move them to one device"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} requires a gradient, but class weights receive none; pass {name}.detach()")


def check_terms(op: str, label_smoothing: float, z_loss: float, softcap: float, reduction: str) -> None:
    """Raise for a number outside its range or an unknown reduction."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}; it must be between 0 and 1")
    if not z_loss >= 0:
        raise ValueError(f"{op}: z_loss is {z_loss}; it must be 0 or more")
    if not softcap >= 0:
        raise ValueError(f"{op}: softcap is {softcap}; it must be 0 (none) or more")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}")
