"""What a process meets on a GPU: streams beside one another, memory that runs out, Triton's cache damaged."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from devices import ON_GPU
from op_runs import NAMES
from tilesmith import ops
from tilesmith.engine import cases
from tilesmith.engine import ops as declared

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: streams, its memory, its compiler")


def _inputs(name: str) -> list[tuple]:
    """Two sets of inputs of one op, alike but for their numbers."""
    op = declared()[name]
    case = next(c for c in cases(name) if "test" in c.tags and torch.float32 in c.dtypes)
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        args = op.bind((), case.build(torch.device("cuda"), torch.float32, generator))
        found.append(tuple(a.detach() if isinstance(a, Tensor) else a for a in args))
    return found


def _call(name: str, args: tuple) -> list[Tensor]:
    op = declared()[name]
    outs = op(*(a.clone() if n in op.mutates else a for n, a in zip(op.parameters, args)))
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o is not None]
    return [o.float() if o.is_floating_point() and o.itemsize == 1 else o for o in outs]  # 8 bits compare as others


@pytest.mark.parametrize("name", [n for n in NAMES if any(torch.float32 in c.dtypes for c in cases(n))])
def test_two_streams(name):
    """Calls of one shape on two streams at once: first, recorded and replayed ones, each on numbers of its own."""
    both = _inputs(name)
    wanted = [_call(name, args) for args in both]
    declared()[name]._recent.clear()  # so that the calls below are first calls again
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]
    found: list[list[list[Tensor]]] = [[], []]
    for _ in range(8):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[place].append(_call(name, both[place]))
    torch.cuda.synchronize()
    for place, expected in enumerate(wanted):
        for got in found[place]:
            torch.testing.assert_close(got, expected, equal_nan=True)


def _step(x: Tensor, weight: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    hidden = ops.rms_norm(ops.swiglu(x, x), weight)
    q = hidden.view(1, -1, 8, 64).transpose(1, 2)
    out, _ = ops.attention(q, q, q, ops.Mask(causal=True))
    loss = ops.linear_cross_entropy(out.transpose(1, 2).reshape(-1, 512), head, labels)
    loss.backward()
    return loss.detach()


def test_memory_that_runs_out_in_the_middle_leaves_everything_as_it_was():
    """The allocator is given less than the step needs, a little more each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = (8192, 512), (512,), (8192, 512)
    leaves = [torch.randn(*s, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for s in shapes]
    labels = torch.randint(0, 8192, (8192,), generator=generator).cuda()
    values = [t.detach().clone() for t in leaves]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        return _step(*leaves, labels)

    for _ in range(3):  # the third is replayed
        expected = step()
    gradients = [t.grad.clone() for t in leaves]
    torch.cuda.reset_peak_memory_stats()
    step()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    failed = 0
    try:
        for part in range(16):
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((held + (peak - held) * part / 12) / total)
            try:
                step()
            except torch.OutOfMemoryError:
                failed += 1
            for leaf in leaves:
                leaf.grad = None
            gc.collect()
            assert torch.cuda.memory_allocated() == before
            assert all(torch.equal(t, value) for t, value in zip(leaves, values))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed > 4
    torch.testing.assert_close(step(), expected)
    for leaf, gradient in zip(leaves, gradients):
        torch.testing.assert_close(leaf.grad, gradient)


ONE_CALL = """
import json, torch
from tilesmith import ops, use
try:
    x = torch.ones(64, device="cuda")
    with use(silu="triton"):
        y = ops.silu(x)
    print(json.dumps(["right" if torch.allclose(y, torch.nn.functional.silu(x)) else "wrong"]))
except RuntimeError as problem:
    print(json.dumps(["refused", str(problem)]))
"""


def _first_call(cache) -> list[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", ONE_CALL], capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_damaged_cache_of_triton_is_named(tmp_path):
    cache = tmp_path / "cache"
    assert _first_call(cache) == ["right"]
    kept = [path for path in cache.rglob("*") if path.is_file() and path.suffix == ".json"]
    assert kept
    for path in kept:
        path.write_text("{")
    verdict, *said = _first_call(cache)
    assert verdict == "right" or (verdict == "refused" and str(cache) in said[0] and "TRITON_CACHE_DIR" in said[0])


def test_a_cache_of_triton_that_cannot_be_written_is_named(tmp_path):
    """A file stands where the folder would be: as good as read-only, also for root."""
    (tmp_path / "file").write_text("")
    verdict, said = _first_call(tmp_path / "file" / "cache")
    assert verdict == "refused" and "TRITON_CACHE_DIR" in said
