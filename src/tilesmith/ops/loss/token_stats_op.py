"""Statistics of predicted tokens, of logits and without them: what the ops accept and which kernels they have.

Legend: V classes (the vocabulary), K features of a token; [...] the shape of the tokens.
"""

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import attributed_to
from tilesmith.ops.loss import fakes
from tilesmith.ops.loss import token_stats_reference as reference
from tilesmith.ops.loss.arguments import (
    linear_token_stats_arguments,
    linear_token_stats_vjp_arguments,
    token_stats_arguments,
    token_stats_vjp_arguments,
)
from tilesmith.ops.loss.checks import check_cross_entropy, check_linear_cross_entropy


@token_stats_arguments
def _fake_of_logits(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_stats(call.logits, call.target)


@token_stats_vjp_arguments
def _fake_of_logits_vjp(call) -> Tensor:
    return call.logits.new_empty(call.logits.shape if call.output_mask[0] else 0)


def _fake_stats(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = torch.promote_types(x.dtype, torch.float32)
    stats = (x.new_empty(target.shape, dtype=acc) for _ in range(3))
    return *stats, x.new_empty(target.shape, dtype=torch.int64)


@linear_token_stats_arguments
def _fake(call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_stats(call.x, call.target)


def _check(x, weight, target, bias, ignore_index, scale, softcap, chunk_tokens, accumulate_fp32) -> None:
    loss = (None, ignore_index, 0.0, 0.0, scale, softcap, "none", chunk_tokens, accumulate_fp32, "", None)
    _named(x, weight, target, bias, *loss)


def _check_of_logits(logits, target, ignore_index, scale, softcap) -> None:
    _named_of_logits(logits, target, None, ignore_index, 0.0, 0.0, scale, softcap, "none")


def _cross_entropy(*args) -> None:
    check_cross_entropy(*args)


_cross_entropy.__name__ = "token_stats"
_named_of_logits = attributed_to("cross_entropy")(_cross_entropy)


def _linear_cross_entropy(*args) -> None:
    check_linear_cross_entropy(*args)


_linear_cross_entropy.__name__ = "linear_token_stats"
_named = attributed_to("linear_cross_entropy")(_linear_cross_entropy)
_KERNELS = {"triton": "tilesmith.ops.loss.triton.token_stats", "chunked": "tilesmith.ops.loss.chunked.token_stats"}

token_stats_vjp = Op(
    reference.token_stats_vjp,
    fake=_fake_of_logits_vjp,
    outputs=("dlogits",),
    kernels=_KERNELS,
)

token_stats = Op(
    reference.token_stats,
    fake=_fake_of_logits,
    vjp=token_stats_vjp,
    outputs=("log_probs", "entropy", "lse", "predicted"),
    check=_check_of_logits,
    sharding="*V * -> * * * *",
    kernels=_KERNELS,
)

linear_token_stats_vjp = Op(
    reference.linear_token_stats_vjp,
    fake=linear_token_stats_vjp_arguments(fakes.linear_vjp),
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
