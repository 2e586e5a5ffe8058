"""attention_dequantize and attention_fp8_gradients, with which a backward undoes attention_quantize: what they accept.

Legend: see quantize_reference.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.ops.attn import checks
from tilesmith.ops.attn import quantize_reference as reference

KERNELS = {"triton": "tilesmith.ops.attn.triton.dequantize"}


def _check_dequantize(
    q8: Tensor, k8: Tensor, v8: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    tokens_first: Sequence[bool], dtype: str,
) -> None:  # fmt: skip
    name = "attention_dequantize"
    checks.check_shapes(name, q8, k8, v8)
    for x_name, x, scale in (("q", q8, q_scale), ("k", k8, k_scale), ("v", v8, v_scale)):
        if x.dtype in (torch.bool, torch.uint8) or (x.dtype.itemsize > 1 and x.dtype not in checks.FLOATS):
            raise TypeError(f"{name}: {x_name}8 has dtype {x.dtype}; float8, int8 and what is floating are supported")
        checks.check_factor(name, x_name, x, scale)
        _check_constant(name, {f"{x_name}8": x, f"{x_name}_scale": scale})
    _check_dtype(name, dtype, "")
    if len(tokens_first) != 3:
        raise ValueError(f"{name}: tokens_first has {len(tokens_first)} values; it must have one each for q, k and v")


def _check_gradients(
    dq8: Tensor | None, dk8: Tensor | None, dlse: Tensor | None, lse: Tensor | None, mean: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, dtype: str, scale: float, offset: int, rotate: bool, interleaved: bool,
) -> None:  # fmt: skip
    name = "attention_fp8_gradients"
    given = {x_name: x for x_name, x in (("dq8", dq8), ("dk8", dk8)) if x is not None}
    if not given:
        raise ValueError(f"{name}: dq8 and dk8 are both None; give at least one of them")
    _check_constant(name, {**given, "dlse": dlse, "lse": lse, "mean": mean, "cos": cos, "sin": sin})
    one = next(iter(given.values()))
    if cos is not None and offset < 0:
        raise ValueError(f"{name}: offset is {offset}; with cos and sin it must be 0 or more: S - T")
    for x_name, x in given.items():
        floating(name, x_name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: {x_name} must be [batch, heads, tokens, head dim], got {list(x.shape)}")
        checks.same_device(x_name, x, one, name)
        if x.dtype != one.dtype:
            raise TypeError(f"{name}: {x_name} has dtype {x.dtype}, dq8 {one.dtype}; they must be the same")
        if (x.shape[0], x.shape[3]) != (one.shape[0], one.shape[3]):
            raise ValueError(
                f"{name}: {x_name} must have dq8's batch {one.shape[0]} and head dim {one.shape[3]}, "
                f"got {list(x.shape)}"
            )  # fmt: skip
        checks.check_angles(name, x, x.shape[2] + (offset if x is dq8 else 0), cos, sin)
    checks.check_rotate(name, rotate, one.shape[3])
    _check_dtype(name, dtype, "'' (that of the gradients) or ")
    _check_moved(name, dq8, {"dlse": dlse, "lse": lse, "mean": mean})


def _check_constant(name: str, tensors: dict[str, Tensor | None]) -> None:
    """Raise ValueError where a gradient is asked for: there is none, as there is no second one of attention_fp8."""
    for x_name, x in tensors.items():
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: {x_name} requires a gradient, which there is not; call it under torch.no_grad()")


def _check_moved(name: str, dq8: Tensor | None, moved: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for a mean of keys and what belongs to it that do not fit dq8."""
    missing = [x_name for x_name, x in moved.items() if x is None]
    if len(missing) == 3:
        return
    if missing:
        raise ValueError(f"{name}: dlse, lse and mean go together; {' and '.join(missing)} is None")
    if dq8 is None:
        raise ValueError(f"{name}: dlse, lse and mean are given for dq8, which is None; leave them out")
    batch, heads, _, dim = dq8.shape
    for x_name, x in moved.items():
        checks.same_device(x_name, x, dq8, name)
        floating(name, x_name, x)
        if x_name != "mean" and x.shape != dq8.shape[:3]:
            raise ValueError(f"{name}: {x_name} must be {list(dq8.shape[:3])}, got {list(x.shape)}")
    mean = moved["mean"]
    whole = mean.ndim == 3 and (mean.shape[0], mean.shape[2]) == (batch, dim)
    if not whole or mean.shape[1] == 0 or heads % mean.shape[1]:
        raise ValueError(
            f"{name}: mean must be [{batch}, kv heads, {dim}] with a number of kv heads that divides {heads}, "
            f"got {list(mean.shape)}"
        )


def _check_dtype(name: str, dtype: str, more: str) -> None:
    if dtype not in reference.DTYPES and (dtype or not more):
        listed = ", ".join(map(repr, reference.DTYPES))
        raise ValueError(f"{name}: dtype is {dtype!r}; it must be {more}one of {listed}")


def _fake_gradients(
    dq8: Tensor | None, dk8: Tensor | None, dlse: Tensor | None, lse: Tensor | None, mean: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, dtype: str, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return reference.gradients_like(dq8, dk8, dtype)


def _fake_dequantize(
    q8: Tensor, k8: Tensor, v8: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    tokens_first: Sequence[bool], dtype: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return reference.dequantised_like(q8, k8, v8, tokens_first, dtype)


attention_dequantize = Op(
    reference.attention_dequantize,
    fake=_fake_dequantize,
    outputs=("q", "k", "v"),
    check=_check_dequantize,
    kernels=KERNELS,
)

attention_fp8_gradients = Op(
    reference.attention_fp8_gradients,
    fake=_fake_gradients,
    outputs=("dq", "dk"),
    check=_check_gradients,
    kernels=KERNELS,
)
