"""The distances of DTensors: what each rank's elements or tokens cost is added up, so that a loss is replicated."""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.sharding import Layout, Token, lay_out
from tilesmith.ops.loss.sharded import labels_of_all


def divergence(op: Op, args: tuple) -> Tensor:
    """kl_div, jsd and tvd of x and target [*, v], labels [*]: any dim may be sharded."""
    pattern = "*v *v" if op.name == "kl_div" else "*v *v *"
    layout = lay_out(op, args, pattern)
    named = dict(zip(op.parameters, layout.local(args)))
    reduction = named["reduction"]
    if reduction == "none":
        return layout.wrap(_of_rank(op, named), Token("*v"))
    total = layout.total(_of_rank(op, {**named, "reduction": "sum"}))
    if reduction != "sum":
        total = total / _divisor(layout, args[0].shape, named)
    return layout.wrap(total, Token(""))


def _of_rank(op: Op, named: dict) -> Tensor:
    """The op on a rank's classes. A rank beyond the last class has none, which the op refuses: its sum is 0."""
    x, target = named["x"], named["target"]
    if x.shape[-1] > 0:
        return op(**named)
    nothing = (x + target).to(torch.promote_types(torch.promote_types(x.dtype, target.dtype), torch.float32))
    return nothing if named["reduction"] == "none" else nothing.sum()


def _divisor(layout: Layout, shape: torch.Size, named: dict) -> Tensor | int:
    """What the ops divide the sum over all elements by."""
    reduction, labels = named["reduction"], named.get("labels")
    if "labels" not in named:
        return shape.numel() if reduction == "mean" else shape[0]
    if labels is None:
        rows = max(1, shape.numel() // shape[-1])
    else:
        rows = layout.total((labels != named["ignore_index"]).sum(), rows=True).clamp(min=1)
    return rows * shape[-1] if reduction == "mean" else rows


def linear_distillation(op: Op, args: tuple) -> tuple[Tensor, Tensor]:
    """x [*, K], weight [V, K], teacher [*, J], teacher_weight [V, J], target [*], biases [V]: rows may be sharded."""
    layout = lay_out(op, args, "*K VK *J VJ * V V")
    named = dict(zip(op.parameters, layout.local(args)))
    if named["target"] is not None:
        labels_of_all(layout, named["target"], layout.size("V"), named["ignore_index"])
    loss, parts = op(**named)
    return layout.wrap(layout.total(loss), Token("")), layout.wrap(layout.total(parts), Token("P"))
