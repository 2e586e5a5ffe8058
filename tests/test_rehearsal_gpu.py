"""What `explain` says of launchers without plans as data is what they launch: the names of kernels as a profiler shows
them, and all that decides how a kernel is compiled."""

import re
from functools import partial

import pytest
import torch

from kernels_of_calls import KernelsOfCalls
from tilesmith.engine import cases, use
from tilesmith.engine import ops as declared
from tilesmith.engine.backends import missing, triton_missing
from tilesmith.engine.launcher import in_place_of_launches
from tilesmith.engine.rehearsal import Launch, launches_of
from tilesmith.hardware.detect import arch_of
from tilesmith.validate.cases import each_output, pins_of
from tilesmith.validate.trial import _size

if not torch.cuda.is_available() or torch.version.hip or triton_missing() is not None:
    pytest.skip("needs an NVIDIA GPU and Triton", allow_module_level=True)

CUDA = torch.device("cuda")
NAMES = (
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "dropout_add_norm", "rms_norm_gated", "softmax",
    "softmax_dropout", "cross_entropy", "linear_cross_entropy", "rope", "rms_norm_rope", "experts", "experts_fp8",
)  # fmt: skip
SERVED = [(name, backend) for name in NAMES for backend in declared()[name].backends() if backend != "reference"]


def _triton(names) -> set[str]:
    """Those of Triton's kernels; those of libraries are C++ declarations."""
    return {name for name in names if re.fullmatch(r"\w+_kernel", name)}


def _named(choice) -> set[str]:
    return set(re.findall(r"^\s+\d+\. (\w+_kernel) on ", str(choice), re.MULTILINE))


def _explained(op, args, **given):
    """None where the pinned kernel rejects the call."""
    try:
        return op.explain(*args, **given)
    except NotImplementedError:
        return None


def _called(op, args, shown) -> list[tuple[str, object]]:
    """What is explained of the calls of the pinned kernels that take these arguments, which are made."""
    forward = _explained(op, args)
    if forward is None:
        return []
    outs = [o for o in each_output(shown.call(op, *args)) if o.requires_grad]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    backward = _explained(op, args, gradient=True) if outs and leaves and op.vjp is not None else None
    if backward is None or backward.kernel.plans is None:
        return [("forward", forward)]
    given = [torch.randn_like(o) for o in outs]
    shown.call(partial(torch.autograd.grad, allow_unused=True), outs, leaves, given)
    return [("forward", forward), ("backward", backward)]


@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_explain_names_the_kernels_that_a_profiler_shows(name, backend):
    op, told = declared()[name], []
    if missing(backend, CUDA) or op.kernel(backend).plans is None:
        pytest.skip(f"{backend} has no plans, or no such device")
    with KernelsOfCalls() as shown:
        for case in (case for case in cases(name) if _size(case) <= 2**22):
            dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0]
            args = op.bind((), case.build(CUDA, dtype, case.generator()))
            with use(**pins_of(op, backend)):
                told += [(case.name, *each) for each in _called(op, args, shown)]
    assert told, f"no case is one that {backend} takes"
    pairs = [(each, _triton(names), _named(each[2])) for each, names in zip(told, shown.names, strict=True)]
    wrong = [f"{c} {which}: shown {sorted(s)}, named {sorted(n)}" for (c, which, _), s, n in pairs if s != n]
    assert not wrong, "\n".join(wrong)


def _noted(fn, args) -> list[Launch] | None:
    """The launches of fn(*args), none of which is made; None where it reads what they would have written."""
    found = []
    with in_place_of_launches(
        lambda kernel, grid, given, named, cluster: found.append(Launch.of(kernel, grid, named, cluster))
    ):
        try:
            fn(*args)
        except (RuntimeError, IndexError, ValueError):
            return None
    return found


# experts look up tokens by what a kernel would have written
@pytest.mark.parametrize(("name", "backend"), [each for each in SERVED if not each[0].startswith("experts")])
def test_a_call_launches_what_was_rehearsed(name, backend):
    """Or kernels that threads compile ahead are compiled once more by the launch."""
    op, compared = declared()[name], 0
    kernel = op.kernel(backend)
    if missing(backend, CUDA) or kernel.plans is None:
        pytest.skip(f"{backend} has no plans, or no such device")
    for case in (case for case in cases(name) if _size(case) <= 2**22):
        dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0]
        args = op.bind((), case.build(CUDA, dtype, case.generator()))
        if kernel.rejects(op._describe(*args)):
            continue
        configure = getattr(kernel.fn, "configure", None)
        with torch.no_grad():
            fn = kernel.fn if configure is None else partial(configure.fn, config=configure(args, search=False))
            made = _noted(fn, args)
            if made is not None:
                assert made == launches_of(fn, args, arch_of(CUDA)), case.name
                compared += 1
    assert compared, f"no case is one that {backend} takes"
