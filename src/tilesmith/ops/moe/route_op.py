"""Routing and the losses that balance it, as ops."""

import torch
from torch import Tensor

from tilesmith.device.accumulation import sum_dtype
from tilesmith.engine import Op
from tilesmith.ops.moe import checks, route_reference

KERNELS = {"triton": "tilesmith.ops.moe.triton.route"}


def _fake_route(logits: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=sum_dtype(logits)), logits.new_empty(shape, dtype=torch.int64)


def _fake_losses(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=sum_dtype(logits)), logits.new_empty((), dtype=sum_dtype(logits))


route_vjp = Op(
    route_reference.route_vjp,
    fake=lambda dweights, logits, *_: logits.new_empty(logits.shape),
    outputs=("dlogits",),
    kernels=KERNELS,
    fold=("dweights", "logits", "indices"),
)
route = Op(
    route_reference.route,
    fake=_fake_route,
    vjp=route_vjp,
    outputs=("weights", "indices"),
    check=checks.route,
    kernels=KERNELS,
    fold=("logits",),
)

router_losses_vjp = Op(
    route_reference.router_losses_vjp,
    fake=lambda dbalance, dz_loss, logits, *_: logits.new_empty(logits.shape),
    outputs=("dlogits",),
)
router_losses = Op(
    route_reference.router_losses,
    fake=_fake_losses,
    vjp=router_losses_vjp,
    outputs=("balance", "z_loss"),
    check=checks.router_losses,
)
