"""What a replay makes anew for each call. That replays compute what launchers do, test_ops checks on a GPU."""

import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tilesmith import explain, ops, use
from tilesmith.engine import ops as declared
from tilesmith.engine.launch import _Encoded
from tilesmith.engine.replay import _descriptor, _encodings


def test_a_descriptor_of_other_memory_is_the_recorded_one_but_for_its_base():
    tensor_descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    template = tensor_descriptor(torch.zeros(64, 32), [64, 32], [32, 1], [16, 16])
    other = torch.ones(64, 32)
    made = _descriptor(template, other)
    assert made.base is other and template.base is not other
    assert {**vars(made), "base": None} == {**vars(template), "base": None}


def _pretend_driver(monkeypatch, nvidia, encode):
    driver = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=encode))
    monkeypatch.setattr(nvidia.triton.runtime.driver, "_active", driver)


def test_a_descriptor_encoded_beforehand_is_what_triton_would_encode(monkeypatch):
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    if not nvidia.triton.__version__.startswith("3.6."):
        pytest.skip("the encoding is that of Triton 3.6; others keep their wrapper")
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base = torch.zeros(2, 3, 64, 128, dtype=torch.bfloat16)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    descriptor = TensorDescriptor(base, list(base.shape), list(base.stride()), [1, 1, 32, 64], layout)
    form = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 32, 64], "fp4_padded": False}

    def encode(*args):
        return "encoded", args[:4], *(tuple(a) for a in args[4:7]), args[7]

    _pretend_driver(monkeypatch, nvidia, encode)
    expected = nvidia.make_tensordesc_arg(descriptor, form)
    before, made, after = _encodings(_Encoded(None, encode, (form,)), [7, descriptor, None])
    assert (before, after) == (7, None) and made.base is base
    assert [made.maps[base.data_ptr()], *made.sizes] == expected
    assert made.maps[base.data_ptr()] is made.maps[base.data_ptr()] is not made.maps[base.data_ptr() + 512]


def test_the_launcher_below_tritons_wrapper_is_the_one_that_takes_encoded_descriptors(monkeypatch):
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    if not nvidia.triton.__version__.startswith("3.6."):
        pytest.skip("the encoding is that of Triton 3.6; others keep their wrapper")

    def launcher(*args):
        return args

    form = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 16], "fp4_padded": False}
    wrapper = nvidia.wrap_handle_tensordesc(launcher, {"x": "tensordesc<fp16[16, 16]>"}, [form])
    _pretend_driver(monkeypatch, nvidia, print)
    found = _Encoded.of(wrapper, SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[form])))
    assert found.run is launcher and found.encode is print and found.formats == (form,)


RECORDING = """
import sys
import torch
from tilesmith.engine import replay
x = torch.ones(3)
with replay._recording((x,)) as record:
    torch.empty(3)
assert record.refusal, "nothing was seen"
print("torch._dynamo" in sys.modules)
"""


def test_recording_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", RECORDING], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calls_of_a_compiled_graph_are_replayed():
    """There torch hands reshapes over whole, which eager calls show as views."""
    x = torch.randn(3, 8192, 256, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: ops.rms_norm(x), backend="aot_eager", dynamic=False)
    op = declared()["rms_norm"]
    op._recent.clear()
    for _ in range(4):
        compiled(x)
    assert {ready.run.__name__ for ready in op._recent.values()} == {"replay"}


@needs_hopper
def test_every_launch_has_a_counter_of_its_own():
    x = torch.randn(400, 36_864, device="cuda") * torch.arange(1, 401, device="cuda")[:, None]
    wanted = torch.nn.functional.rms_norm(x, x.shape[1:], eps=1e-6)

    def norm():
        with use(rms_norm="hopper_staying"):
            return ops.rms_norm(x)

    for _ in range(4):  # the third call is a replay
        torch.testing.assert_close(norm(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [norm(), norm()]
    for _ in range(3):
        found[0].zero_(), found[1].zero_()
        graph.replay()
        torch.testing.assert_close(found, [wanted, wanted])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found += [norm() for _ in range(5)]
    torch.cuda.synchronize()
    torch.testing.assert_close(found, [wanted] * 17)


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "dim", "causal"),
    [(3, 3, 1200, 128, False), (92, 4, 130, 128, False), (3, 3, 4000, 128, True), (3, 3, 1200, 64, False)],
)
def test_shares_of_a_tile_are_put_together_in_one_order(heads, kv_heads, tokens, dim, causal):
    """Whoever comes last for it, and whatever else runs."""
    q = torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, kv_heads, 4000, dim, device="cuda", dtype=torch.bfloat16)
    args = q, k, v, ops.Mask(causal=causal)
    attend = functools.partial(ops.attention, *args)
    with use(attention="hopper"):
        assert "equal shares" in explain("attention", *args).note
        wanted = attend()
        found = [attend() for _ in range(20)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
        for _ in range(3):
            captured[0].zero_()
            graph.replay()
            found.append([x.clone() for x in captured])
        streams = [torch.cuda.Stream() for _ in range(3)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found += [attend() for _ in range(5)]
    torch.cuda.synchronize()
    for out, lse in found:
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
