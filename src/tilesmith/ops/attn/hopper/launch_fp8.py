"""Launcher of attention's forward on e4m3 values on Hopper, and what it refuses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.device.alignment import tma_strides, tma_view
from tilesmith.device.gluon.shim import TensorDescriptor, gl
from tilesmith.engine import register_kernel
from tilesmith.engine.launcher import cdiv
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.forward_fp8 import UNITS, attention_fp8_fwd_kernel
from tilesmith.ops.attn.hopper.launch import UNSERVED, describe, no_dropout, no_lists, outputs, score_factors
from tilesmith.ops.attn.plan import Plan, shape_of
from tilesmith.ops.attn.plan.configs import Fp8Config
from tilesmith.ops.attn.plan.hopper_fp8 import hopper_fp8

CONFIG = Fp8Config()  # with two stages times are the same within 3 %
_BLOCK = CONFIG.block_n
KERNELS = {"attention_fp8_fwd_kernel": attention_fp8_fwd_kernel}
# a code is off by -8.0 to 6.5 % of p: half a step of a code, and the bend between powers of two less its mean
_ERRORS = {"lse": 0.083}


def rejects(call) -> list[str]:
    """Why the kernel cannot serve a call of attention."""
    reasons = []
    if call.arch.capability != (9, 0):
        reasons.append(f"{call.arch.name} has no warpgroup products; compute capability 9.0 is supported")
    for name in ("q", "k", "v"):
        if getattr(call, name).dtype != torch.float8_e4m3fn:
            reasons.append(f"{name} is {getattr(call, name).dtype}; float8_e4m3fn is supported")
    for name in ("q", "k"):
        if not getattr(call, name).unit:
            reasons.append(f"{name} has a last stride other than 1")
    if not call.across:
        reasons.append("v: the keys of a column must lie side by side, in memory [B, G, Dv, S]")
    if any(cols % 16 or not 64 <= cols <= 128 for cols in (call.q.cols, call.v.cols)):
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 16 from 64 to 128 are supported"
        )
    for name, tokens in zip(("k_scale", "v_scale"), call.factors[1:]):
        if tokens == 1:
            reasons.append(f"{name}: keys of a block of 128 must share a factor")
    for name, what in UNSERVED.items():
        if getattr(call, name) is not None and not name.endswith("_scale"):
            reasons.append(f"{name}: {what}")
    reasons += no_dropout(call) + no_lists(call)
    for name in ("sinks", "cu_seqlens_q", "kv_lengths"):
        if getattr(call, name) is not None:
            reasons.append(f"{name}: is not read")
    if call.window_left >= 0 or (call.window_right >= 0 and not call.causal):
        reasons.append("window: only a causal mask is known")
    if call.capped:
        reasons.append("softcap: scores are not bent")
    return reasons


@attention_arguments
def _plans(call, *, arch) -> Plan:
    return hopper_fp8(shape_of(call), arch, CONFIG)


@register_kernel("attention", backend="hopper_fp8", rank=27, rejects=rejects, errors=_ERRORS, plans=_plans)
@attention_arguments
def attention(call) -> tuple[Tensor, Tensor]:
    """Persistent CTAs, each with many tiles of queries."""
    plan = hopper_fp8(shape_of(call), arch_of(call.q.device), CONFIG)
    out, lse = outputs(call, plan)
    if plan.steps:
        given = {"out": out, "lse": lse, "scale": score_factors(call)[1] / UNITS.value} | _quantised(call)
        execute(plan, KERNELS, given, describe, call.q.device, out.dtype)
    return out, lse


def _quantised(call) -> dict:
    """Queries, keys and values as the kernel takes them, and their factors."""
    given = {"q_desc": _queries(call.q), "k_desc": _keys(call.k), "v_desc": _values(call.v)}
    blocks = {}
    for name, tokens in (("q", call.q.shape[2]), ("k", call.k.shape[2]), ("v", call.k.shape[2])):
        scale = getattr(call, f"{name}_scale")
        given[f"{name}_scale"], given[f"{name}_steps"], blocks[name] = _factors(scale, tokens)
    return given | {"Q_BLOCKS": blocks["q"], "BLOCKS": blocks["k"] or blocks["v"]}


def _columns(x: Tensor) -> int:
    """The columns of a tile of x: its head dim up to 64 or 128; TMA fills in zeros."""
    return 64 if x.shape[3] <= 64 else 128


def _factors(scale: Tensor, tokens: int) -> tuple[Tensor, tuple[int, int, int], bool]:
    """Factors in fp32, the steps between those of batches, heads and tokens or blocks, and whether they have blocks."""
    steps = tuple(s if n > 1 else 0 for n, s in zip(scale.shape, scale.stride()))
    return scale.float(), steps, 1 < scale.shape[2] != tokens


def _tiles(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """x as `shape`, by strides in elements, for the TMA in boxes `block`."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=block[-1], element_bitwidth=8, rank=len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


def _queries(q: Tensor) -> TensorDescriptor:
    """q [B, H, T, D] in tiles of 64 rows; of a copy, where its strides do not suit TMA."""
    q, strides = tma_view(q)
    return _tiles(q, list(q.shape), strides, [1, 1, 64, _columns(q)])


def _keys(k: Tensor) -> TensorDescriptor:
    """k [B, G, S, D] as [B, G, S / 4, 4, D], in tiles of 2 of every 4 rows; of a copy, where its strides do not suit
    TMA or memory ends inside the last 4 rows."""
    batch, kv_heads, keys, dim = k.shape
    fours = cdiv(keys, 4)
    strides = tma_strides(k)
    if strides is None or k.storage_offset() + _end(k.shape, strides, 4 * fours) > k.untyped_storage().nbytes():
        room = k.new_empty(batch, kv_heads, 4 * fours, dim)
        room[:, :, :keys].copy_(k)
        k, strides = room, tma_strides(room)
    row, head, token, _ = strides
    return _tiles(
        k, [batch, kv_heads, fours, 4, dim], [row, head, 4 * token, token, 1], [1, 1, _BLOCK // 4, 2, _columns(k)]
    )


def _end(shape: Sequence[int], strides: Sequence[int], tokens: int) -> int:
    """Elements from the first to the last of `shape` [B, G, S, D] at these strides, if S were so many tokens."""
    last = (shape[0] - 1, shape[1] - 1, tokens - 1, shape[3] - 1)
    return 1 + sum(at * stride for at, stride in zip(last, strides))


def _values(v: Tensor) -> TensorDescriptor:
    """v [B, G, S, Dv] in memory [B, G, Dv, S], in tiles of 128 keys and all columns; of a copy, where its strides do
    not suit TMA."""
    keys = v.shape[2]
    v = v.transpose(2, 3)
    strides = tma_strides(v)
    if strides is None:
        room = v.new_empty(*v.shape[:3], cdiv(keys, 16) * 16)[..., :keys]
        v, strides = room.copy_(v), tma_strides(room)
    return _tiles(v, list(v.shape), strides, [1, 1, 64 if v.shape[2] <= 64 else 128, _BLOCK])
