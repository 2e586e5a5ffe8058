"""Who else computes each op: plain PyTorch, torch.compile, Liger, Quack, FlashAttention, cuDNN.

An adapter takes the op's arguments by name and returns a callable without arguments. It raises `Missing` where the peer
does not offer what the arguments ask for, and ImportError where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.bench import (
    peers_attention,
    peers_cache,
    peers_distill,
    peers_elementwise,
    peers_experts,
    peers_gemm,
    peers_probability,
    peers_rotary,
    peers_scores,
    vulkan,
)
from tilesmith.bench.document import OURS
from tilesmith.bench.missing import Missing, only
from tilesmith.engine import Op, ops, use

FLOORS = frozenset({"products", "nothing"})  # they do a part of the work: not peers that one can be ahead of
Call = Callable[[], Any]
Adapter = Callable[[Mapping[str, Any]], Call]


def providers(name: str, only: Sequence[str] = ()) -> dict[str, Adapter]:
    """The adapters for an op, ours first, then its peers, or those of `only`.

    `tilesmith:BACKEND` is ours with that kernel pinned, `tilesmith:vulkan` the portable kernel through Vulkan,
    `tilesmith:e4m3` attention by `attention_fp8`; such providers are measured only where `only` names them.
    """
    asked = set(only)
    return {n: make for n, make in _known(name).items() if n == OURS or (n in asked if asked else ":" not in n)}


def names(name: str) -> list[str]:
    """Names of all providers of an op, those that are measured only where they are named among them."""
    return list(_known(name))


def _known(name: str) -> dict[str, Adapter]:
    op = ops()[name]
    ours = {OURS: lambda args: lambda: op(**args)}
    for backend in op.backends():
        ours[f"{OURS}:{backend}"] = lambda args, backend=backend: _pinned(op, backend, args)
    if "portable" in op.backends():
        ours[f"{OURS}:{vulkan.NAME}"] = lambda args: vulkan.ThroughVulkan(op, args)
    if name == "attention":
        ours[f"{OURS}:e4m3"] = peers_attention.in_e4m3
        return {**ours, **peers_attention.PEERS}
    eager = EAGER.get(name, reference(op))
    plain = {"pytorch": lambda args: lambda: eager(**args), "compile": lambda args: _compiled(eager, args)}
    return {**ours, **plain, **PEERS.get(name, {})}


def _pinned(op: Op, backend: str, args: Mapping[str, Any]) -> Call:
    def call():
        with use(**{op.name: backend}):  # its backward included, where that has the backend
            return op(**args)

    return call


def reference(op: Op) -> Callable[..., Any]:
    """The op's reference, returning what users get. Stands for eager PyTorch where PyTorch has no function for it."""

    def run(**args):
        out = op.reference(**args)
        if not isinstance(out, tuple):
            return out
        return out[0] if op.public == 1 else out[: op.public]

    return run


