"""rms_norm_rope: what it accepts, its gradient and its kernels. Legend: see op.py."""

import torch
from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.engine.sharding import spread
from tilesmith.ops.rotary import norm_reference, op
from tilesmith.ops.rotary.arguments import rms_norm_rope_arguments

NAME = "rms_norm_rope"
TRITON = {"triton": "tilesmith.ops.rotary.triton.norm", "hopper": "tilesmith.ops.rotary.hopper.norm"}
EVERYWHERE = {**TRITON, portable.NAME: "tilesmith.ops.rotary.portable"}
NORM_DIMS = ("head", "row")
CASTINGS = ("fp32", "llama")


def _fake(q: Tensor, k: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


def _fake_vjp(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = zip((dq_out, dk_out) * 2, (q, k, q_weight, k_weight), rest[-1])
    return tuple(_fake_like(x) if want and d is not None else q.new_empty(0) for d, x, want in wanted)


def _fake_like(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.ndim == 4 else x.new_empty(x.shape)


@rms_norm_rope_arguments
def _check(call) -> None:
    q, k, norm_dim = call.q, call.k, call.norm_dim
    op.check_rotation(NAME, q, k, call.cos, call.sin, call.positions, call.offsets, call.cu_seqlens, call.offset)
    if q.shape[-1] == 0:
        raise ValueError(f"{NAME}: q has shape {tuple(q.shape)}; D must be at least 1")
    if norm_dim not in NORM_DIMS:
        raise ValueError(f"{NAME}: norm_dim is {norm_dim!r}; it must be 'head' or 'row'")
    if call.casting not in CASTINGS:
        raise ValueError(f"{NAME}: casting is {call.casting!r}; it must be 'fp32' or 'llama'")
    if not call.eps >= 0:
        raise ValueError(f"{NAME}: eps is {call.eps}; it must be 0 or more")
    if norm_dim == "row" and 0 in (q.shape[1], 1 if k is None else k.shape[1]):
        raise ValueError(f"{NAME}: norm_dim is 'row', but q or k has no heads; there is nothing to normalise")
    if k is None and call.k_weight is not None:
        raise ValueError(f"{NAME}: k_weight is given without k")
    _check_weight("q_weight", call.q_weight, q, norm_dim)
    if k is not None:
        _check_weight("k_weight", call.k_weight, k, norm_dim)


def _check_weight(name: str, weight: Tensor | None, x: Tensor, norm_dim: str) -> None:
    if weight is None:
        return
    floating(NAME, name, weight)
    size = x.shape[3] if norm_dim == "head" else x.shape[1] * x.shape[3]
    if weight.ndim != 1 or weight.shape[0] != size:
        raise ValueError(
            f"{NAME}: {name} has shape {tuple(weight.shape)}; with norm_dim={norm_dim!r} it must be [{size}]"
        )
    if weight.device != x.device:
        raise ValueError(f"{NAME}: {name} is on {weight.device}, q on {x.device}; move them to one device")


def _spread(op_: Op, args: tuple) -> tuple[Tensor, Tensor]:
    named = dict(zip(op_.parameters, args))
    pattern, starts = op.angle_dims(**{name: named[name] for name in ("cos", "positions", "offsets", "cu_seqlens")})
    tokens = "T" if named["cu_seqlens"] is not None else "t"
    heads = f"bh{tokens}D" if named["norm_dim"] == "head" else f"bH{tokens}D"
    return spread(op_, args, f"{heads} {heads} D D {pattern} -> {heads} {heads}", starts)


rms_norm_rope_vjp = Op(
    norm_reference.rms_norm_rope_vjp,
    fake=_fake_vjp,
    outputs=("dq", "dk", "dq_weight", "dk_weight"),
    kernels=TRITON,
)

rms_norm_rope = Op(
    norm_reference.rms_norm_rope,
    fake=_fake,
    vjp=rms_norm_rope_vjp,
    outputs=("q_out", "k_out"),
    check=_check,
    kernels=EVERYWHERE,
    sharding=_spread,
)
