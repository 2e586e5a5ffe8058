"""Where tests run: on a CPU, Triton kernels run in Triton's interpreter, which must be asked for before the import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    if torch._dynamo.is_dynamo_supported():
        torch._dynamo.reset()


@pytest.fixture
def missing():
    """missing(reason): skip, or fail where nothing may be skipped for want of a tool."""
    from tilesmith.settings import settings

    def decide(reason: str) -> None:
        if settings().require_all:
            pytest.fail(reason)
        pytest.skip(reason)

    return decide