def _compiled(eager: Callable[..., Any], args: Mapping[str, Any]) -> Call:
    torch._dynamo.reset()  # a function is compiled for eight shapes and then runs as it is: each case starts anew
    compiled = torch.compile(lambda tensors: eager(**{**args, **tensors}), dynamic=False)
    tensors = {name: value for name, value in args.items() if isinstance(value, Tensor)}
    return lambda: compiled(tensors)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rms_norm(x, weight=None, eps=1e-6, offset=0.0, casting="fp32"):
    if offset or casting != "fp32" or (weight is not None and weight.ndim == 2):
        return reference(ops()["rms_norm"])(x=x, weight=weight, eps=eps, offset=offset, casting=casting)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _layer_norm(x, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _add_rms_norm(x, residual, weight=None, eps=1e-6, offset=0.0, casting="fp32"):
    total = x + residual
    return _rms_norm(total, weight, eps, offset, casting), total


def _add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    total = x + residual
    return _layer_norm(total, weight, bias, eps), total


def _swiglu(gate, up):
    return F.silu(gate) * up


def _geglu(gate, up, approximate="tanh"):
    return F.gelu(gate, approximate=approximate) * up


def _rope(q, k, cos, sin, positions=None, offsets=None, cu_seqlens=None, offset=0, interleaved=False, **more):
    half = cos.shape[-1]
    placed = positions is not None or offsets is not None or cu_seqlens is not None or offset
    if placed or interleaved or any(more.values()):
        args = {"positions": positions, "offsets": offsets, "cu_seqlens": cu_seqlens, "offset": offset, **more}
        return reference(ops()["rope"])(q=q, k=k, cos=cos, sin=sin, interleaved=interleaved, **args)
    cos, sin = (torch.cat((a, a), -1)[..., : q.shape[-2], :].to(q.dtype) for a in (cos, sin))
    cos, sin = (a[:, None] if a.ndim == 3 else a for a in (cos, sin))

    def turn(x):
        head, rest = x[..., : 2 * half], x[..., 2 * half :]
        turned = head * cos + torch.cat((-head[..., half:], head[..., :half]), -1) * sin
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    return turn(q), None if k is None else turn(k)


def _cross_entropy(
    logits,
    target,
    weight=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    scale=1.0,
    softcap=0.0,
    reduction="mean",
):
    z = _rows(logits).float() * scale if scale != 1.0 else _rows(logits).float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    named = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = F.cross_entropy(z, target.flatten(), None if weight is None else weight.float(), **named)
    if z_loss:
        squared = torch.where(target.flatten() != ignore_index, torch.logsumexp(z, -1) ** 2, 0.0) * z_loss
        count = (target != ignore_index).sum() if reduction == "mean" else 1
        loss = loss + (squared if reduction == "none" else squared.sum() / count)
    return loss.view(target.shape) if reduction == "none" else loss


def _linear_cross_entropy(
    x, weight, target, bias=None, class_weight=None, chunk_tokens=0, accumulate_fp32=True, mode="", grad_mask=None,
    **options,
):  # fmt: skip
    bias = None if bias is None else bias.to(x.dtype)
    return _cross_entropy(F.linear(x, weight.to(x.dtype), bias), target, class_weight, **options)


def _silu(x):
    return F.silu(x)


def _gelu(x, approximate="none"):
    return F.gelu(x, approximate=approximate)


EAGER: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
    "add_layer_norm": _add_layer_norm,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "rope": _rope,
    "silu": _silu,
    "gelu": _gelu,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}


def _liger_rms_norm(args):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if args["weight"] is not None and args["weight"].ndim == 2:
        raise Missing("Liger's RMSNorm has one weight for all rows")
    casting = {"llama": "llama", "fp32": "gemma", "none": "none"}[args.get("casting", "fp32")]
    offset, eps = args.get("offset", 0.0), args.get("eps", 1e-6)
    return lambda: LigerRMSNormFunction.apply(args["x"], args["weight"], eps, offset, casting, False)


def _liger_layer_norm(args):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    if args.get("bias") is None:
        raise Missing("Liger's LayerNorm needs a bias")
    return lambda: LigerLayerNormFunction.apply(args["x"], args["weight"], args["bias"], args.get("eps", 1e-5))


def _liger_add_rms_norm(args):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    x, residual = (args[n] for n in list(args)[:2])
    casting = {"llama": "llama", "fp32": "gemma", "none": "none"}[args.get("casting", "fp32")]
    return lambda: LigerFusedAddRMSNormFunction.apply(
        x, residual, args["weight"], args.get("eps", 1e-6), args.get("offset", 0.0), casting, False
    )


def _liger_swiglu(args):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda: LigerSiLUMulFunction.apply(args["gate"], args["up"])


def _liger_geglu(args):
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    only(args, "Liger", approximate="tanh")
    return lambda: LigerGELUMulFunction.apply(args["gate"], args["up"])


def _liger_rope(args):
    from liger_kernel.ops.rope import LigerRopeFunction

    only(args, "Liger", interleaved=False, offset=0, last=False, halved=False)
    if any(args.get(name) is not None for name in ("positions", "offsets", "cu_seqlens")):
        raise Missing("Liger's RoPE has no positions, offsets or packed rows")
    cos, sin = (torch.cat((args[n], args[n]), -1)[..., : args["q"].shape[2], :] for n in ("cos", "sin"))
    cos, sin = (a if a.ndim == 3 else a[None] for a in (cos, sin))
    return lambda: LigerRopeFunction.apply(args["q"], args["k"], cos, sin)


def _liger_cross_entropy(args):
    from liger_kernel.transformers.functional import liger_cross_entropy

    options = ("weight", "ignore_index", "label_smoothing", "reduction", "softcap")
    named = _offered("cross_entropy", args, "Liger", *options)
    named["softcap"] = named.get("softcap") or None
    logits, target = _rows(args["logits"]), args["target"].flatten()
    return lambda: liger_cross_entropy(logits, target, **named)


