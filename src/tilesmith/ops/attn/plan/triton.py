"""The plans of Triton's attention: forward and gradients, a CTA for each tile."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from tilesmith.device.dropout import dropout_flags
from tilesmith.engine.launcher import cdiv, next_power_of_2
from tilesmith.ops.attn.plan.configs import AttentionConfig, AttentionVjpConfig
from tilesmith.ops.attn.plan.model import Buffer, Part, Plan, Source, Step, Tile, same
from tilesmith.ops.attn.plan.shape import Shape

CALL = (
    "q_ptr", "k_ptr", "v_ptr", "bias_ptr", "mask_ptr", "alibi_ptr", "seed_ptr", "cu_q_ptr", "cu_k_ptr", "lengths_ptr",
    "prefix_ptr", "q_documents_ptr", "k_documents_ptr", "q_strides", "k_strides", "v_strides", "bias_strides",
    "mask_strides", "alibi_strides", "inner", "outer", "drop_below", "keep_scale",
)  # fmt: skip
"""What every kernel of a call is given of it, by the kernels' own names."""
LISTS = "offsets_ptr", "indices_ptr", "list_strides"
BIAS_BLOCK = 32
STATS_ROWS = 32


def padded(dim: int) -> int:
    return max(16, next_power_of_2(dim))


def within(block: int, size: int) -> int:
    """A tile's rows, so that it is not much larger than a block of a list."""
    return min(block, padded(size)) if size else block


def summed(block: int, s: Shape) -> int:
    """A tile's rows that a product sums over: at least 32 with a mask and dropout. From the mask's 8 bits and the join
    of random numbers behind an operand, Triton 3.6 lays 8 rows into each of 4 threads; with 16 rows dk was off by 7."""
    return max(block, 32) if s.mask and s.dropout else block


def tile_count(size: int, block: int, list_size: int) -> int:
    """How many tiles of `block` rows `tiles_in` counts."""
    return cdiv(size, list_size) * cdiv(list_size, block) if list_size else cdiv(size, block)


def section(heads: int, tokens: int, bytes_of_row: int, share: int, arch: Any) -> int:
    """How many program heads to work on together, so that the two tensors that their CTAs stream stay in half of the
    L2 cache. heads: of all batch rows of these tensors; share: program heads that stream the same one."""
    fitting = arch.l2 // 2 // max(tokens * bytes_of_row, 1) if arch.l2 else heads
    return max(1, min(fitting, heads)) * share


def _kinds(s: Shape) -> tuple[dict[str, int], dict[str, Any]]:
    """Numbers and constants that forward and gradients of a call share."""
    left, right = 0 <= s.window_left < s.keys - 1, 0 <= s.window_right < max(s.tokens - 1, 1)
    sparse, lists = s.mask or s.ids, s.lists > 0
    # where documents have as many keys as queries, only lengths leave tokens in the midst of others that nobody meets
    unequal = s.packed and (s.lengths or not s.same_documents)
    numbers = {
        "batches": s.batch, "heads": s.heads, "tokens": s.tokens, "keys": s.keys, "documents": s.documents,
        "window_left": s.window_left, "window_right": s.window_right,
        "list_share": s.heads // s.lists if lists else 1,
    }  # fmt: skip
    constants = {
        "GROUP": s.group, "DIM": s.dim, "DIM_V": s.value_dim, "BLOCK_D": padded(s.dim), "BLOCK_DV": padded(s.value_dim),
        "LEFT": left, "RIGHT": right, "SOFTCAP": s.softcap, "DROPOUT": s.dropout, **_dropout(s),
        "PADDED": s.packed or s.lengths or (right and s.tokens > s.keys) or (left and s.keys > s.tokens),
        "SPARSE": sparse,
        "CLEAN": sparse or lists or unequal or (left and s.keys > s.tokens and s.prefix),
        "LIST_Q": s.block_q, "LIST_K": s.block_k,
    }  # fmt: skip
    return numbers, constants


