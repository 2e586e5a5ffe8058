"""Pins that name fields of a kernel's configuration: what then runs, forward and backward, and what is refused."""

import pytest
import torch

from tilesmith import ops, use
from tilesmith.engine import ops as ops_by_name
from tilesmith.engine.backends import interpreting
from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn.op import attention_op, attention_vjp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("needs_triton")
SERVED = DEVICE.type != "cpu" or interpreting()


@pytest.fixture
def launched(monkeypatch):
    """Names of the attention kernels that are launched -> (BLOCK_M, BLOCK_N)."""
    from tilesmith.ops.attn.triton import backward, forward

    seen = {}
    for module in (forward, backward):
        launch = module.launch

        def spy(kernel, grid, *args, launch=launch, **named):
            if "BLOCK_N" in named:
                seen[kernel.fn.__name__] = (named["BLOCK_M"], named["BLOCK_N"])
            return launch(kernel, grid, *args, **named)

        monkeypatch.setattr(module, "launch", spy)
    return seen


@pytest.mark.skipif(not SERVED, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 64), (64, 16)])
def test_pinned_fields_hold_forward_and_backward(block_m, block_n, launched):
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    plain, _ = ops.attention(q, k, v)
    with use(attention=f"triton:block_m={block_m}:block_n={block_n}"):
        out, _ = ops.attention(q, k, v)
    torch.testing.assert_close(out, plain)
    dout = torch.randn_like(out)
    launched.pop("_attention_dkv_kernel", None)
    got = torch.autograd.grad(out, (q, k, v), dout)
    assert len(launched) == 3 and set(launched.values()) == {(block_m, block_n)}
    torch.testing.assert_close(got, torch.autograd.grad(plain, (q, k, v), dout))


@pytest.mark.parametrize("pin", ["triton:block_m", "triton:block_m=x", "triton:=3", "triton:block_m=-16"])
def test_pins_of_no_form_are_refused(pin):
    with pytest.raises(ValueError, match="a pin is backend"), use(attention=pin):
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


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "keys", "right", "wanted"),
    [
        (4, 16, 4096, 4096, None, (1980, 132)),  # 15 rounds, and 68 tiles
        (1, 1, 20, 4096, None, (0, 4)),
        (1, 5, 4096, 4096, None, (132, 112)),  # a round, and 28 tiles of 4 shares each
        (1, 3, 2048, 2048, None, (0, 96)),  # 2 shares each, with no rounds before them
        (1, 4, 1024, 1024, None, (32, 0)),  # spares too little
        (1, 132, 256, 4096, None, (264, 0)),  # come out even
        (8, 16, 2048, 2048, None, (2048, 0)),  # spares less than it costs
        (1, 2, 131_072, 131_072, None, (2048, 0)),  # keys do not stay in the L2 cache
        (1, 4, 4096, 4096, 0, (0, 132)),  # 32 tiles a head of 1 to 32 blocks
        (1, 4, 2048, 2048, 0, (64, 0)),
        (1, 5, 4096, 4096, 0, (160, 0)),  # the counter evens these out
        (1, 64, 256, 131_072, 0, (128, 0)),
    ],
)
def test_tiles_are_divided_where_that_spares_more_than_it_costs(batch, heads, tokens, keys, right, wanted):
    from tilesmith.ops.attn.hopper.stream_k import divided

    q = torch.empty(batch, heads, tokens, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads, keys, 128, dtype=torch.bfloat16, device="meta")
    tiles = -(-tokens // 128) * batch * heads
    assert divided(q, k, k, tiles, 128, 128, right, arch_named("sm90")) == wanted


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "keys", "wanted"),
    [
        (1, 16, 16, 2048, 2048, True),
        (2, 16, 16, 8192, 8192, True),
        (1, 32, 8, 16_384, 16_384, True),
        (64, 16, 16, 1024, 1024, False),  # as many blocks of dq as would be spared
        (8, 16, 16, 2048, 2048, False),
        (1, 4, 4, 8192, 2048, False),  # four times the queries and dq in the L2 cache at a time
    ],
)
def test_ordered_tiles_start_apart_where_that_spares_more_than_it_costs(batch, heads, kv_heads, tokens, keys, wanted):
    from tilesmith.ops.attn.hopper.launch_backward import rings, section_vjp

    q, arch = torch.empty(batch, heads, tokens, 128, dtype=torch.bfloat16, device="meta"), arch_named("sm90")
    section = section_vjp(q, kv_heads, keys // 128, arch, False, True, False)
    assert rings(q, tokens // 64, keys // 128, section, arch) == wanted


def test_attention_tells_that_tiles_are_made_in_shares(monkeypatch):
    from tilesmith.ops.attn.hopper import launch_forward as hopper
    from tilesmith.ops.attn.op import attention_op

    monkeypatch.setattr(hopper, "arch_of", lambda device: arch_named("sm90"))
    kernel = attention_op.kernel("hopper")
    tells = lambda *args: kernel.tells(*args, config=hopper.attention.configure(args))  # noqa: E731
    q, few = (torch.empty(4, heads, 4096, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 33))
    assert tells(*attention_op.bind((q, q, q), {})) == [
        "1980 tiles by one program each, 68 in 132 equal shares of keys"
    ]
    assert tells(*attention_op.bind((few, few, few), {})) == []
    assert tells(*attention_op.bind((q, q, q), {"causal": True})) == []
