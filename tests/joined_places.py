"""Where values lie in compiled forwards with joined products (`hopper.joined`), a line of JSON for each kernel.

TRITON_INTERPRET=0 PYTHONPATH=src:tests python -m joined_places tiles|cases
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget

from plan_calls import SM90
from tilesmith.engine import cases, ops, triton_private
from tilesmith.engine.launcher import compiling_for
from tilesmith.hardware.detect import assuming
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.launch import call_tensors, describe, outputs
from tilesmith.ops.attn.hopper.launch_forward import KERNELS, dims
from tilesmith.ops.attn.plan.configs import HopperConfig
from tilesmith.ops.attn.plan.hopper_forward import hopper_forward
from tilesmith.ops.attn.plan.shape import shape_of
from tilesmith.ops.attn.plan.tables import FORWARD_TILES
from tilesmith.ops.attn.plan.tables import hopper_forward as configured

CASES = (
    "d80_packed", "d80_lists", "d72_lists", "d96_lists_narrow", "d80_window", "d72_packed_window", "dropout_d80",
    "dropout_d72_packed", "d88_group_of_3", "d80_key_shares", "d64_96_tiles", "d192_80_tiles",
    "d72_wide_tiles", "d72_wide_causal_tiles", "d72_wide_group_of_3", "d128_72_tiles",
)  # fmt: skip
PINNED = {
    72: (HopperConfig(1, 64, 3),), 80: (HopperConfig(3, 96, 3),),
    96: (HopperConfig(2, 128, 3), HopperConfig(3, 96, 3), HopperConfig(3, 96, 2)),
}  # fmt: skip


@attention_arguments
def compiled(call, *, config, fp32):
    """(step, compiled kernel) of a call's forward."""
    plan = hopper_forward(shape_of(call)._replace(out_fp32=fp32), SM90, config)
    out, lse = outputs(call, plan, fp32=fp32)
    given, found = call_tensors(call, out, lse) | ({"out_strides": out.stride()[:3]} if fp32 else {}), []
    with assuming(SM90), compiling_for(GPUTarget("cuda", 90, 32), found):
        execute(plan, KERNELS, given, describe, call.q.device, call.q.dtype)
    return [(step, kernel) for step, (_, kernel) in zip(plan.steps, found, strict=True)]


def say(name, args, config, fp32):
    for step, kernel in compiled(*args, config=config, fp32=fp32):
        if step.kernel.startswith("attention_fwd"):
            joined = "V_COLS" in step.constants
            place = triton_private.shared_memory_offsets(kernel, 90)["v"]
            row = {"name": name, "kernel": step.kernel, "joined": joined, "place": place}
            row |= {"shared": kernel.metadata.shared, "planned": step.shared_memory}
            sys.stdout.write(json.dumps(row) + "\n")


def of_tiles():
    for dim in (72, 80, 96):
        q, k, v = (torch.empty(1, 700, 2, dim, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        for n, tiles in enumerate((*FORWARD_TILES[dim], *PINNED[dim])):
            args = ops()["attention"].bind((q, k, v), {"causal": dim != 80})
            say(f"{dim}_{64 * tiles.consumers}x{tiles.block_n}", args, tiles, n % 2 == 1 and tiles.block_n != 96)


def of_cases():
    for case in cases("attention"):
        if case.name in CASES:
            args = ops()["attention"].bind((), case.build(torch.device("cpu"), torch.bfloat16, case.generator()))
            say(case.name, args, configured(dims(*args), SM90, torch.bfloat16), False)


if __name__ == "__main__":
    {"tiles": of_tiles, "cases": of_cases}[sys.argv[1]]()