def _dropout(s: Shape) -> dict[str, Any]:
    """What `kept_probabilities` is told of all rows of probabilities."""
    if not s.dropout:
        return {"LANES": 1, "SHORT": True}
    step = max(1, math.gcd(s.keys, s.block_k))  # tiles start at multiples of it, or of 16
    return dropout_flags(s.rows * s.tokens * s.keys // step, step, 2)


def _streams(bulk: bool, s: Shape, first: str, second: str, rows: int) -> tuple[Source, Source]:
    """Descriptors of two tensors that a kernel streams, or none where it must use pointers."""
    ready = dict(zip(("q", "k", "v", "dout"), s.tma))
    if bulk and ready[first] and ready[second]:
        return Tile(first, rows), Tile(second, rows)
    return None, None


@lru_cache(maxsize=1024)
def triton_forward(s: Shape, arch: Any, config: AttentionConfig) -> Plan:
    """A CTA for each tile of queries."""
    if s.rows * s.tokens == 0:
        return Plan("attention", "triton", reasons=("there is no query: nothing is launched",))
    block_m, block_n = within(config.block_m, s.block_q), summed(within(config.block_n, s.block_k), s)
    k_desc, v_desc = _streams(config.bulk, s, "k", "v", block_n)
    numbers, constants = _kinds(s)
    together = section(s.batch * s.kv_heads, s.keys, (s.dim + s.value_dim) * s.kv_bytes, s.group, arch)
    step = Step(
        "_attention_fwd_kernel", (tile_count(s.tokens, block_m, s.block_q) * s.rows,),
        {**same(*CALL, *LISTS), "k_desc": k_desc, "v_desc": v_desc, "out_ptr": "out", "lse_ptr": "lse",
         "out_strides": "out_strides", "sinks_ptr": "sinks",
         "bounds_ptr": "bounds" if s.ids and not s.lists else None},
        numbers | {"section": together},
        {**constants, "BULK": k_desc is not None, "BLOCK_M": block_m, "BLOCK_N": block_n,
         "num_warps": config.num_warps, "num_stages": config.num_stages},
    )  # fmt: skip
    reasons = (
        f"tiles of {block_m} queries and {block_n} keys on {config.num_warps} warps, {config.num_stages} stages"
        + (", keys and values by TMA" if k_desc is not None else ""),
        f"sections of {together} of {s.rows} heads, whose keys and values fit half of the L2 cache",
    )
    return Plan(
        "attention", "triton", (step,), (block_m, block_n), config.num_stages, 0, reasons[1], q_bytes=s.q_bytes,
        reasons=reasons,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def triton_backward(s: Shape, arch: Any, config: AttentionVjpConfig, exact: bool = False) -> Plan:
    """Statistics of the rows, then a kernel for dk and dv, one for dq (which writes dbias where the bias was not
    broadcast), one for dbias where it was, one for dsinks. exact: q is fp32."""
    wants_q, wants_k, wants_v, wants_bias, wants_sinks = s.wants
    wants_bias, wants_sinks = wants_bias and s.bias != (), wants_sinks and s.sinks
    if s.lists:
        config = config._replace(
            dkv_block_m=within(config.dkv_block_m, s.block_q), dkv_block_n=within(config.dkv_block_n, s.block_k),
            dq_block_m=within(config.dq_block_m, s.block_q), dq_block_n=within(config.dq_block_n, s.block_k),
        )  # fmt: skip
    config = config._replace(dkv_block_m=summed(config.dkv_block_m, s), dq_block_n=summed(config.dq_block_n, s))
    every = (s.batch, s.heads, s.tokens, s.keys)
    whole = wants_bias and (s.bias == every or s.lists > 0)
    steps = []
    if s.rows * s.tokens:
        steps.append(_stats(s, exact))
    if (wants_k or wants_v) and s.batch * s.kv_heads * s.keys:
        steps.append(_dkv(s, arch, config))
    if wants_bias and not whole and 0 not in every:
        steps.append(_dbias(s))
    if (wants_q or whole) and s.rows * s.tokens:
        steps.append(_dq(s, arch, config, whole))
    if wants_sinks:
        steps.append(_dsinks(s, exact))
    scratch = [Buffer("stats", (2, *every[:3]), "float32")]
    return Plan(
        "attention_vjp", "triton", tuple(steps), (config.dkv_block_m, config.dkv_block_n), config.dkv_stages, 0,
        "sections of heads whose operands fit half of the L2 cache", scratch=tuple(scratch), q_bytes=s.q_bytes,
        numbers={"whole_bias": int(whole), "broadcast_bias": int(wants_bias and not whole)},
        reasons=(
            f"dk and dv in tiles of {config.dkv_block_n} keys and {config.dkv_block_m} queries, dq in tiles of "
            f"{config.dq_block_m} queries and {config.dq_block_n} keys",
            "no kernel uses atomics: results are the same bits in every run",
        ),
    )  # fmt: skip


def _gradient_arguments() -> dict[str, Source]:
    return {**same(*CALL, *LISTS, "dout_ptr", "dout_strides"), "row_lse_ptr": Part("stats", 0),
            "delta_ptr": Part("stats", 1)}  # fmt: skip


def _stats(s: Shape, exact: bool) -> Step:
    return Step(
        "_attention_stats_kernel", (cdiv(s.tokens, STATS_ROWS) * s.rows,),
        {"out_ptr": "out", "dout_ptr": "dout_ptr", "lse_ptr": "lse", "dlse_ptr": "dlse",
         "row_lse_ptr": Part("stats", 0), "delta_ptr": Part("stats", 1),
         **same("out_strides", "dout_strides", "dlse_strides")},
        {"heads": s.heads, "tokens": s.tokens},
        {"DIM_V": s.value_dim, "BLOCK_DV": next_power_of_2(s.value_dim), "BLOCK_M": STATS_ROWS, "EXACT": exact,
         "num_warps": 4},
    )  # fmt: skip


def _dkv(s: Shape, arch: Any, config: AttentionVjpConfig) -> Step:
    numbers, constants = _kinds(s)
    q_desc, dout_desc = _streams(config.bulk, s, "q", "dout", config.dkv_block_m)
    together = max(1, section(s.rows, s.tokens, (s.dim + s.value_dim) * s.q_bytes, 1, arch) // s.group)
    # by keys lists are others, which may have other heads
    by_keys = {name: f"{name}_by_keys" for name in LISTS} if s.lists else {}
    return Step(
        "_attention_dkv_kernel", (tile_count(s.keys, config.dkv_block_n, s.block_k) * s.batch * s.kv_heads,),
        {**_gradient_arguments(), **by_keys, "q_desc": q_desc, "dout_desc": dout_desc, "dk_ptr": "dk", "dv_ptr": "dv",
         **same("dk_strides", "dv_strides"), "scale": "factor",
         "bounds_ptr": "bounds_by_keys" if s.ids and not s.lists else None},
        numbers | {"section": together, "list_share": s.heads // s.lists_by_keys if s.lists else 1},
        {**constants, "BULK": q_desc is not None, "BLOCK_M": config.dkv_block_m, "BLOCK_N": config.dkv_block_n,
         "num_warps": config.dkv_warps, "num_stages": config.dkv_stages},
    )  # fmt: skip


def _dq(s: Shape, arch: Any, config: AttentionVjpConfig, whole: bool) -> Step:
    numbers, constants = _kinds(s)
    k_desc, v_desc = _streams(config.bulk, s, "k", "v", config.dq_block_n)
    together = section(s.batch * s.kv_heads, s.keys, (s.dim + s.value_dim) * s.kv_bytes, s.group, arch)
    return Step(
        "_attention_dq_kernel", (tile_count(s.tokens, config.dq_block_m, s.block_q) * s.rows,),
        {**_gradient_arguments(), "k_desc": k_desc, "v_desc": v_desc, "dq_ptr": "dq", "dq_strides": "dq_strides",
         "dbias_ptr": "dbias" if whole else None, "scale": "factor",
         "bounds_ptr": "bounds" if s.ids and not s.lists else None},
        numbers | {"section": together},
        {**constants, "BULK": k_desc is not None, "BLOCK_M": config.dq_block_m, "BLOCK_N": config.dq_block_n,
         "num_warps": config.dq_warps, "num_stages": config.dq_stages},
    )  # fmt: skip


def _dbias(s: Shape) -> Step:
    numbers, constants = _kinds(s)
    rows, cols = s.bias[2] > 1, s.bias[3] > 1
    # with 512 columns tiles of 32 x 32 take 262,144 bytes of shared memory in fp32; in bf16 they spill 4,232 registers
    # for 273 (compiled for sm90, a bias of keys)
    block = BIAS_BLOCK // 2 if max(s.dim, s.value_dim) > 256 else BIAS_BLOCK
    blocks = (cdiv(s.tokens, block) if rows else 1) * (cdiv(s.keys, block) if cols else 1)
    unused = ("PADDED", "SPARSE", "CLEAN", "LIST_Q", "LIST_K", *LISTS, "list_share")
    tensors = {name: source for name, source in _gradient_arguments().items() if name not in unused}
    return Step(
        "_attention_dbias_kernel", (s.bias[0] * s.bias[1] * blocks,),
        tensors | {"dbias_ptr": "dbias", "dbias_strides": "dbias_strides"},
        {name: n for name, n in numbers.items() if name not in unused}
        | {"bias_batches": s.bias[0], "bias_heads": s.bias[1]},
        {**{name: c for name, c in constants.items() if name not in unused}, "BLOCK_M": block,
         "BLOCK_N": block, "ROWS": rows, "COLS": cols, "num_warps": 4, "num_stages": 1},
    )  # fmt: skip


def _dsinks(s: Shape, exact: bool) -> Step:
    return Step(
        "_attention_dsinks_kernel", (s.heads,),
        {"row_lse_ptr": Part("stats", 0), "delta_ptr": Part("stats", 1), "sinks_ptr": "sinks", "dsinks_ptr": "dsinks"},
        {"batches": s.batch, "heads": s.heads, "tokens": s.tokens}, {"BLOCK": 1024, "EXACT": exact},
    )  # fmt: skip
