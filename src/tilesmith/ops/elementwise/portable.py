"""Portable kernels of the elementwise family."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilesmith.codegen import KernelIR
from tilesmith.device import portable
from tilesmith.device.rows import rows
from tilesmith.engine import register_kernel
from tilesmith.kernels import fused_ops
from tilesmith.kernels.rows import vector_lanes


def _launch(
    given: dict[str, Tensor],
    outs: dict[str, Tensor],
    config: Callable[..., Any],
    create: Callable[[Any], KernelIR],
) -> None:
    """Fill `outs`, contiguous, from tensors of one shape.

    config: from hidden_dim and other fields to the configuration of the kernel that `create` builds.
    """
    first = next(iter(given.values()))
    steps: dict[str, int] = {}
    if all(x.is_contiguous() for x in given.values()):  # one kernel for all shapes: rows of one vector
        columns = vector_lanes(first.numel())
        count = first.numel() // columns
        tensors = {name: portable.flat(x.reshape(-1), columns)[0] for name, x in given.items()}
    else:
        tensors, given = {}, {name: rows(x) for name, x in given.items()}
        count, columns = given[next(iter(given))].shape
        for name, x in given.items():
            tensors[name], [steps[f"{name}_step"]] = portable.flat(x, vector_lanes(columns))
    chosen = config(columns, strided=bool(steps), **portable.storage(first))
    portable.launch(create(chosen), chosen.grid(count), tensors | outs, {"rows": count, **steps})


def _gated(gate: Tensor, up: Tensor, config: Callable[..., Any], create: Callable[[Any], KernelIR]) -> Tensor:
    out = gate.new_empty(gate.shape)
    if out.numel():
        _launch({"gate": gate, "up": up}, {"out": out}, config, create)
    return out


def _gated_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, activation: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    wants_gate, wants_up = output_mask
    dgate, dup = gate.new_empty(gate.shape if wants_gate else 0), up.new_empty(up.shape if wants_up else 0)
    given = {"dout": dout, "gate": gate} | ({"up": up} if wants_gate else {})
    outs = {name: d for name, d, want in (("dgate", dgate, wants_gate), ("dup", dup, wants_up)) if want}

    def config(columns: int, **fields: Any) -> fused_ops.GatedVjpConfig:
        return fused_ops.GatedVjpConfig(columns, activation, wants_gate, wants_up, **fields)

    if gate.numel() and outs:
        _launch(given, outs, config, fused_ops.create_gated_vjp_kernel)
    return dgate, dup


def _reasons(call) -> list[str]:
    return portable.reasons(call, "gate")


def _vjp_reasons(call) -> list[str]:
    found = portable.reasons(call, "gate")
    if call.dout.dtype != call.gate.dtype:
        found.append(f"dout has dtype {call.dout.dtype}, gate {call.gate.dtype}; one for both is supported")
    return found


@register_kernel("swiglu", backend="portable", rank=portable.RANK, rejects=_reasons)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Four vectors of four elements a thread."""
    return _gated(gate, up, fused_ops.SwiGLUConfig, fused_ops.create_swiglu_kernel)


@register_kernel("swiglu_vjp", backend="portable", rank=portable.RANK, rejects=_vjp_reasons)
def swiglu_vjp(dout: Tensor, gate: Tensor, up: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Two vectors of four elements a thread."""
    return _gated_vjp(dout, gate, up, "silu", output_mask)


@register_kernel("geglu", backend="portable", rank=portable.RANK, rejects=_reasons)
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Four vectors of four elements a thread."""

    def config(columns: int, **fields: Any) -> fused_ops.GeGLUConfig:
        return fused_ops.GeGLUConfig(columns, approximate=approximate, **fields)

    return _gated(gate, up, config, fused_ops.create_geglu_kernel)


@register_kernel("geglu_vjp", backend="portable", rank=portable.RANK, rejects=_vjp_reasons)
def geglu_vjp(
    dout: Tensor, gate: Tensor, up: Tensor, approximate: str, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Two vectors of four elements a thread."""
    return _gated_vjp(dout, gate, up, "gelu_tanh" if approximate == "tanh" else "gelu", output_mask)
