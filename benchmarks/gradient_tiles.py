"""Attention's gradients by their tiles, on one GPU of compute capability 9.0: what a model of their times is fitted to.

    PYTHONPATH=src:benchmarks python benchmarks/gradient_tiles.py results.json [--only dim=64] [--drawn 7 --count 10]
        [--seconds 100] [--dry]

How it goes is said in `tiles.py`. Last, the time of each kernel of a chain is taken.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from common import profiled, spent
from tiles import Call, Study, calls, cudnn_forward, masked, tokens_first

from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_vjp_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.plan.configs import HopperVjpConfig
from tilesmith.ops.attn.plan.hopper_backward import hopper_backward
from tilesmith.ops.attn.plan.shape import shape_of


def _parts(call: Call) -> Iterable[int]:
    """Parts of at most 1, 2, 4, … query heads, and all in one."""
    group = call.heads // call.kv_heads
    return sorted({1, *(-(-group // 2**n) for n in range(group.bit_length()))})


class Tensors(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def exact(call: Call, t: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv of one batch row, the last one: products of operands in `dtype`, else in fp32."""
    group = call.heads // call.kv_heads
    q, dout, out = (x[-1].float() for x in (t.q, t.dout, t.out))
    k, v = (x[-1].float().repeat_interleave(group, 0) for x in (t.k, t.v))
    p = (masked((q @ k.mT * call.dim**-0.5)[None], call.causal)[0] - t.lse[-1][..., None]).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * call.dim**-0.5
    p, ds = p.to(dtype).float(), ds.to(dtype).float()
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (ds.mT @ q, p.mT @ dout))
    return tuple(x.to(dtype).double() for x in (ds @ k, dk, dv))


@attention_vjp_arguments
def planned(call: Any, *, config: HopperVjpConfig) -> Any:
    return hopper_backward(shape_of(call), arch_named("sm90"), config)


@attention_vjp_arguments
def launched(call: Any, *, config: HopperVjpConfig) -> dict[str, torch.Tensor]:
    """The gradients by that configuration."""
    from tilesmith.ops.attn.hopper import launch_backward
    from tilesmith.ops.attn.hopper.launch import describe

    plan = hopper_backward(shape_of(call), arch_named("sm90"), config)
    gradients = {name: torch.empty_like(x) for name, x in (("dq", call.q), ("dk", call.k), ("dv", call.v))}
    given = launch_backward._tensors(call, plan, gradients, call.q.new_empty(0))
    execute(plan, launch_backward.KERNELS, given, describe, call.q.device, call.q.dtype)
    return gradients


def steps(fn: Callable[[], object], calls: int = 6) -> dict[str, float]:
    """Mean µs of each kernel of a call, in their order, the L2 cache warm."""
    return {name: round(us, 2) for name, us in spent(profiled(fn, calls=calls), calls).items()}


