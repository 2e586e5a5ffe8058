"""The gate family: what the activations are, what they accept and which kernels they have.

Legend: F features, the last dim; all ops work element by element.
"""

from torch import Tensor

from tilesmith.engine import Op
from tilesmith.ops.gate import reference

TRITON = {"triton": "tilesmith.ops.gate.triton"}
APPROXIMATE = ("none", "tanh")


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_vjp(dout: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gated_vjp(dout: Tensor, gate: Tensor, up: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    wants_gate, wants_up = rest[-1]
    return gate.new_empty(gate.shape if wants_gate else 0), up.new_empty(up.shape if wants_up else 0)


def _check_floating(op: str, name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}; it must be a floating dtype")


def _check_pair(op: str, gate: Tensor, up: Tensor) -> None:
    _check_floating(op, "gate", gate)
    if up.shape != gate.shape:
        raise ValueError(f"{op}: up has shape {tuple(up.shape)}; it must equal gate's, {tuple(gate.shape)}")
    if up.dtype != gate.dtype:
        raise TypeError(f"{op}: up has dtype {up.dtype}, gate has {gate.dtype}; they must agree")
    if up.device != gate.device:
        raise ValueError(f"{op}: up is on {up.device}, gate on {gate.device}; move them to one device")


def _check_approximate(op: str, approximate: str) -> None:
    if approximate not in APPROXIMATE:
        raise ValueError(f"{op}: approximate is {approximate!r}; it must be 'none' or 'tanh'")


def _check_silu(x: Tensor) -> None:
    _check_floating("silu", "x", x)


def _check_gelu(x: Tensor, approximate: str = "none") -> None:
    _check_floating("gelu", "x", x)
    _check_approximate("gelu", approximate)


def _check_swiglu(gate: Tensor, up: Tensor) -> None:
    _check_pair("swiglu", gate, up)


def _check_geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> None:
    _check_pair("geglu", gate, up)
    _check_approximate("geglu", approximate)


silu_vjp = Op(reference.silu_vjp, fake=_fake_vjp, outputs=("dx",), kernels=TRITON, fold=("dout", "x"), sharding="elementwise")
silu = Op(
    reference.silu,
    fake=_fake,
    vjp=silu_vjp,
    outputs=("out",),
    check=_check_silu,
    kernels=TRITON,
    decompose=reference.silu,
    fold=("x",),
    sharding="elementwise",
)

gelu_vjp = Op(reference.gelu_vjp, fake=_fake_vjp, outputs=("dx",), kernels=TRITON, fold=("dout", "x"), sharding="elementwise")
gelu = Op(
    reference.gelu,
    fake=_fake,
    vjp=gelu_vjp,
    outputs=("out",),
    check=_check_gelu,
    kernels=TRITON,
    decompose=reference.gelu,
    fold=("x",),
    sharding="elementwise",
)

swiglu_vjp = Op(
    reference.swiglu_vjp,
    fake=_fake_gated_vjp,
    outputs=("dgate", "dup"),
    kernels=TRITON,
    fold=("dout", "gate", "up"),
    sharding="elementwise",
)
swiglu = Op(
    reference.swiglu,
    fake=_fake,
    vjp=swiglu_vjp,
    outputs=("out",),
    check=_check_swiglu,
    kernels=TRITON,
    fold=("gate", "up"),
    sharding="elementwise",
)

geglu_vjp = Op(
    reference.geglu_vjp,
    fake=_fake_gated_vjp,
    outputs=("dgate", "dup"),
    kernels=TRITON,
    fold=("dout", "gate", "up"),
    sharding="elementwise",
)
geglu = Op(
    reference.geglu,
    fake=_fake,
    vjp=geglu_vjp,
    outputs=("out",),
    check=_check_geglu,
    kernels=TRITON,
    fold=("gate", "up"),
    sharding="elementwise",
)
