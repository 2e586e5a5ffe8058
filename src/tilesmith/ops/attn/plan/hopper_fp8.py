"""The plan of attention's forward on e4m3 values on Hopper."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tilesmith.engine.launcher import cdiv
from tilesmith.ops.attn.plan.configs import Fp8Config
from tilesmith.ops.attn.plan.hopper_forward import NO_KEYS, heads_together, walk_reason
from tilesmith.ops.attn.plan.model import Counter, Plan, Step, Tile, same
from tilesmith.ops.attn.plan.shape import Shape


@lru_cache(maxsize=1024)
def hopper_fp8(s: Shape, arch: Any, config: Fp8Config) -> Plan:
    """The forward on e4m3 values. `s.page` is not used; factors of blocks are flags that the launcher knows."""
    if s.rows * s.tokens * s.keys == 0:
        return Plan("attention", "hopper_fp8", reasons=(NO_KEYS,))
    blocks, right = cdiv(s.tokens, 128), s.causal and s.tokens > 1
    tiles = blocks * s.rows
    ctas = min(arch.sms, tiles)
    together = heads_together(s, arch.l2, not right)
    constants = {
        "RIGHT": right, "WHOLE": not right and s.keys % config.block_n == 0, "DYNAMIC": ctas < tiles,
        "BN": config.block_n, "D": 64 if s.dim <= 64 else 128, "DV": 64 if s.value_dim <= 64 else 128,
        "STAGES": config.stages, "num_warps": 4,
    }  # fmt: skip
    step = Step(
        "attention_fp8_fwd_kernel", (ctas,),
        {**same("q_desc", "k_desc", "v_desc", "q_scale", "k_scale", "v_scale", "q_steps", "k_steps", "v_steps"),
         **same("scale", "Q_BLOCKS", "BLOCKS"), "out_desc": Tile("out", 64), "lse_ptr": "lse",
         "counter": Counter() if ctas < tiles else None},
        {"tokens": s.tokens, "keys": s.keys, "heads": s.heads, "blocks": blocks, "rows": s.rows, "section": together,
         "right": 0, "group": s.group},
        constants,
    )  # fmt: skip
    return Plan(
        "attention", "hopper_fp8", (step,), (128, config.block_n), config.stages, 2,
        walk_reason(together, s, not right), q_bytes=2, reasons=(walk_reason(together, s, not right),),
    )  # fmt: skip
