"""Triton's launchers as the engine calls them: what reaches the driver is what Triton's own call hands to it."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tilesmith.engine import cases, ops, triton_private
from tilesmith.engine import launch as launch_function
from tilesmith.engine.backends import interpreting
from tilesmith.engine.recording import _encodings
from tilesmith.engine.triton_private import OPTIONS, Compiled, Encoded
from tilesmith.validate import check

nvidia = pytest.importorskip("triton.backends.nvidia.driver")

FORM = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 32, 64], "fp4_padded": False}
SIGNATURE = {"x": "tensordesc<bf16[1, 1, 32, 64]>", "count": "i32", "WIDTH": "constexpr"}


def _encode(*args):
    return ("encoded", args[:4], *(tuple(a) for a in args[4:7]), args[7])


def _descriptor():
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base = torch.zeros(2, 3, 64, 128, dtype=torch.bfloat16)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(base, list(base.shape), list(base.stride()), [1, 1, 32, 64], layout)


@pytest.fixture
def reached(monkeypatch):
    """What comes to the C function that launches, with a driver that is not there."""
    told = []

    def launch(*args):
        told.append(tuple(tuple(a) if isinstance(a, list) else a for a in args))

    utils = SimpleNamespace(launch=launch, build_signature_metadata=tuple, fill_tma_descriptor=_encode)
    utils.fill_tma_descriptor_tiled = _encode
    monkeypatch.setattr(nvidia.triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **kw: utils, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(nvidia, "make_launcher", lambda *args: "", raising=False)
    for name in ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):  # which the C module brings
        monkeypatch.setattr(nvidia, name, lambda **kw: tuple(kw.items()), raising=False)
    return told


def _compiled(scratch=0):
    fn = SimpleNamespace(arg_names=list(SIGNATURE), params=list(SIGNATURE))
    source = SimpleNamespace(fn=fn, signature=SIGNATURE, constants={"WIDTH": 64})
    metadata = SimpleNamespace(
        num_ctas=1, global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True, tensordesc_meta=[FORM],
    )  # fmt: skip
    launcher = nvidia.CudaLauncher(source, metadata)
    return SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 1024), src=source, metadata=metadata)


def _given(found, values):
    return (values,) if found.together else values


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_direct_launch_is_tritons_own(reached, cluster):
    compiled, values = _compiled(), [_descriptor(), 7, 64]
    compiled.run(2, 3, 5, 7, 99, (4, cluster, 1024), None, None, None, *values)
    found = Compiled(compiled, cluster)
    assert found.run is not compiled.run, "the launcher's own call, which is slower, is still made"
    found.run(2, 3, 5, 7, found.function, *found.head, *_given(found, values))
    assert len(reached) == 2 and reached[0] == reached[1]


def test_a_replayed_launch_is_tritons_own(reached):
    compiled, values = _compiled(), [_descriptor(), 7, 64]
    compiled.run(2, 3, 5, 7, 99, (4, 1, 1024), None, None, None, *values)
    found = Compiled(compiled)
    encoding, *rest = _encodings(found.encoded, values)
    assert encoding.base is values[0].base
    flat = [encoding.maps[encoding.base.data_ptr()], *encoding.sizes, *rest]
    found.encoded.run(2, 3, 5, 7, found.function, *found.head, *_given(found, tuple(flat)))
    assert len(reached) == 2 and reached[0] == reached[1]
    maps, address = encoding.maps, encoding.base.data_ptr()
    assert maps[address] is maps[address] is not maps[address + 512]


def test_memory_that_each_launch_needs_is_left_to_triton(reached):
    compiled = _compiled(scratch=8)
    found = Compiled(compiled)
    assert found.run is compiled.run and found.encoded is None


def test_a_launcher_that_hands_on_something_else_is_called_as_it_is():
    class Other:
        global_scratch_size = profile_scratch_size = 0

        def launch(self, *args):
            raise AssertionError

        def __call__(self, *args):
            self.launch(*args, "one more")

    source = SimpleNamespace(fn=SimpleNamespace(params=[1, 2]))
    compiled = SimpleNamespace(run=Other(), function=1, packed_metadata=(4, 1, 0), src=source, metadata=None)
    found = Compiled(compiled)
    assert found.run is compiled.run and found.head == ((4, 1, 0), None, None, None)


def test_metadata_of_another_form_stops_a_launch_by_clusters():
    compiled = SimpleNamespace(run=print, function=1, packed_metadata={"warps": 4})
    with pytest.raises(RuntimeError, match=r"not \(warps, CTAs, shared\)"):
        Compiled(compiled, 2)


def test_an_unknown_release_encodes_its_descriptors_itself(reached, monkeypatch):
    monkeypatch.setattr(triton_private, "version", lambda: "4.0.0")
    compiled = _compiled()
    assert Encoded.of(compiled.run.launch, compiled) is None
    assert Compiled(compiled).encoded is None


def test_every_kernel_is_compiled_with_contraction_whatever_the_release_defaults_to():
    asked = []

    class Kernel(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *args, **named: asked.append(named)

    launch_function(Kernel(), (1,), 2, BLOCK=4)
    assert asked == [{"BLOCK": 4, **OPTIONS}] and OPTIONS["enable_fp_fusion"] is True


def test_an_option_that_a_launcher_gives_stays_as_given():
    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **named: (grid, args, named)

    for given, fused in (({}, True), ({"enable_fp_fusion": False}, False)):
        assert triton_private.run(Kernel(), (3,), (1,), given) == ((3,), (1,), {"enable_fp_fusion": fused})


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (lambda folder: json.JSONDecodeError("Expecting value", "{", 1), True),
        (lambda folder: NotADirectoryError(20, "Not a directory", f"{folder}/ab"), True),
        (lambda folder: PermissionError(13, "Permission denied", f"{folder}/ab/silu.json"), True),
        (lambda folder: FileNotFoundError(2, "No such file or directory", "ptxas"), False),
    ],
)
def test_a_cache_that_cannot_be_used_is_named(monkeypatch, tmp_path, problem, told):
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    kernel = {(1,): Mock(side_effect=problem(tmp_path))}
    with pytest.raises(RuntimeError if told else FileNotFoundError) as raised:
        triton_private.run(kernel, (1,), (), {})
    assert told is ("delete that folder, or set TRITON_CACHE_DIR" in str(raised.value))
    assert told is (str(tmp_path) in str(raised.value))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["swept", "causal_swept", "vast_swept"])
@pytest.mark.parametrize("op", ["softmax", "softmax_dropout"])
def test_softmax_backward_is_right_by_either_way_of_adding_up_y(monkeypatch, op, name, apart):
    """From Triton 3.9 on sums of y are kept by column. With one release alone, the other way would never run."""
    if not interpreting():
        pytest.skip("a kernel that is compiled keeps what it was compiled with")
    import triton.language as tl

    from tilesmith.ops.norm.triton import softmax

    monkeypatch.setattr(softmax, "APART", tl.constexpr(apart))
    case = next(case for case in cases(op) if case.name == name)
    result = check(ops()[op], "triton", case, "cpu", torch.float32)
    assert result.passed and not result.message.startswith("rejects"), result.message
