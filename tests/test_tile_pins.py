"""Pins that name fields of a kernel's configuration: what then runs, forward and backward, and what is refused."""

import pytest
import torch

from devices import DEVICE
from tilesmith import ops, use
from tilesmith.engine import ops as ops_by_name
from tilesmith.engine.backends import interpreting
from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn.op import attention_op, attention_vjp

pytestmark = pytest.mark.usefixtures("needs_triton")
SERVED = DEVICE.type != "cpu" or interpreting()


@pytest.fixture
def launched(monkeypatch):
    """Names of the attention kernels that are launched -> (BLOCK_M, BLOCK_N)."""
    from tilesmith.ops.attn import execute

    seen, launch = {}, execute.launch

    def spy(kernel, grid, *args, **named):
        if "BLOCK_N" in named:
            seen[kernel.fn.__name__] = (named["BLOCK_M"], named["BLOCK_N"])
        return launch(kernel, grid, *args, **named)

    monkeypatch.setattr(execute, "launch", spy)
    return seen


@pytest.mark.skipif(not SERVED, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 64), (64, 16)])
def test_pinned_fields_hold_forward_and_backward(block_m, block_n, launched):
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    plain, _ = ops.attention(q, k, v)
    launched.clear()
    with use(attention=f"triton:block_m={block_m}:block_n={block_n}"):
        out, _ = ops.attention(q, k, v)
    torch.testing.assert_close(out, plain)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    assert len(launched) == 3 and set(launched.values()) == {(block_m, block_n)}
    torch.testing.assert_close(got, torch.autograd.grad(plain, (q, k, v), dout))


@pytest.mark.parametrize("pin", ["triton:block_m", "triton:block_m=x", "triton:=3", "triton:block_m=-16"])
def test_pins_of_no_form_are_refused(pin):
    with pytest.raises(ValueError, match=r"attention must be backend\[:field"), use(attention=pin):
        pass


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"attention": "triton:block_m=7"}, "attention is pinned to block_m=7, .* must be a power of two, such as 16"),
        ({"attention": "triton:block_n=0"}, "block_n=0, which triton cannot compile; it must be a power of two"),
        ({"attention_vjp": "triton:dkv_block_n=96"}, "dkv_block_n=96, .* such as 64"),
        ({"attention": "triton_split:block_m=48"}, "block_m=48, which triton_split cannot compile"),
        ({"swiglu": "triton:block=1000"}, "block=1000, .* such as 512"),
        ({"rms_norm": "triton:num_warps=6"}, "num_warps=6, .* a power of two of at most 64"),
        ({"rms_norm": "hopper:num_warps=128"}, "num_warps=128, which hopper cannot compile"),
        ({"attention_vjp": "triton:dq_warps=3"}, "dq_warps=3, "),
    ],
)
def test_values_that_no_kernel_compiles_are_refused_where_they_are_pinned(pins, message):
    with pytest.raises(ValueError, match=message), use(**pins):
        pass


def test_every_value_that_is_tuned_may_be_pinned():
    for name, op in ops_by_name().items():
        for backend in op.backends():
            configure = getattr(op.kernel(backend).fn, "configure", None)
            for field, values in configure.space.choices.items() if configure is not None else ():
                for value in values:
                    with use(**{name: f"{backend}:{field}={int(value)}"}):
                        pass
    with use(softmax_dropout="hopper:num_warps=0"):  # its default, by which the plan chooses
        pass


@pytest.mark.skipif(not SERVED, reason="needs a GPU or Triton's interpreter")
def test_unknown_fields_are_refused_by_name():
    q = torch.randn(1, 2, 40, 16, device=DEVICE)
    with use(attention="triton:block_x=64"), pytest.raises(ValueError, match="no configuration field 'block_x'"):
        ops.attention(q, q, q)


@pytest.mark.skipif(not SERVED, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("op", [attention_op, attention_vjp], ids=lambda op: op.name)
def test_a_tile_too_large_for_an_arch_is_refused_with_the_numbers(op):
    x, rows = torch.zeros(1, 2, 256, 128, dtype=torch.float16), torch.zeros(1, 2, 256)
    given = {**attention_op.defaults, "q": x, "k": x, "v": x, "out": x, "lse": rows, "dout": x, "dlse": None}
    given |= {"gradients_fp32": False}
    args = tuple(given.get(name, (True,) * 5) for name in op.parameters)
    configure = op.kernel("triton").fn.configure
    configure.forget()
    configure.arch = arch_named("sm89")
    try:
        with pytest.raises(ValueError, match=r"block_\w = 512 .* does not fit in the 101,376 bytes of shared memory"):
            configure.with_fields(args, {"block_m": 512, "block_n": 512})
        assert configure.with_fields(args, {"block_m": 64, "block_n": 32})
    finally:
        configure.arch = None
        configure.forget()


@pytest.mark.parametrize(
    ("backend", "refused", "served"),
    [
        ("hopper", {"chunks": 1, "num_warps": 4}, {"chunks": 16, "num_warps": 8}),
        ("hopper", {"width": 8192}, {"chunks": 8, "num_warps": 8}),
        ("hopper_persistent", {"width": 2048}, {"width": 8192, "num_warps": 8}),
        ("hopper_persistent", {"width": 16_384, "slots": 16}, {"width": 16_384, "slots": 2}),
        ("hopper_persistent", {"chunks": 8}, {"num_warps": 8}),
    ],
)
def test_what_is_pinned_for_wide_rows_is_launched_or_refused(backend, refused, served, monkeypatch):
    from tilesmith.ops.norm.hopper import norm as hopper
    from tilesmith.ops.norm.hopper import persistent as hopper_persistent

    kernel = ops_by_name()["layer_norm"].kernel(backend)
    configure, launched = kernel.fn.configure, []
    for module in (hopper, hopper_persistent):
        monkeypatch.setattr(module, "launch", lambda *args, **named: launched.append(named))
    x, vector = torch.zeros(2, 131_072, dtype=torch.bfloat16), torch.ones(131_072, dtype=torch.bfloat16)
    args = (x, vector, vector, 1e-5)
    configure.forget()
    configure.arch = arch_named("sm90")
    try:
        with pytest.raises(ValueError, match="does not fit|no configuration field"):
            configure.with_fields(args, refused)
        configure.bind(args, served)(*args)
    finally:
        configure.arch = None
        configure.forget()
    (named,) = launched
    assert served.items() <= {k.lower(): v for k, v in named.items()}.items()