def _liger_linear_cross_entropy(args):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = ("bias", "ignore_index", "label_smoothing", "reduction", "softcap")
    named = _offered("linear_cross_entropy", args, "Liger", *options)
    named["softcap"] = named.get("softcap") or None
    x, target = _rows(args["x"]), args["target"].flatten()
    return lambda: liger_fused_linear_cross_entropy(x, args["weight"], target, **named)


def _offered(op: str, args, peer: str, *names: str) -> dict[str, Any]:
    """The arguments among `names` that are on; Missing where another one, not on the list, is not at its default."""
    defaults = ops()[op].defaults
    for name, value in args.items():
        if name in defaults and name not in names and value is not defaults[name] and value != defaults[name]:
            raise Missing(f"{peer} has no {name}")
    return {name: args[name] for name in names if args.get(name) is not None}


def _quack_rms_norm(args):
    from quack import rmsnorm

    offset, eps = args.get("offset", 0.0), args.get("eps", 1e-6)
    x = args["x"]
    return lambda: rmsnorm(_rows(x), args["weight"], eps=eps, weight_offset=offset).view(x.shape)


def _quack_layer_norm(args):
    """Quack's two functions, which take weights of fp32 only, as the pair that a user would make of them."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    x, weight, bias, eps = args["x"], args.get("weight"), args.get("bias"), args.get("eps", 1e-5)
    if weight is None:
        raise Missing("Quack's layer norm needs a weight")

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            vectors = [None if v is None else v.float() for v in (weight, bias)]
            y, rstd, mean = layernorm_fwd(x, *vectors, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, vectors[0], rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            dx, *sums = layernorm_bwd(*ctx.saved_tensors[:2], dy, *ctx.saved_tensors[2:], has_bias=bias is not None)
            return dx, *(None if v is None else d.to(v.dtype) for d, v in zip(sums, (weight, bias)))

    return lambda: LayerNorm.apply(_rows(x), weight, bias).view(x.shape)


def _quack_add_rms_norm(args):
    from quack import rmsnorm

    x, residual = (args[n] for n in list(args)[:2])
    eps, offset = args.get("eps", 1e-6), args.get("offset", 0.0)
    return lambda: rmsnorm(x, args["weight"], residual=residual, eps=eps, weight_offset=offset, prenorm=True)


def _quack_cross_entropy(args):
    from quack import cross_entropy

    named = _offered("cross_entropy", args, "Quack", "weight", "ignore_index", "reduction")
    return lambda: cross_entropy(_rows(args["logits"]), args["target"].flatten(), **named)


def _quack_linear_cross_entropy(args):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    named = _offered("linear_cross_entropy", args, "Quack", "ignore_index", "reduction")
    return lambda: chunked_linear_cross_entropy(_rows(args["x"]), args["weight"], args["target"].flatten(), **named)


def _quack_rope(args):
    from quack.rotary import apply_rotary_emb  # apply_rotary has no gradient

    only(args, "Quack", last=False, halved=False)
    if args.get("positions") is not None or args.get("offset"):
        raise Missing("Quack's rotary takes no positions")
    q, k = (None if args[n] is None else args[n].transpose(1, 2) for n in ("q", "k"))
    named = {"interleaved": args.get("interleaved", False), "seqlen_offsets": args.get("offsets")}
    if args["cos"].ndim != 2:
        raise Missing("Quack's rotary takes one table for all rows")
    return lambda: tuple(apply_rotary_emb(x, args["cos"], args["sin"], **named).transpose(1, 2) for x in (q, k))


PEERS: dict[str, dict[str, Adapter]] = {
    "rms_norm": {"liger": _liger_rms_norm, "quack": _quack_rms_norm},
    "layer_norm": {"liger": _liger_layer_norm, "quack": _quack_layer_norm},
    "add_rms_norm": {"liger": _liger_add_rms_norm, "quack": _quack_add_rms_norm},
    "swiglu": {"liger": _liger_swiglu},
    "geglu": {"liger": _liger_geglu},
    "rope": {"liger": _liger_rope, "quack": _quack_rope},
    "cross_entropy": {"liger": _liger_cross_entropy, "quack": _quack_cross_entropy},
    "linear_cross_entropy": {
        "liger": _liger_linear_cross_entropy,
        "quack": _quack_linear_cross_entropy,
        "products": peers_gemm.loss_products,
    },
}
for _family in (
    peers_cache,
    peers_distill,
    peers_elementwise,
    peers_experts,
    peers_gemm,
    peers_probability,
    peers_rotary,
    peers_scores,
):
    EAGER.update(_family.EAGER)
    PEERS.update(_family.PEERS)
