"""The fused preference loss: what it accepts and which kernels it has; log-probabilities of labels without logits.

Legend: B sequences, T tokens of a sequence, K features of a token, V classes (the vocabulary).
"""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import INTEGERS, attributed_to, floating
from tilesmith.ops.loss import fakes, sharded
from tilesmith.ops.loss import preference_reference as reference
from tilesmith.ops.loss.arguments import linear_preference_arguments, linear_preference_vjp_arguments
from tilesmith.ops.loss.checks import check_ignored
from tilesmith.ops.loss.formulas import FORMULAS
from tilesmith.ops.loss.op import LossWithGradients, linear_cross_entropy
from tilesmith.ops.loss.reference import saved_dtype

NAME = "linear_preference"


@linear_preference_arguments
def _fake(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weight = call.x, call.weight
    acc = torch.promote_types(x.dtype, torch.float32)
    mask = reference.gradients_now(call.grad_mask, call.recompute)
    per_token = (x.new_empty(call.target.shape, dtype=acc) for _ in range(3))
    return (
        x.new_empty((), dtype=acc),
        *per_token,
        *fakes.gradients_now(x, weight, mask, saved_dtype(weight)),
    )


@linear_preference_arguments
def _check(call) -> None:
    x, weight, target, formula, grad_mask = call.x, call.weight, call.target, call.formula, call.grad_mask
    rule = FORMULAS.get(formula)
    if rule is None:
        raise ValueError(f"{NAME}: formula is {formula!r}; it must be one of {', '.join(sorted(FORMULAS))}")
    fields = rule.options._fields
    if len(call.options) != len(fields):
        raise ValueError(
            f"{NAME}: options has {len(call.options)} values; {formula!r} has {len(fields)}: {', '.join(fields)}"
        )
    if x.ndim != 3 or x.shape[2] == 0:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}; it must be [B, T, K] with K of at least 1")
    if rule.paired and x.shape[0] % 2:
        raise ValueError(
            f"{NAME}: x has {x.shape[0]} sequences; {formula!r} takes chosen and rejected ones, an even number"
        )
    if weight.ndim != 2 or weight.shape[1] != x.shape[2] or weight.shape[0] == 0:
        raise ValueError(
            f"{NAME}: weight has shape {tuple(weight.shape)}; for this x it must be [V, {x.shape[2]}], V at least 1"
        )
    if target.dtype not in INTEGERS:
        raise TypeError(f"{NAME}: target has dtype {target.dtype}; it must hold labels, int64 or int32")
    check_ignored(NAME, "target", target, call.ignore_index)
    shapes = {"target": (target, x.shape[:2]), "bias": (call.bias, weight.shape[:1])}
    for name, (value, shape) in shapes.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"{NAME}: {name} has shape {tuple(value.shape)}; it must be {tuple(shape)}")
    _check_beside(x, call.sequences, call.tokens, formula)
    for name in ("x", "weight", "bias", "sequences", "tokens"):
        value = getattr(call, name)
        if value is not None:
            floating(NAME, name, value)
        if value is not None and value.device != x.device:
            raise ValueError(f"{NAME}: {name} is on {value.device}, x on {x.device}; move them to one device")
    if target.device != x.device:
        raise ValueError(f"{NAME}: target is on {target.device}, x on {x.device}; move them to one device")
    if call.chunk_tokens < 0:
        raise ValueError(f"{NAME}: chunk_tokens is {call.chunk_tokens}; it must be 0 (the library chooses) or more")
    if not call.softcap >= 0:
        raise ValueError(f"{NAME}: softcap is {call.softcap}; it must be 0 (none) or more")
    if grad_mask is not None and len(grad_mask) != 3:
        raise ValueError(f"{NAME}: grad_mask is {list(grad_mask)}; it must have 3 entries: x, weight, bias")


def _check_beside(x: Tensor, sequences: Tensor, tokens: Tensor | None, formula: str) -> None:
    rule, batch = FORMULAS[formula], x.shape[0]
    if sequences.ndim != 2 or sequences.shape[0] < rule.sequences or sequences.shape[1] != batch:
        raise ValueError(
            f"{NAME}: sequences has shape {tuple(sequences.shape)}; "
            f"{formula!r} reads [{rule.sequences} or more, {batch}]"
        )
    if rule.tokens and (tokens is None or tokens.ndim != 3 or tokens.shape[0] < rule.tokens):
        given = None if tokens is None else tuple(tokens.shape)
        raise ValueError(f"{NAME}: tokens has shape {given}; {formula!r} reads [{rule.tokens} or more, B, T]")
    if tokens is not None and tokens.shape[1:] != x.shape[:2]:
        raise ValueError(f"{NAME}: tokens has shape {tuple(tokens.shape)}; it must end in {tuple(x.shape[:2])}")


_KERNELS = {"triton": "tilesmith.ops.loss.triton.preference", "chunked": "tilesmith.ops.loss.chunked.preference"}

linear_preference_vjp = Op(
    reference.linear_preference_vjp,
    fake=linear_preference_vjp_arguments(fakes.linear_vjp),
    outputs=("dx", "dweight", "dbias"),
    kernels=_KERNELS,
)

linear_preference = LossWithGradients(
    reference.linear_preference,
    fake=_fake,
    vjp=linear_preference_vjp,
    outputs=("loss", "log_probs", "lse", "token_grad", "x_grad", "weight_grad", "bias_grad"),
    public=2,
    check=_check,
    autocast=("x",),
    kernels=_KERNELS,
    sharding=sharded.linear_preference,
)


@attributed_to("linear_cross_entropy")
def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    accumulate_fp32: bool = True,
) -> Tensor:
    """Log-probabilities of the labels under softmax(scale · (x · weightᵀ + bias)), for custom losses.

    x: [..., K]. weight: [V, K]. target: [...], int64 or int32. bias: [V]. softcap, chunk_tokens, accumulate_fp32 and
    what raises: see `linear_cross_entropy`; the results are its per-token losses, negated. Logits are held a chunk at a
    time and computed again in the backward. The losses listed in `FORMULAS` need no recomputation: see
    `linear_preference`.

    Returns [...], fp32 (fp64 for fp64 x), 0 where the label is ignore_index.
    """
    return -linear_cross_entropy(
        x, weight, target, bias, None, ignore_index, 0.0, 0.0, scale, softcap, "none", chunk_tokens, accumulate_fp32
    )
