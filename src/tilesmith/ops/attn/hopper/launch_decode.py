"""attention for few tiles of queries on Hopper: the launcher that splits their keys over CTAs (split-KV)."""

import torch
from torch import Tensor

from tilesmith.device.gluon.shim import TensorDescriptor
from tilesmith.device.rows import dense
from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.combine import attention_combine_few_kernel
from tilesmith.ops.attn.hopper.launch import (
    call_tensors,
    describe,
    descriptor,
    no_dropout,
    no_lists,
    outputs,
    reasons_for_all,
    wrong_dims,
)
from tilesmith.ops.attn.hopper.split_kv import attention_split_kv_kernel
from tilesmith.ops.attn.plan import Plan, shape_of, tables
from tilesmith.ops.attn.plan.configs import SplitKvConfig
from tilesmith.ops.attn.plan.decode import hopper_split
from tilesmith.ops.attn.split_combine import _attention_combine_kernel

SCATTERED = "tiles of 64 query rows, of a power of 2 of the H / G heads each, would be more than half empty"
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
KERNELS = {
    "attention_split_kv_kernel": attention_split_kv_kernel,
    "attention_combine_few_kernel": attention_combine_few_kernel,
    "_attention_combine_kernel": _attention_combine_kernel,
}


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": k.shape[2],
        "dim": q.shape[3], "value_dim": call.v.shape[3], "paged": 1 if call.page_table is None else 8,
        "bytes": k.element_size(),
    }  # fmt: skip


SPACE = Space(default=tables.split_kv, dims=_dims, choices={"consumers": (1, 2)})


def rejects(call) -> list[str]:
    """Why the splitting Hopper kernel cannot serve a call of attention."""
    small = call.k.dtype in SMALL and call.v.dtype == call.k.dtype
    served = {"page_table": None, **({"k_scale": None, "v_scale": None} if small else {})}
    reasons = reasons_for_all(call._replace(**served)) + no_dropout(call) + no_lists(call) + wrong_dims(call)
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: tiles of packed documents are not split")
    if call.page_table is not None:
        if call.page_size % 16:
            reasons.append(f"pages have {call.page_size} slots; multiples of 16 are supported")
        if call.window_left >= 0:
            reasons.append("page_table with window_left: pages before the window may be gone")
    if small:
        reasons += _small_reasons(call)
    elif call.rows <= _few(call):
        reasons.append(f"T * H / G is at most {_few(call)}: with so few rows this kernel gains nothing")
    if call.scattered:
        reasons.append(SCATTERED)
    if not call.cached and (call.kv_lengths is None or call.filled < 5):
        reasons.append("S is less than 4 T: this kernel is for a cache, or for kv_lengths of many tiles")
    if call.filled >= 8 and call.kv_lengths is None and call.page_table is None:
        reasons.append("tiles of 128 queries fill the device without splits")
    return reasons


def _few(call) -> int:
    """Up to how many rows other kernels are as fast. H200, 8 tokens of 32/4 heads on 8 x 8k keys, beside triton_split:
    head dim 64 27.0 and 28.8 us, 256 71.3 and 75.9; of 64/8 heads of 128 on 8k 17.6 and 19.2, on 2 x 8k 25.4 and 27.2,
    on 32 x 8k 252 and 243."""
    if 64 < max(call.q.cols, call.v.cols) <= 128 and call.pairs > 64:
        return 64
    return 32


def _small_reasons(call) -> list[str]:
    """Why a cache of 8 bits cannot be served."""
    reasons = []
    if call.page_table is not None:
        reasons.append("page_table: pages of 8-bit keys and values are not read")
    if (call.q.cols, call.v.cols) != (128, 128):
        reasons.append(f"the head dims are {call.q.cols} and {call.v.cols}; on a cache of 8 bits 128 is supported")
    if any(n not in (0, -1) for n in call.factors):
        reasons.append("k_scale, v_scale: of 8-bit keys and values, a factor for each head is read")
    # H200, e4m3, 64/8 heads: 4 tokens on 8 x 8k keys take 59 us, with triton_split 86; 1 token on 32 x 8k 184 and 156
    if call.rows <= 16:
        reasons.append("T * H / G is at most 16: with so few rows this kernel gains nothing on a cache of 8 bits")
    return reasons


@attention_arguments
def _plans(call, *, config: SplitKvConfig, arch) -> Plan:
    return hopper_split(shape_of(call), arch, config)


@register_kernel("attention", backend="hopper_split", rank=35, rejects=rejects, plans=_plans)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: SplitKvConfig) -> tuple[Tensor, Tensor]:
    """One pass over the keys in as many splits as fill the device, and a second one that combines them."""
    plan = hopper_split(shape_of(call), arch_of(call.q.device), config)
    out, lse = outputs(call, plan)
    if plan.steps:
        given = call_tensors(call, out, lse) | decode_tensors(call, out)
        bounded = call.kv_lengths is not None or call.page_table is not None
        piece = plan.numbers["piece"]
        for name, x in (("k", call.k), ("v", call.v)):
            given[f"{name}_desc"], given[f"between_{name}"] = keys_of(
                x, piece, bounded, 64 if piece < config.block_n else 0
            )
            given[f"{name}_scale"] = _factors(getattr(call, f"{name}_scale"))
        execute(plan, KERNELS, given, describe, call.q.device, call.q.dtype)
    return out, lse


def decode_tensors(call, out: Tensor) -> dict:
    """What kernels that split the keys, and those that combine the splits, are given beside `call_tensors`."""
    row, head, token, _ = out.stride()
    return {"page_table": dense(call.page_table), "out_row": row, "out_head": head, "out_token": token}


def _factors(scale: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Factors of heads and, of batch rows and heads, their strides."""
    if scale is None:
        return None, 0, 0
    return scale, *(0 if n == 1 else stride for n, stride in zip(scale.shape[:2], scale.stride()[:2]))


def keys_of(x: Tensor, rows: int, bounded: bool, wide: int = 0) -> tuple[TensorDescriptor, int]:
    """The descriptor of keys or values in tiles of `rows` tokens; bounded: where a batch row or page of x ends by
    itself (`tile_offset.corner`), and how many tokens lie between two of them. wide: columns of a tile, 0 for all."""
    batch, token = x.stride(0), x.stride(2) if x.shape[2] > 1 else 8
    if bounded and (token == 0 or (x.shape[0] > 1 and batch % token) or x.shape[0] * batch >= token * 2**30):
        x = x.clone(memory_format=torch.contiguous_format)
    found = descriptor(x, rows, bounded, wide=wide)
    batch, _, token, _ = found.base.stride()
    return found, batch // (token if x.shape[2] > 1 else 8) if bounded else 0
