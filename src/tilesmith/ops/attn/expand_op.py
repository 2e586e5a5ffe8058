"""expand_kv, which makes keys and values of all heads for latent attention: what it accepts, its gradient, its kernels.

Legend: B batch rows, T tokens of a row, H heads, N features of a key that are its head's own, R those that all heads
share, V values.
"""

from collections.abc import Sequence

from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import alike
from tilesmith.ops.attn import expand_reference as reference
from tilesmith.ops.attn.reference import empty_tokens_first

KERNELS = {"triton": "tilesmith.ops.attn.triton.expand"}


def _fake(kv: Tensor, shared: Tensor, own: int) -> tuple[Tensor, Tensor]:
    heads, width = kv.shape[1], kv.shape[3]
    return empty_tokens_first(kv, heads, own + shared.shape[3]), empty_tokens_first(kv, heads, width - own)


def gradients(k: Tensor, v: Tensor, own: int, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Room for dkv and dshared, empty where `output_mask` is False."""
    heads, width = k.shape[1], k.shape[3]
    dkv = empty_tokens_first(k, heads, own + v.shape[3]) if output_mask[0] else k.new_empty(0)
    return dkv, empty_tokens_first(k, 1, width - own) if output_mask[1] else k.new_empty(0)


def _check(kv: Tensor, shared: Tensor, own: int) -> None:
    if kv.ndim != 4:
        raise ValueError(f"expand_kv: kv has shape {tuple(kv.shape)}; it must be [B, H, T, N + V]")
    batch, _, tokens, width = kv.shape
    if shared.ndim != 4 or shared.shape[:3] != (batch, 1, tokens):
        raise ValueError(
            f"expand_kv: shared has shape {tuple(shared.shape)}; for this kv it must be [{batch}, 1, {tokens}, R]"
        )
    alike("expand_kv", "kv", kv, "shared", shared)
    if not 0 <= own <= width:
        raise ValueError(
            f"expand_kv: own is {own}; it must be from 0 to {width}, the features of kv: how many of them are the key's"
        )


expand_kv_vjp = Op(
    reference.expand_kv_vjp, fake=lambda dk, dv, *rest: gradients(*rest), outputs=("dkv", "dshared"), kernels=KERNELS
)
expand_kv = Op(
    reference.expand_kv,
    fake=_fake,
    vjp=expand_kv_vjp,
    outputs=("k", "v"),
    public=2,
    check=_check,
    kernels=KERNELS,
    sharding="bhtC bOtR -> bhtK bhtV",
)
