"""Mixture of experts: routing, the losses that balance it, and the experts themselves."""

from tilesmith.ops.moe.op import experts, experts_vjp
from tilesmith.ops.moe.route_op import route, route_vjp, router_losses, router_losses_vjp

__all__ = ["experts", "experts_vjp", "route", "route_vjp", "router_losses", "router_losses_vjp"]
