"""Mixture of experts: routing, the losses that balance it, and the experts themselves."""

from tilesmith.ops.moe.fp8_op import experts_fp8, experts_vjp_fp8
from tilesmith.ops.moe.op import experts, experts_vjp
from tilesmith.ops.moe.route_op import route, route_vjp, router_losses, router_losses_vjp

__all__ = [
    "experts",
    "experts_fp8",
    "experts_vjp",
    "experts_vjp_fp8",
    "route",
    "route_vjp",
    "router_losses",
    "router_losses_vjp",
]
