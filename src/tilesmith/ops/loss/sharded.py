"""The losses of DTensors: tokens may be sharded over some mesh dims and the vocabulary over another.

Sums and counts of the tokens are added up over ranks, so a mean is that over all tokens, wherever they lie. A loss is
replicated.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import readable
from tilesmith.engine.sharding import Layout, Token, lay_out
from tilesmith.ops.loss.formulas import FORMULAS
from tilesmith.ops.loss.reduction import check_labels, divisors_of
from tilesmith.ops.loss.reference import Terms


def cross_entropy(op: Op, args: tuple) -> Tensor:
    """logits [*, v], target [*], weight [V]: rows over any mesh dims, v over one."""
    layout = lay_out(op, args, "*v * V")
    named = dict(zip(op.parameters, layout.local(args)))
    labels_of_all(layout, named["target"], layout.size("v"), named["ignore_index"])

    def local(**changed: Any) -> Tensor:
        given = {**named, **changed}
        if not layout.dims_of("v"):
            return op(**given)
        from tilesmith.ops.loss import vocabulary

        tensors = (given[name] for name in ("logits", "target", "weight"))
        return vocabulary.cross_entropy(*tensors, _terms(given), given["reduction"], _part(layout))

    return _reduced(layout, local, named, "weight")


def linear_cross_entropy(op: Op, args: tuple) -> Tensor:
    """x [*, K], weight [v, K], target [*], bias [v], class_weight [V]: rows over any mesh dims, v over one. With v
    sharded only the mode "chunks" is served."""
    layout = lay_out(op, args, "*K vK * v V")
    named = dict(zip(op.parameters, layout.local(args)))
    if layout.dims_of("v") and named["mode"] not in ("", "chunks"):
        raise ValueError(
            f"{layout.name}: mode is {named['mode']!r} and the vocabulary is sharded, where gradients are computed "
            'along with the loss; leave mode "", pass "chunks", or redistribute weight to Replicate()'
        )
    labels_of_all(layout, named["target"], layout.size("v"), named["ignore_index"])

    def local(**changed: Any) -> Tensor:
        given = {**named, **changed}
        if not layout.dims_of("v"):
            return op(**given)
        from tilesmith.ops.loss import vocabulary_linear

        tensors = (given[name] for name in ("x", "weight", "target", "bias", "class_weight"))
        rest = (given[name] for name in ("reduction", "chunk_tokens", "accumulate_fp32"))
        return vocabulary_linear.linear_cross_entropy(*tensors, _terms(given), *rest, _part(layout))

    return _reduced(layout, local, named, "class_weight")


def linear_preference(op: Op, args: tuple) -> tuple[Tensor, Tensor]:
    """x [b, T, K], weight [V, K], target [b, T], sequences [., b], bias [V], tokens [., b, T]: sequences may be sharded
    where a formula takes them one by one; those of pairs lie far apart."""
    b = "B" if FORMULAS[args[op.parameters.index("formula")]].paired else "b"
    layout = lay_out(op, args, f"{b}TK VK {b}T S{b} V S{b}T")
    named = dict(zip(op.parameters, layout.local(args)))
    labels_of_all(layout, named["target"], layout.size("V"), named["ignore_index"])
    loss, log_probs = op(**named)
    return layout.wrap(layout.total(loss), Token("")), layout.wrap(log_probs, Token(f"{b}T"))


def labels_of_all(layout: Layout, target: Tensor, classes: int, ignore_index: int) -> None:
    """`check_labels` of each rank's tokens, whose error is one of all ranks: they add up losses."""
    if readable(target):
        layout.refused_together(lambda: check_labels(target, classes, ignore_index))


def classes_sharded(args: tuple) -> bool:
    """Whether linear_cross_entropy's weight or bias is spread over ranks by classes."""
    _, weight, _, bias, *_ = args
    return any(place.is_shard(0) for t in (weight, bias) for place in getattr(t, "placements", ()))


def described_mode(args: tuple) -> str:
    """For `explain`: what the mode of a call of linear_cross_entropy with DTensors does."""
    if classes_sharded(args):
        return (
            "mode chunks: gradients along with the loss, as always where the vocabulary is sharded; products by the "
            "library, softmax by the kernels of cross_entropy and cross_entropy_vjp"
        )
    return "each rank calls the op on what it holds, and chooses the mode by that"


def _terms(given: dict[str, Any]) -> Terms:
    return Terms(*(given[name] for name in Terms._fields))


def _part(layout: Layout) -> Any:
    """This rank's part of the vocabulary."""
    from tilesmith.ops.loss.vocabulary import Part

    dims = layout.dims_of("v")
    if len(dims) > 1:
        raise ValueError(f"{layout.name}: the vocabulary is sharded over {len(dims)} mesh dims; one is supported")
    classes = layout.size("v")
    most = -(-classes // layout.mesh.size(dims[0]))
    return Part(layout.mesh.get_group(dims[0]), layout.start("v"), classes, most)


def _reduced(layout: Layout, local: Callable[..., Tensor], named: dict[str, Any], weights: str) -> Tensor:
    """The loss of all tokens from losses of a rank's own. weights: the name of the class weights."""
    reduction, weight, z_loss = named["reduction"], named[weights], named["z_loss"]
    if reduction == "none":
        return layout.wrap(local(), Token("*"))
    if not any(isinstance(label, int) for label in layout.labels):
        return layout.wrap(local(), Token(""))
    if reduction == "sum":
        return layout.wrap(layout.total(local(), rows=True), Token(""))
    if weight is None or z_loss == 0:
        sums = [local(reduction="sum")]
    else:  # the terms have two divisors; class weights of 0 leave the z term alone
        alone = {weights: torch.zeros_like(weight), "label_smoothing": 0.0}
        sums = [local(reduction="sum", z_loss=0.0), local(reduction="sum", **alone)]
    classes = layout.size("v")
    own = divisors_of(named["target"], weight, named["ignore_index"], classes, sums[0].dtype, "mean")
    *sums, by_weight, number = layout.total(torch.cat((torch.stack(sums), own)), rows=True).unbind()
    means = sum(total / torch.where(number > 0, by, 1.0) for total, by in zip(sums, (by_weight, number)))
    return layout.wrap(torch.where(number > 0, means, float("nan")), Token(""))
