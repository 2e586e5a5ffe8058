"""The elementwise family: what the activations are, what they accept and which kernels they have.

Legend: F features, the last dim; all ops work element by element.
"""

from torch import Tensor

from tilesmith.device import portable
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import floating
from tilesmith.engine.tracing import small
from tilesmith.ops.elementwise import reference

TRITON = {"triton": "tilesmith.ops.elementwise.triton.activations"}
EVERYWHERE = {**TRITON, portable.NAME: "tilesmith.ops.elementwise.portable"}
APPROXIMATE = ("none", "tanh")


def fake_like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_vjp(dout: Tensor, x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_gated_vjp(dout: Tensor, gate: Tensor, up: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    wants_gate, wants_up = rest[-1]
    return gate.new_empty(gate.shape if wants_gate else 0), up.new_empty(up.shape if wants_up else 0)


def _fake_of_out_vjp(dout: Tensor, out: Tensor) -> Tensor:
    return out.new_empty(out.shape)


def _fake_bias_vjp(dout: Tensor, x: Tensor, bias: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
    wants_x, wants_bias = rest[-1]
    return x.new_empty(x.shape if wants_x else 0), bias.new_empty(bias.shape) if wants_bias else x.new_empty(0)


def _check_pair(op: str, gate: Tensor, up: Tensor, names: tuple[str, str] = ("gate", "up")) -> None:
    first, second = names
    floating(op, first, gate)
    if up.shape != gate.shape:
        raise ValueError(
            f"{op}: {second} has shape {tuple(up.shape)}; it must equal {first}'s, {tuple(gate.shape)}: "
            "expand what would broadcast"
        )
    if up.dtype != gate.dtype:
        raise TypeError(f"{op}: {second} has dtype {up.dtype}, {first} has {gate.dtype}; they must match")
    if up.device != gate.device:
        raise ValueError(f"{op}: {second} is on {up.device}, {first} on {gate.device}; move them to one device")


def check_bias(op: str, x: Tensor, bias: Tensor | None) -> None:
    """x [..., F] and a bias [F] beside it."""
    floating(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x has no dims; it must be [..., F]")
    if bias is None:
        return
    floating(op, "bias", bias)
    if bias.ndim != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}; for this x it must be [{x.shape[-1]}]")
    if bias.device != x.device:
        raise ValueError(f"{op}: bias is on {bias.device}, x on {x.device}; move them to one device")


def _check_approximate(op: str, approximate: str) -> None:
    if approximate not in APPROXIMATE:
        raise ValueError(f"{op}: approximate is {approximate!r}; it must be 'none' or 'tanh'")


def _check_silu(x: Tensor) -> None:
    floating("silu", "x", x)


def _check_gelu(x: Tensor, approximate: str = "none") -> None:
    floating("gelu", "x", x)
    _check_approximate("gelu", approximate)


def _check_swiglu(gate: Tensor, up: Tensor) -> None:
    _check_pair("swiglu", gate, up)


def _check_geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> None:
    _check_pair("geglu", gate, up)
    _check_approximate("geglu", approximate)


def _check_sigmoid(x: Tensor) -> None:
    floating("sigmoid", "x", x)


def _check_relu_squared(x: Tensor) -> None:
    floating("relu_squared", "x", x)


def _check_add_relu(x: Tensor, y: Tensor) -> None:
    _check_pair("add_relu", x, y, ("x", "y"))


def _check_bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> None:
    check_bias("bias_gelu", x, bias)
    _check_approximate("bias_gelu", approximate)


silu_vjp = Op(reference.silu_vjp, fake=_fake_vjp, outputs=("dx",), kernels=TRITON, fold=("dout", "x"))
silu = Op(
    reference.silu,
    fake=fake_like,
    vjp=silu_vjp,
    outputs=("out",),
    check=_check_silu,
    kernels=TRITON,
    decompose=reference.silu,
    fold=("x",),
    sharding="* -> *",
)

gelu_vjp = Op(reference.gelu_vjp, fake=_fake_vjp, outputs=("dx",), kernels=TRITON, fold=("dout", "x"))
gelu = Op(
    reference.gelu,
    fake=fake_like,
    vjp=gelu_vjp,
    outputs=("out",),
    check=_check_gelu,
    kernels=TRITON,
    decompose=reference.gelu,
    fold=("x",),
    sharding="* -> *",
)

swiglu_vjp = Op(
    reference.swiglu_vjp,
    fake=_fake_gated_vjp,
    outputs=("dgate", "dup"),
    kernels=EVERYWHERE,
    fold=("dout", "gate", "up"),
)
swiglu = Op(
    reference.swiglu,
    fake=fake_like,
    vjp=swiglu_vjp,
    outputs=("out",),
    check=_check_swiglu,
    kernels=EVERYWHERE,
    decompose=reference.swiglu,
    when=small,
    fold=("gate", "up"),
    sharding="* * -> *",
)

geglu_vjp = Op(
    reference.geglu_vjp,
    fake=_fake_gated_vjp,
    outputs=("dgate", "dup"),
    kernels=EVERYWHERE,
    fold=("dout", "gate", "up"),
)
geglu = Op(
    reference.geglu,
    fake=fake_like,
    vjp=geglu_vjp,
    outputs=("out",),
    check=_check_geglu,
    kernels=EVERYWHERE,
    decompose=reference.geglu,
    when=small,
    fold=("gate", "up"),
    sharding="* * -> *",
)

sigmoid_vjp = Op(
    reference.sigmoid_vjp,
    fake=_fake_of_out_vjp,
    outputs=("dx",),
    kernels=TRITON,
    fold=("dout", "out", "x"),
)
sigmoid = Op(
    reference.sigmoid,
    fake=fake_like,
    vjp=sigmoid_vjp,
    outputs=("out",),
    check=_check_sigmoid,
    kernels=TRITON,
    decompose=reference.sigmoid,
    fold=("x",),
    sharding="* -> *",
)

relu_squared_vjp = Op(
    reference.relu_squared_vjp,
    fake=_fake_vjp,
    outputs=("dx",),
    kernels=TRITON,
    fold=("dout", "x"),
)
relu_squared = Op(
    reference.relu_squared,
    fake=fake_like,
    vjp=relu_squared_vjp,
    outputs=("out",),
    check=_check_relu_squared,
    kernels=TRITON,
    decompose=reference.relu_squared,
    fold=("x",),
    sharding="* -> *",
)

add_relu_vjp = Op(
    reference.add_relu_vjp,
    fake=_fake_of_out_vjp,
    outputs=("dx",),
    kernels=TRITON,
    fold=("dout", "out", "x"),
)
add_relu = Op(
    reference.add_relu,
    fake=fake_like,
    vjp=add_relu_vjp,
    outputs=("out",),
    check=_check_add_relu,
    kernels=TRITON,
    alias={"y": "x"},
    decompose=reference.add_relu,
    fold=("x", "y"),
    sharding="* * -> *",
)

# Not decomposed: Inductor reads dx again for dbias, or x and dout twice.
bias_gelu_vjp = Op(
    reference.bias_gelu_vjp,
    fake=_fake_bias_vjp,
    outputs=("dx", "dbias"),
    kernels=TRITON,
    fold=("dout", "x"),
)
bias_gelu = Op(
    reference.bias_gelu,
    fake=fake_like,
    vjp=bias_gelu_vjp,
    outputs=("out",),
    check=_check_bias_gelu,
    kernels=TRITON,
    fold=("x",),
    sharding="*n n -> *n",
)
