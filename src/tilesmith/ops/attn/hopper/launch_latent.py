"""attention of few query tokens on a latent cache on Hopper: the launcher of absorbed MLA's decode."""

from torch import Tensor

from tilesmith.engine import Space, optimize_kernel, register_kernel
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn.arguments import attention_arguments
from tilesmith.ops.attn.execute import execute
from tilesmith.ops.attn.hopper.combine import attention_combine_few_kernel
from tilesmith.ops.attn.hopper.latent import attention_latent_kernel
from tilesmith.ops.attn.hopper.launch import (
    call_tensors,
    describe,
    descriptor,
    no_dropout,
    no_lists,
    outputs,
    reasons_for_all,
)
from tilesmith.ops.attn.hopper.launch_decode import SCATTERED, decode_tensors, keys_of
from tilesmith.ops.attn.plan import Plan, shape_of
from tilesmith.ops.attn.plan.configs import LatentConfig
from tilesmith.ops.attn.plan.decode import hopper_latent
from tilesmith.ops.attn.split_combine import _attention_combine_kernel

KERNELS = {
    "attention_latent_kernel": attention_latent_kernel,
    "attention_combine_few_kernel": attention_combine_few_kernel,
    "_attention_combine_kernel": _attention_combine_kernel,
}
BLOCK_N = 64


@attention_arguments
def _dims(call) -> dict[str, int]:
    q, k = call.q, call.k
    return {
        "heads": q.shape[0] * k.shape[1], "rows": q.shape[2] * (q.shape[1] // k.shape[1]), "keys": k.shape[2],
    }  # fmt: skip


SPACE = Space(default=lambda dims, arch, dtype: LatentConfig(BLOCK_N), dims=_dims, choices={})


def rejects(call) -> list[str]:
    """Why the kernel for latent caches cannot serve a call of attention."""
    reasons = reasons_for_all(call._replace(page_table=None)) + no_dropout(call) + no_lists(call)
    if call.q.cols % 8 or not 512 < call.q.cols <= 576 or call.v.cols != 512:
        reasons.append(
            f"the head dims are {call.q.cols} and {call.v.cols}; multiples of 8 from 520 to 576, and 512, are supported"
        )
    elif not call.shared:
        reasons.append("v is not k's first columns in memory: this kernel loads no values")
    if call.cu_seqlens_q is not None:
        reasons.append("cu_seqlens_q: tiles of packed documents are not split")
    if call.page_table is not None and call.page_size % BLOCK_N:
        reasons.append(f"pages have {call.page_size} slots; multiples of {BLOCK_N} are supported")
    if call.window_left >= 0:
        reasons.append("window_left: windows are not known")
    if call.capped:
        reasons.append("softcap: scores are not capped")
    # H200, 64 x 32k keys, us, beside triton_split: 16 rows 630 and 599, 32 rows 636 and 1,090
    if call.rows <= 16:
        reasons.append("T * H / G is at most 16: with so few rows this kernel gains nothing")
    if call.scattered:
        reasons.append(SCATTERED)
    if not call.cached:
        reasons.append("S is less than 4 T: this kernel is for a cache")
    return reasons


@attention_arguments
def _plans(call, *, config: LatentConfig, arch) -> Plan:
    return hopper_latent(shape_of(call), arch, config)


@register_kernel("attention", backend="hopper_latent", rank=37, rejects=rejects, plans=_plans)
@optimize_kernel(space=SPACE)
@attention_arguments
def attention(call, *, config: LatentConfig) -> tuple[Tensor, Tensor]:
    """One pass over keys that are values, too, in as many splits as fill the device, and one that combines them."""
    plan = hopper_latent(shape_of(call), arch_of(call.q.device), config)
    out, lse = outputs(call, plan)
    if plan.steps:
        given = call_tensors(call, out, lse) | decode_tensors(call, out)
        bounded, constants = call.kv_lengths is not None or call.page_table is not None, plan.steps[0].constants
        keys, given["between_k"] = keys_of(call.k, config.block_n, bounded, constants["D"])
        given["k_desc"] = keys
        given["k_rest_desc"] = descriptor(keys.base, config.block_n, bounded, wide=constants["REST"])
        execute(plan, KERNELS, given, describe, call.q.device, call.q.dtype)
    return out, lse
