"""Cases of random sizes, kind by kind: 2,000 on a GPU; on a CPU a few small ones, in Triton's interpreter."""

import pytest
import torch

from devices import ON_GPU
from tilesmith.engine import T, ops
from tilesmith.engine.backends import interpreting, missing
from tilesmith.validate.cases import check_each
from tilesmith.validate.sampled import check_kind, kinds

COUNT = 2000
KINDS = [(op, kind) for op in sorted(ops()) for kind in kinds(op)]
# of small head dims, and without large blocks: the interpreter is slow
QUICK = (
    "d64_sides", "d64_packed_lengths", "d64_packed_all", "d48_fp32", "d32_mask", "d64_documents", "d32_shuffled",
    "d32_lists",
)  # fmt: skip


def _wrong(results):
    return [(r.kernel, r.case, r.message) for r in results if not r.passed][:5]


@pytest.mark.skipif(not ON_GPU, reason="thousands of cases need a GPU")
@pytest.mark.parametrize(("op", "kind"), KINDS)
def test_random_sizes(op, kind):
    assert not _wrong(check_kind(op, kind, "cuda", range(-(-COUNT // len(KINDS)))))


@pytest.mark.skipif(ON_GPU, reason="Triton's interpreter is for a CPU")
@pytest.mark.parametrize(("op", "kind"), [(op, kind) for op, kind in KINDS if kind in QUICK])
def test_small_random_sizes(op, kind):
    if not interpreting() or missing("triton", torch.device("cpu"), pinned=True):
        pytest.skip("Triton's interpreter is not here")
    case = kinds(op)[kind].sample(kind, 0, longest=32)
    assert not _wrong(check_each(ops()[op], ("triton",), case, "cpu", torch.float32))


@pytest.mark.parametrize(("op", "kind"), KINDS)
def test_a_number_draws_the_same_case_again(op, kind):
    first, again = ([_sizes(kinds(op)[kind].sample(kind, n)) for n in range(9)] for _ in range(2))
    assert first == again and len(set(first)) > 5


def _sizes(case):
    return tuple(x.shape for x in case.args.values() if isinstance(x, T))
