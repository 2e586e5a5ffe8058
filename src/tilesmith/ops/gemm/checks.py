"""What the gemm family's arguments must be, said before anything is computed."""

from torch import Tensor

from tilesmith.engine.argument_checks import floating, one_device
from tilesmith.ops.gemm.reference import ACTIVATIONS

KINDS = ("rms", "layer")


def matmul(a: Tensor, b: Tensor) -> None:
    floating("matmul", "a", a)
    floating("matmul", "b", b)
    if a.dtype != b.dtype:
        raise TypeError(f"matmul: b has dtype {b.dtype}, a has {a.dtype}; they must match")
    if a.ndim == 0:
        raise ValueError("matmul: a is a scalar; it must be [..., K]")
    if b.ndim != 2 or b.shape[0] != a.shape[-1]:
        raise ValueError(
            f"matmul: b has shape {tuple(b.shape)}; for a of shape {tuple(a.shape)} it must be [{a.shape[-1]}, N] "
            "(torch.matmul serves vectors and batches of matrices)"
        )
    one_device("matmul", "b", b, "a", a)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    linear_arguments("linear", x, weight, bias)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_pre: bool | None) -> None:
    linear_arguments("linear_act", x, weight, bias)
    _activation("linear_act", activation)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    kind: str,
    eps: float,
    offset: float,
) -> None:
    linear_arguments("norm_linear", x, weight, bias)
    if x.shape[-1] == 0:
        raise ValueError(f"norm_linear: x has shape {tuple(x.shape)}; it must be [..., K] with K of at least 1")
    if kind not in KINDS:
        raise ValueError(f"norm_linear: kind is {kind!r}; it must be 'rms' or 'layer'")
    for name, vector in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        _vector("norm_linear", name, vector, x.shape[-1], x)
    if kind == "rms" and norm_bias is not None:
        raise ValueError("norm_linear: norm_bias is given with kind 'rms', which has none; pass None or kind='layer'")
    if kind == "layer" and offset != 0:
        raise ValueError(f"norm_linear: offset is {offset} with kind 'layer', which has none; it must be 0")
    if not eps >= 0:
        raise ValueError(f"norm_linear: eps is {eps}; it must be 0 or more")


def memory_efficient_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, chunk_rows: int) -> None:
    linear_arguments("memory_efficient_linear", x, weight, bias)
    _activation("memory_efficient_linear", activation)
    if chunk_rows < 0:
        raise ValueError(
            f"memory_efficient_linear: chunk_rows is {chunk_rows}; it must be 0 (the library chooses) or more"
        )


def linear_arguments(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    floating(op, "x", x)
    floating(op, "weight", weight)
    if x.ndim == 0:
        raise ValueError(f"{op}: x is a scalar; it must be [..., K]")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}; for x of shape {tuple(x.shape)} "
            f"it must be [N, {x.shape[-1]}], as torch.nn.Linear keeps it"
        )
    one_device(op, "weight", weight, "x", x)
    _vector(op, "bias", bias, weight.shape[0], x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype.itemsize < x.dtype.itemsize:
            raise TypeError(
                f"{op}: {name} has dtype {parameter.dtype}, x has {x.dtype}; it must be as wide as x or wider: "
                f"pass x.to({parameter.dtype}), or {name}.to({x.dtype})"
            )


def _vector(op: str, name: str, vector: Tensor | None, size: int, x: Tensor) -> None:
    if vector is None:
        return
    floating(op, name, vector)
    if vector.ndim != 1 or vector.shape[0] != size:
        raise ValueError(f"{op}: {name} has shape {tuple(vector.shape)}; it must be [{size}]")
    one_device(op, name, vector, "x", x)


def _activation(op: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}")
