"""Context parallelism in accelerate and transformers' Trainer: gloo ranks run the checks of sharded_accelerate.py."""

import pytest
import torch.distributed as dist

from ranks import torchrun
from test_sharding import run_checks

pytest.importorskip("transformers")
pytest.importorskip("accelerate", minversion="1.12")  # with ParallelismConfig, as Trainer wants it
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def test_ranks(tmp_path):
    told = run_checks(tmp_path, modules=("sharded_accelerate",))
    assert not any("FAILED" in one for one in told), "\n".join(told)


def test_the_example():
    """It compares itself with one process."""
    assert "step 2: loss" in torchrun("examples/long_context_trainer.py")
