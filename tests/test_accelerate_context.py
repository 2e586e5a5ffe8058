"""Context parallelism in accelerate and transformers' Trainer: gloo ranks run the checks of sharded_accelerate.py."""

import pytest
import torch

from ranks import gloo, run_checks, torchrun
from tilesmith import ops
from tilesmith.distributed import Layout, LocalRing, context_parallel_attention

pytest.importorskip("transformers")
pytest.importorskip("accelerate", minversion="1.12")  # with ParallelismConfig, as Trainer wants it
pytestmark = gloo


def test_ranks(tmp_path):
    told = run_checks(tmp_path, ("sharded_accelerate",))
    assert not any("FAILED" in one for one in told), "\n".join(told)


def test_the_example():
    """It compares itself with one process."""
    assert "step 2: loss" in torchrun("examples/long_context_trainer.py")


def test_autocast_casts_what_it_casts_for_one_process():
    """Rotation leaves queries and keys in fp32 beside values in bf16, as a model's under Trainer's `bf16` and DDP."""
    layout, mask = Layout.zigzag(37, 2), ops.Mask(causal=True)
    q, k, v = (torch.randn(1, h, 37, 16).requires_grad_() for h in (4, 2, 2))
    shards = [[layout.shard(x, rank, 2) for rank in range(2)] for x in (q, k, v.bfloat16())]
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = ops.attention(q, k, v.bfloat16(), mask)
        outs, _ = context_parallel_attention(*shards, LocalRing(2), mask, layout=layout)
    out = layout.unshard(outs, 2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    exact = torch.autograd.grad(expected, (q, k, v), dout)
    for g, e in zip(torch.autograd.grad(out, (q, k, v), dout), exact):
        torch.testing.assert_close(g.bfloat16(), e.bfloat16())
