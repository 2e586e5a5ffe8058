"""Where tests run: on a CPU, Triton kernels run in Triton's interpreter, which must be asked for before the import."""

import gc
import logging
import os
import sys
import zlib

import _pytest.logging
import pytest
import torch

import interpreter


def _start_at_a_gpu_of_ones_own() -> None:
    """Under pytest-xdist on a machine of several GPUs: all stay visible, each worker's first is another one.

    Before CUDA starts: torch counts through NVML, which starts nothing.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()
    if worker and count > 1:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",")[:count] if named else [str(i) for i in range(count)]
        first = int(worker.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


_start_at_a_gpu_of_ones_own()
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers, and the command line honours it
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class _AtTheRoot(_pytest.logging.catching_logs):
    """Takes what reaches the root logger. pytest 9.2 looks through all loggers for those that hand nothing on, 87 of
    torch's and transformers', which write to stderr, and adds its handlers to each, six times a test: 3 ms."""

    def __enter__(self):
        root = logging.getLogger()
        root.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler

    def __exit__(self, *problem):
        root = logging.getLogger()
        if self.level is not None:
            root.setLevel(self.orig_level)
        root.removeHandler(self.handler)


def pytest_configure(config):
    _pytest.logging.catching_logs = _AtTheRoot
    torch.set_num_threads(1)
    interpreter.mend()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is collected lives to the end, half a million objects: the garbage collector leaves it alone from the start,
    as it would look through all of it dozens of times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers(request):
    """A test draws the same numbers whatever ran before it, so that one that failed beside others fails alone too."""
    seed = zlib.crc32(request.node.nodeid.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # the other seeds a GPU that may come, too, and notes from where: 2 ms at the depth of pytest's stack
        torch.default_generator.manual_seed(seed)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    if "torch._dynamo" in sys.modules and torch._dynamo.is_dynamo_supported():
        torch._dynamo.reset()


def pytest_sessionstart(session):
    """Many tests take the kernels that are there, and would be content with fewer."""
    from tilesmith.engine.backends import triton_missing
    from tilesmith.settings import settings

    reason = triton_missing() if settings().require_all else None
    if reason is not None:
        raise pytest.UsageError(f"TILESMITH_REQUIRE_ALL=1: {reason}")


@pytest.fixture
def needs_triton():
    """Skip where Triton is not installed; a session in which nothing may be skipped does not start there."""
    from tilesmith.engine.backends import triton_missing

    if triton_missing() is not None:
        pytest.skip(triton_missing())


@pytest.fixture
def missing():
    """missing(reason): skip, or fail where nothing may be skipped for want of a tool."""
    from tilesmith.settings import settings

    def decide(reason: str) -> None:
        if settings().require_all:
            pytest.fail(reason)
        pytest.skip(reason)

    return decide


@pytest.fixture
def one_rank():
    """A default process group, over gloo, of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