class Gradients(Study):
    script = __file__
    reference = staticmethod(reference.attention_vjp)
    planned, launched = staticmethod(planned), staticmethod(launched)
    cases = (
        "d80_tiles", "d72_causal_tiles", "d80_key_shares", "d96_turns", "d96_tiles", "d80_packed",
        "d96_deterministic_window", "d192_128_tiles",
    )  # fmt: skip
    shapes = calls(
        (7, 312, 12, 12, 64, 0), (16, 512, 12, 12, 64, 0), (32, 128, 12, 12, 64, 0), (4, 384, 16, 16, 64, 0),
        (64, 197, 16, 16, 64, 0), (128, 197, 3, 3, 64, 0), (8, 577, 12, 12, 64, 0), (8, 256, 16, 16, 64, 0),
        (2, 1024, 16, 16, 64, 0), (44, 416, 16, 16, 64, 0), (4, 1500, 20, 20, 64, 0), (2, 1500, 6, 6, 64, 0),
        (2, 4096, 16, 16, 64, 0), (28, 584, 9, 3, 64, 1), (4, 2048, 9, 3, 64, 1), (8, 1024, 12, 12, 64, 1),
        (2, 1024, 12, 12, 64, 1), (68, 344, 25, 25, 64, 1), (4, 712, 14, 2, 64, 1), (6, 944, 15, 5, 64, 1),
        (1, 2048, 32, 8, 64, 1), (8, 512, 16, 16, 64, 1), (4, 4096, 16, 16, 64, 1),
        (1, 1696, 16, 16, 72, 0), (4, 1024, 16, 16, 72, 0), (32, 256, 16, 16, 72, 0),
        (21, 312, 32, 32, 80, 1), (8, 1024, 16, 16, 80, 0), (2, 2048, 32, 32, 80, 1), (2, 4096, 16, 16, 80, 1),
        (2, 4096, 32, 32, 96, 1), (4, 1024, 32, 32, 96, 1), (2, 2048, 16, 16, 96, 0),
        (17, 1656, 71, 1, 64, 1), (14, 800, 71, 1, 64, 1), (1, 11000, 28, 4, 128, 1), (1, 2000, 28, 4, 128, 1),
        (2, 1500, 40, 8, 128, 1), (5, 416, 12, 12, 64, 0), (2, 504, 16, 16, 72, 0),
        (2, 336, 4, 1, 256, 1), (1, 640, 4, 1, 256, 1), (4, 1024, 4, 1, 256, 1), (2, 4096, 8, 8, 256, 1),
    )  # fmt: skip

    def candidates(self, call: Call) -> dict[str, HopperVjpConfig]:
        if call.dim <= 64:
            found = {"chosen": HopperVjpConfig(0, 0), "128": HopperVjpConfig(2, 128), "64": HopperVjpConfig(3, 64)}
            if call.kv_heads < call.heads:
                found |= {f"128, parts {n}": HopperVjpConfig(2, 128, group_parts=n) for n in _parts(call)}
            return found
        if call.dim <= 128:
            found = {"64": HopperVjpConfig(3, 64)}
            if call.kv_heads < call.heads:
                found |= {f"64, parts {n}": HopperVjpConfig(3, 64, group_parts=n) for n in _parts(call)}
            return found
        kinds = {"": 0, "overlap, ": 1}
        return {
            f"{kind}parts {parts}": HopperVjpConfig(2, 64, overlap, parts)
            for (kind, overlap), parts in itertools.product(kinds.items(), _parts(call))
        }

    def inputs(self, call: Call, device: str) -> Tensors:
        q, k, v, dout = tokens_first(call, device, call.heads, call.kv_heads, call.kv_heads, call.heads)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        if device != "meta":
            group = call.heads // call.kv_heads
            for i in range(call.batch):
                wide_k, wide_v = (x[i : i + 1].float().repeat_interleave(group, 1) for x in (k, v))
                scores = masked(q[i : i + 1].float() @ wide_k.mT * call.dim**-0.5, call.causal)
                lse[i] = scores.logsumexp(-1)[0]
                out[i] = (scores.softmax(-1) @ wide_v).to(out.dtype)[0]
        return Tensors(q, k, v, dout, out, lse)

    def check(self, call: Call, name: str) -> dict[str, Any]:
        """Errors of the gradients beside twice those of products of the same dtype."""
        t = self.inputs(call, "cuda")
        got = launched(*self.arguments(call, t), config=self.candidates(call)[name])
        torch.cuda.synchronize()
        right, plain = exact(call, t, torch.float32), exact(call, t, torch.bfloat16)
        found: dict[str, Any] = {"passed": True}
        for gradient, true, rounded in zip(("dq", "dk", "dv"), right, plain):
            error = (got[gradient][-1].double() - true).abs().max().item()
            allowed = 2 * ((rounded - true).abs().max().item() + 2**-8 * true.abs().max().item())
            found[gradient] = [error, allowed]
            found["passed"] &= error <= allowed
        return found

    def cudnn(self, call: Call, tensors: Tensors) -> Callable[[], object]:
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        out = cudnn_forward(call, q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), tensors.dout, retain_graph=True)

    def finish(self, rows: list[dict[str, Any]], values: dict[str, Any], until: float) -> None:
        for row in rows:
            if time.monotonic() < until:
                found, _ = self.runs(Call(*row["sizes"]), values)
                row["kernels"] = {name: steps(fn) for name, fn in found.items()}
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(Gradients().main(__doc__))
