"""Attention's forward up to head dim 96 by its tiles, on one GPU of compute capability 9.0: what `FORWARD_TILES` of
`ops.attn.plan.tables` is fitted to.

    PYTHONPATH=src:benchmarks python benchmarks/forward_tiles.py results.json [--only dim=80] [--drawn 7 --count 10]
        [--seconds 80] [--dry]

How it goes is said in `tiles.py`. A row also names the tiles that the model chose, and how much longer they take than
the best ones. "padded" is what head dims from 65 to 96 had before: tiles of 128 queries, 128 keys and 128 columns.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import say
from tiles import Call, Study, calls, cudnn_forward, masked, tokens_first

from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn import reference
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.plan import hopper_forward as planning
from tilesmith.ops.attn.plan import joined
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.shape import rest_columns, shape_of
from tilesmith.ops.attn.plan.tables import FORWARD_TILES, JOINED_TILES

PADDED = HopperConfig(2, 128, 2, v_stages=3)
CHOSEN = HopperConfig(0, 0, 0)


class Tensors(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@functools.lru_cache(maxsize=1024)
def plan_for(shape: Any, config: HopperConfig) -> Any:
    columns = (lambda dim: 0) if config == PADDED else rest_columns
    with mock.patch.object(joined, "rest_columns", columns):
        return planning.hopper_forward.__wrapped__(shape, arch_named("sm90"), config)


@attention_arguments
def planned(call: Any, *, config: HopperConfig) -> Any:
    return plan_for(shape_of(call), config)


@attention_arguments
def launched(call: Any, *, config: HopperConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse."""
    from tilesmith.ops.attn.hopper.launch import call_tensors, describe, outputs
    from tilesmith.ops.attn.hopper.launch_forward import KERNELS

    plan = plan_for(shape_of(call), config)
    out, lse = outputs(call, plan)
    execute(plan, KERNELS, call_tensors(call, out, lse), describe, call.q.device, call.q.dtype)
    return out, lse


