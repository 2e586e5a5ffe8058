"""Statistics of predicted tokens without logits: what the op accepts and which kernels it has.

Legend: V classes (the vocabulary), K features of a token; [...] the shape of the tokens.
"""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import in_the_name_of
from tilesmith.ops.loss import token_stats_reference as reference
from tilesmith.ops.loss.arguments import linear_token_stats_arguments, linear_token_stats_vjp_arguments
from tilesmith.ops.loss.checks import check_linear_cross_entropy


@linear_token_stats_arguments
def _fake(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = torch.promote_types(call.x.dtype, torch.float32)
    stats = (call.x.new_empty(call.target.shape, dtype=acc) for _ in range(3))
    return *stats, call.x.new_empty(call.target.shape, dtype=torch.int64)


@linear_token_stats_vjp_arguments
def _fake_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (call.x, call.weight, call.weight[:, 0] if call.bias is None else call.bias)
    dx, dweight, dbias = (t.new_empty(t.shape if wanted else 0) for t, wanted in zip(inputs, call.output_mask))
    return dx, dweight, dbias


def _check(x, weight, target, bias, ignore_index, scale, softcap, chunk_tokens, accumulate_fp32) -> None:
    loss = (None, ignore_index, 0.0, 0.0, scale, softcap, "none", chunk_tokens, accumulate_fp32, "", None)
    _named(x, weight, target, bias, *loss)


def _linear_cross_entropy(*args) -> None:
    check_linear_cross_entropy(*args)


_linear_cross_entropy.__name__ = "linear_token_stats"
_named = in_the_name_of("linear_cross_entropy")(_linear_cross_entropy)
_KERNELS = {"triton": "tilesmith.ops.loss.triton.token_stats", "chunked": "tilesmith.ops.loss.chunked.token_stats"}

linear_token_stats_vjp = Op(
    reference.linear_token_stats_vjp,
    fake=_fake_vjp,
    outputs=("dx", "dweight", "dbias"),
    kernels=_KERNELS,
)

linear_token_stats = Op(
    reference.linear_token_stats,
    fake=_fake,
    vjp=linear_token_stats_vjp,
    outputs=("log_probs", "entropy", "lse", "predicted"),
    check=_check,
    autocast=("x",),
    sharding="*K VK * V -> * * * *",
    kernels=_KERNELS,
)
