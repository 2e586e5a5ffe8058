"""Who else computes products and linear layers: PyTorch, cuBLAS with our elementwise ops, cuBLASLt, Liger, Quack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tilesmith import ops
from tilesmith.bench.missing import Missing, absent, only

Adapter = Callable[[Mapping[str, Any]], Callable[[], Any]]

_ACTIVATIONS: dict[str, Callable] = {
    "none": lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu_squared": lambda z: F.relu(z).square(),
}
_QUACK = {"gelu_tanh": "gelu_tanh_approx", "relu": "relu", "silu": "silu", "relu_squared": "relu_sq"}


def _matmul(a, b):
    return a @ b


def _linear(x, weight, bias=None):
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_act(x, weight, bias=None, activation="gelu", keep_pre=None):
    return _ACTIVATIONS[activation](_linear(x, weight, bias))


def _norm_linear(x, weight, bias=None, norm_weight=None, norm_bias=None, kind="rms", eps=1e-6, offset=0.0):
    if kind == "layer":
        return _linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), weight, bias)
    scale = norm_weight if norm_weight is None or not offset else norm_weight + offset
    return _linear(F.rms_norm(x, x.shape[-1:], scale, eps), weight, bias)


def _memory_efficient_linear(x, weight, bias=None, activation="none", chunk_rows=0):
    return _linear_act(x, weight, bias, activation)


EAGER: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "linear": _linear,
    "linear_act": _linear_act,
    "norm_linear": _norm_linear,
    "memory_efficient_linear": _memory_efficient_linear,
}


_OURS: dict[str, Callable] = {
    "gelu": ops.gelu,
    "gelu_tanh": lambda z: ops.gelu(z, "tanh"),
    "silu": ops.silu,
    "relu_squared": ops.relu_squared,
}


def _cublas_then_ours(args):
    activation = _OURS.get(args.get("activation", "gelu"))
    if activation is None:
        raise Missing(f"there is no elementwise op of ours for {args['activation']}")
    return lambda: activation(_linear(args["x"], args["weight"], args.get("bias")))


def _cublaslt(args):
    activation = args.get("activation", "gelu")
    if activation not in ("relu", "gelu_tanh") or args.get("bias") is None:
        raise Missing(f"PyTorch offers no cuBLASLt epilogue for {activation}, or none without a bias")
    if args["x"].device.type != "cuda":
        raise Missing("cuBLASLt is a library of CUDA")
    x = args["x"].flatten(0, -2)
    weight, bias, use_gelu = args["weight"], args["bias"], activation == "gelu_tanh"
    return lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=use_gelu)


def _quack_matmul(args):
    from quack.gemm_interface import gemm

    return lambda: gemm(args["a"], args["b"])


def _quack_linear(args):
    from quack.linear import linear_func

    return lambda: linear_func(args["x"], args["weight"], args.get("bias"))


def _quack_linear_act(args):
    from quack.linear import linear_act_func

    activation = args.get("activation", "gelu")
    if activation not in _QUACK:
        raise Missing(f"Quack's linear has no {activation}")
    wanted = torch.is_grad_enabled() and args["x"].requires_grad
    given = args["x"], args["weight"], _QUACK[activation], args.get("bias"), wanted
    return lambda: linear_act_func(*given)[1]


def _liger_norm_linear(args):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight, bias, eps = args["x"], args.get("norm_weight"), args.get("norm_bias"), args.get("eps", 1e-6)
    if args.get("kind", "rms") == "layer":
        if weight is None or bias is None:
            raise Missing("Liger's LayerNorm needs a weight and a bias")
        return lambda: _linear(LigerLayerNormFunction.apply(x, weight, bias, eps), args["weight"], args.get("bias"))
    absent(args, "Liger's RMSNorm", "norm_bias")
    rest = (weight, eps, args.get("offset", 0.0), "gemma", False)
    return lambda: _linear(LigerRMSNormFunction.apply(x, *rest), args["weight"], args.get("bias"))


def _checkpointed(args):
    """The layer run again in the backward: PyTorch's own way to keep no pre-activation."""
    given = {**args}
    given.pop("chunk_rows", None)
    given.setdefault("activation", "none")
    return lambda: checkpoint(_linear_act, **given, use_reentrant=False)


def _quack_norm_linear(args):
    from quack import rmsnorm
    from quack.linear import linear_func

    absent(args, "Quack", "norm_bias")
    if args.get("kind", "rms") != "rms" or args.get("norm_weight") is None:
        raise Missing("Quack's norm before a linear layer is an RMSNorm with a weight")
    x, eps, offset = args["x"].flatten(0, -2), args.get("eps", 1e-6), args.get("offset", 0.0)

    def call():
        normed = rmsnorm(x, args["norm_weight"], eps=eps, weight_offset=offset)
        return linear_func(normed, args["weight"], args.get("bias"))

    return call


class _Products(torch.autograd.Function):
    """A loss that is known, from which the backward makes the gradients of x and weight with a known dlogits."""

    @staticmethod
    def forward(ctx, x, weight, dlogits, loss):
        torch.mm(x, weight.t())
        ctx.save_for_backward(x, weight, dlogits)
        return loss.clone()

    @staticmethod
    def backward(ctx, dloss):
        x, weight, dlogits = ctx.saved_tensors
        dx = torch.mm(dlogits, weight) if ctx.needs_input_grad[0] else None
        return dx, torch.mm(dlogits.t(), x) if ctx.needs_input_grad[1] else None, None, None


def loss_products(args):
    """The three products of linear_cross_entropy and nothing else: what no loss of these gradients can do without."""
    absent(args, "A product alone", "bias", "class_weight", "label_smoothing", "z_loss", "softcap")
    only(args, "A product alone", scale=1.0)
    if args.get("reduction", "mean") == "none":
        raise Missing("the tokens' gradients are known in the backward only")
    x, weight = args["x"].reshape(-1, args["x"].shape[-1]), args["weight"]
    with torch.no_grad():
        logits = torch.mm(x, weight.to(x.dtype).t())
    logits.requires_grad_()
    rest = {name: args[name] for name in ("ignore_index", "reduction") if name in args}
    loss = ops.cross_entropy(logits, args["target"].flatten(), **rest)
    (dlogits,) = torch.autograd.grad(loss, logits)
    return lambda: _Products.apply(x, weight.to(x.dtype), dlogits, loss.detach())


PEERS: dict[str, dict[str, Adapter]] = {
    "matmul": {"quack": _quack_matmul},
    "linear": {"quack": _quack_linear},
    "linear_act": {
        "cublas_then_ours": _cublas_then_ours,
        "cublaslt": _cublaslt,
        "quack": _quack_linear_act,
    },
    "memory_efficient_linear": {"checkpoint": _checkpointed},
    "norm_linear": {"liger": _liger_norm_linear, "quack": _quack_norm_linear},
}