def exact(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """out and lse of one head in fp64, whose probabilities are rounded to `dtype`."""
    scores = masked(q.double() @ k.double().mT * call.dim**-0.5, call.causal)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    out = p.to(dtype).double() @ v.double() / p.sum(-1, keepdim=True)
    return out.to(dtype).double(), scores.logsumexp(-1)


class Forward(Study):
    script = __file__
    reference = staticmethod(reference.attention)
    planned, launched = staticmethod(planned), staticmethod(launched)
    dims = (72, 80, 88, 96, 64)
    cases = (
        "d96_tiles", "d80_tiles", "d72_causal_tiles", "d80_key_shares", "d80_packed", "d96_128_key_shares",
        "d72_key_shares_behind", "d96_causal_key_shares", "d88_group_of_3", "d96_whole_more_keys",
        "d80_whole_more_queries", "d72_two_programs", "d80_window", "d72_packed_window", "d80_lists",
        "d96_lists_narrow", "d72_64_tiles", "d64_96_tiles", "d192_80_tiles", "dropout_d80", "dropout_d72_packed",
        "dropout_d96_softcap",
    )  # fmt: skip
    shapes = calls(
        (1, 1696, 16, 16, 72, 0), (16, 729, 16, 16, 72, 0), (2, 4096, 16, 16, 72, 0), (21, 312, 32, 32, 80, 1),
        (8, 1024, 16, 16, 80, 0), (32, 257, 16, 16, 80, 0), (2, 2048, 32, 32, 80, 1), (16, 257, 16, 16, 88, 0),
        (1, 16520, 32, 32, 96, 1), (2, 1000, 32, 32, 96, 1), (2, 4096, 32, 32, 96, 1), (1, 12280, 32, 32, 96, 1),
        (4, 1024, 32, 32, 96, 1), (2, 2048, 16, 16, 96, 0),
        (3, 1500, 32, 8, 96, 1), (1, 8192, 16, 16, 80, 1),
        (1, 4096, 2, 2, 80, 0), (3, 4328, 16, 16, 88, 0), (1, 4096, 2, 2, 64, 0), (1, 4096, 7, 1, 64, 0),
        (4, 3241, 4, 4, 64, 0), (1, 167, 16, 16, 64, 0), (4, 336, 12, 12, 64, 0), (5, 472, 16, 16, 64, 0),
        (2, 264, 16, 16, 64, 0), (5, 288, 16, 16, 64, 0), (14, 496, 16, 16, 64, 0), (8, 197, 12, 12, 64, 0),
        (32, 197, 12, 12, 64, 0), (16, 256, 12, 12, 64, 0), (8, 512, 16, 16, 64, 0), (2, 768, 12, 12, 64, 0),
        (1, 1500, 20, 20, 64, 0), (3, 577, 16, 16, 64, 0), (4, 336, 12, 12, 64, 1), (8, 512, 16, 16, 64, 1),
        (7, 616, 25, 25, 64, 1), (1, 1500, 32, 8, 64, 1), (5, 952, 9, 3, 64, 1), (16, 1024, 32, 32, 64, 1),
    )  # fmt: skip

    def candidates(self, call: Call) -> dict[str, HopperConfig]:
        columns = 72 if 64 < call.dim <= 72 else 64 + rest_columns(call.dim)
        tiles = FORWARD_TILES[columns] | JOINED_TILES.get(columns, {})
        found = {f"{64 * t.consumers} x {t.block_n}": t for t in tiles}
        return found | ({"padded": PADDED} if call.dim > 64 else {})

    def inputs(self, call: Call, device: str) -> Tensors:
        return Tensors(*tokens_first(call, device, call.heads, call.kv_heads, call.kv_heads))

    def check(self, call: Call, name: str) -> dict[str, Any]:
        """Errors of the first and the last head beside twice those of products of the same dtype; of all heads, the
        distance from what the first candidate gives."""
        t, candidates = self.inputs(call, "cuda"), self.candidates(call)
        given = self.arguments(call, t)
        out, lse = launched(*given, config=candidates[name])
        torch.cuda.synchronize()
        found: dict[str, Any] = {"passed": True}
        for head in ((0, 0), (-1, -1)):
            one = t.q[head], t.k[head], t.v[head]
            true, right_lse = exact(call, *one, torch.float64)
            rounded, _ = exact(call, *one, torch.bfloat16)
            error = (out[head].double() - true).abs().max().item()
            allowed = 2 * ((rounded - true).abs().max().item() + 2**-9 * true.abs().max().item())
            error_lse = (lse[head].double() - right_lse).abs().max().item()
            found[f"head {head}"] = [error, allowed, error_lse]
            found["passed"] &= error <= allowed and error_lse <= 1e-3
        other, other_lse = launched(*given, config=next(iter(candidates.values())))
        error = (out.float() - other.float()).abs().max().item()
        found["apart"] = [error, (lse - other_lse).abs().max().item()]
        found["passed"] &= error <= 2**-7 * other.abs().max().item() and found["apart"][1] <= 1e-3
        return found

    def cudnn(self, call: Call, tensors: Tensors) -> Callable[[], object]:
        return lambda: cudnn_forward(call, *tensors)

    def timed(self, call: Call, right: dict[str, Any]) -> dict[str, Any]:
        row, plan = super().timed(call, right), self.plan_of(call, CHOSEN)
        us = {name: time for name, time in row["us"].items() if name != "cudnn"}
        row["chosen"] = "{} x {}".format(*plan.tile)
        row["loss"] = round(us[row["chosen"]] / min(us.values()) - 1, 3) if row["chosen"] in us else None
        say(call, "chosen:", row["chosen"], plan.split, "loss", row["loss"])
        return row


if __name__ == "__main__":
    sys.exit(Forward().main(__doc__))
