"""Softmax attention under the names of `flash_attention`: functions with tile sizes, a module, and what it costs.

Legend: B batch, H heads, N tokens, D head dim. K and V may have another number of tokens than Q, and a number of heads
that divides H. float64, float32, float16 and bfloat16; on a CPU by the references, which have no tiles.

Bc keys by Br queries are the tile that one program works on. Bc = Br = 32 means that the library chooses, which is also
what the pair of `get_optimal_block_sizes` means. Any other pair pins the Triton kernels, forward and backward, to tiles
of that size, or raises ValueError: sizes are powers of two of at least 16, and a tile whose operands do not fit in the
device's shared memory is refused with the numbers. On a CPU a pair is checked for its form and changes nothing.

use_half: Q, K and V are rounded to float16 first (beyond ±65504 to infinity), sums stay fp32, and results come back in
Q's dtype.

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` are flash-attn's, in its layout,
[B, tokens, heads, D], and have no tiles to choose.

See `tilesmith.ops` for the ops themselves: `attention`, with masks and more, and a `flash_attention_forward` with scale
and causal.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith._lazy import refuse_calls
from tilesmith.attention.flash_attn import flash_attn_func, flash_attn_varlen_func
from tilesmith.attention.kv_cache import flash_attn_with_kvcache
from tilesmith.engine import use
from tilesmith.engine.argument_checks import alike, flag, size, tensor
from tilesmith.engine.backends import missing
from tilesmith.ops.attn.op import attention_op

CHOOSE = (32, 32)  # (Bc, Br) for which the library chooses

__all__ = [
    "FlashAttention",
    "estimate_memory_usage",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attention_forward_with_stats",
    "get_optimal_block_sizes",
]


def flash_attention_forward(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V, [B, H, N, D] in Q's dtype. Differentiable; the backward has the same tiles.

    Q, K, V: [B, H, N, D]. Bc, Br, use_half: see the module. Raises ValueError or TypeError, naming the argument, for
    tiles, shapes, dtypes and devices that do not fit, NotImplementedError, with the reasons, where a tile is pinned and
    the Triton kernel cannot serve the call.

    `tilesmith.ops.flash_attention_forward` is another function of this name, with scale and causal.
    """
    _check_inputs("flash_attention_forward", use_half, Q, K, V)
    q, k, v = _halved(use_half, Q, K, V)
    with _tile(Bc, Br, q, k, v):
        out, _ = ops.attention(q, k, v)
    return out.to(Q.dtype)


def flash_attention_forward_with_stats(
    Q: Tensor, K: Tensor, V: Tensor, Bc: int = 32, Br: int = 32, use_half: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(O, l, m): the result of `flash_attention_forward`, and the row sums and maxima that its backward needs.

    m [B, H, N]: the largest scaled score of each row. l [B, H, N]: the row's sum of exp(score - m), so l · exp(m) is
    the softmax's denominator. Both fp32 (fp64 for fp64), from a second pass over Q and K, which takes O(N) memory and
    its own tiles. Arguments and errors: as of `flash_attention_forward`.
    """
    out = flash_attention_forward(Q, K, V, Bc, Br, use_half)
    q, k = _halved(use_half, Q, K)
    m, l = ops.attention_stats(q, k)
    return out, l, m


def flash_attention_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    l: Tensor,
    m: Tensor,
    Bc: int = 32,
    Br: int = 32,
    use_half: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dQ, dK, dV) for the gradient dO of O, in the shapes and dtypes of Q, K and V.

    Q, K, V, O, dO: [B, H, N, D]. l, m [B, H, N]: row sums and row maxima, fp32 (fp64 for fp64). O, l and m come from
    `flash_attention_forward_with_stats`; any pair with the same m + log(l) gives the same gradients. Bc, Br, use_half:
    as in the forward; with use_half O and dO are rounded to float16 too. With autograd you do not need this function.
    Not differentiable. Raises as `flash_attention_forward` does.

    `tilesmith.ops.flash_attention_backward` is another function of this name, with scale and causal.
    """
    _check_inputs("flash_attention_backward", use_half, Q, K, V)
    _check_results(use_half, Q, V, O, dO, l, m)
    q, k, v, out, dout = _halved(use_half, Q, K, V, O, dO)
    with _tile(Bc, Br, q, k, v):
        gradients = ops.flash_attention_backward(q, k, v, out, m + torch.log(l), dout)
    dq, dk, dv = (dx.to(x.dtype) for dx, x in zip(gradients, (Q, K, V)))
    return dq, dk, dv


class FlashAttention(nn.Module):
    """The functions above as a module without parameters. bc, br: Bc and Br.

    num_heads: how many heads are packed in the last dim of inputs [B, N, num_heads · D]; inputs [B, H, N, D] have H
    heads.
    """

    def __init__(self, bc: int = 32, br: int = 32, use_half: bool = False, *, num_heads: int = 1):
        super().__init__()
        _check_tile(bc, br, "bc", "br")
        flag("FlashAttention", "use_half", use_half)
        size("FlashAttention", "num_heads", num_heads)
        self.bc, self.br, self.use_half, self.num_heads = bc, br, use_half, num_heads

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Attention in the layout of Q: [B, H, N, D] or [B, N, E]."""
        q, k, v = (self._split(name, x) for name, x in (("Q", Q), ("K", K), ("V", V)))
        out = flash_attention_forward(q, k, v, self.bc, self.br, self.use_half)
        return self._joined(out, Q)

    def backward(
        self, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dQ, dK, dV) in the layouts of Q, K and V; l and m [B, H, N]: see `flash_attention_backward`."""
        tensors = (self._split(name, x) for name, x in (("Q", Q), ("K", K), ("V", V), ("O", O), ("dO", dO)))
        gradients = flash_attention_backward(*tensors, l, m, self.bc, self.br, self.use_half)
        dq, dk, dv = (self._joined(dx, x) for dx, x in zip(gradients, (Q, K, V)))
        return dq, dk, dv

    def _split(self, name: str, x: Tensor) -> Tensor:
        """[B, N, E] as a [B, H, N, D] view."""
        tensor("FlashAttention", name, x)
        if x.ndim != 3:
            return x
        if x.shape[2] == 0 or x.shape[2] % self.num_heads:
            raise ValueError(
                f"FlashAttention: num_heads is {self.num_heads}, which does not divide {x.shape[2]}, "
                f"the width of {name}; choose a divisor"
            )
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _joined(self, x: Tensor, like: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2) if like.ndim == 3 else x

    def extra_repr(self) -> str:
        return f"bc={self.bc}, br={self.br}, use_half={self.use_half}, num_heads={self.num_heads}"


def get_optimal_block_sizes(sequence_length: int, head_dim: int) -> tuple[int, int]:
    """(Bc, Br) that the Triton kernel chooses on the current GPU for fp16: from a tuning row measured there for about
    these sizes, else by the GPU's shared memory and generation. Without a GPU or without Triton there are no tiles, and
    the result is (32, 32), which lets the library choose.

    Raises ValueError for sizes below 1.
    """
    for name, value in (("sequence_length", sequence_length), ("head_dim", head_dim)):
        size("get_optimal_block_sizes", name, value)
    if not torch.cuda.is_available():
        return CHOOSE
    one = torch.empty(head_dim, dtype=torch.float16, device="cuda")
    x = one.as_strided((1, 16, sequence_length, head_dim), (0, 0, 0, 1))
    return _own_tile(x, x, x) or CHOOSE


def estimate_memory_usage(
    batch_size: int, num_heads: int, seq_len: int, head_dim: int, use_half: bool = False
) -> dict[str, int | float]:
    """What `flash_attention_forward` and its inputs take on a GPU: bytes of device memory.

    The tensors are float16 with use_half, float32 without; float32 tensors passed with use_half cost another 8
    bytes per element of each, for the copies.

    input_memory: Q, K and V. internal_memory: lse, 4 bytes for each row and head; tiles are in shared memory and
    registers. output_memory: O. total_memory: the sum, which is the peak of a call; total_memory_mb: that in MB of 2^20
    bytes. A backward additionally takes twice internal_memory, and dO, dQ, dK and dV. Without tiled kernels, on a CPU,
    the scores are added: at least 4 · B · H · N² bytes. (At most 128 tokens may be split over more programs, whose
    partial results are not counted.)

    Raises ValueError for sizes below 1.
    """
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "seq_len": seq_len, "head_dim": head_dim}
    for name, value in sizes.items():
        size("estimate_memory_usage", name, value)
    flag("estimate_memory_usage", "use_half", use_half)
    rows = batch_size * num_heads * seq_len
    tensor = rows * head_dim * (2 if use_half else 4)
    total = 4 * tensor + 4 * rows
    return {
        "input_memory": 3 * tensor,
        "internal_memory": 4 * rows,
        "output_memory": tensor,
        "total_memory": total,
        "total_memory_mb": total / 2**20,
    }


def _halved(use_half: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(torch.float16) for x in tensors) if use_half else tensors


def _check_tile(Bc: int, Br: int, keys: str = "Bc", queries: str = "Br") -> None:
    for name, value in ((keys, Bc), (queries, Br)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 16 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two of at least 16, got {value!r}")


def _check_inputs(op: str, use_half: bool, Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Raise where Q, K and V do not fit together; the op's own check calls them q, k and v."""
    flag(op, "use_half", use_half)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        tensor(op, name, x, ("B", "H", "N", "D"))
        alike(op, "Q", Q, name, x)
        if x.shape[3] == 0:
            raise ValueError(f"{op}: {name} must have a head dim of at least 1, got {list(x.shape)}")
    batch, heads, _, dim = Q.shape
    if K.shape[0] != batch or K.shape[3] != dim:
        raise ValueError(f"{op}: K must be [{batch}, heads, tokens, {dim}] as Q, got {list(K.shape)}")
    if K.shape[1] == 0 or heads % K.shape[1]:
        raise ValueError(
            f"{op}: K has {K.shape[1]} heads, which does not divide the {heads} heads of Q; "
            "give K and V a number that does"
        )
    if V.shape[:3] != K.shape[:3]:
        raise ValueError(f"{op}: V must be {list(K.shape[:3])} as K, and a head dim, got {list(V.shape)}")


def _check_results(use_half: bool, Q: Tensor, V: Tensor, O: Tensor, dO: Tensor, l: Tensor, m: Tensor) -> None:
    """Raise where what a forward returned, or its gradient, does not belong to Q and V."""
    op, rows = "flash_attention_backward", tuple(Q.shape[:3])
    results = (*rows, V.shape[3])
    wide = torch.float32 if use_half else torch.promote_types(Q.dtype, torch.float32)
    for name, x, shape, dtype in (
        ("O", O, results, Q.dtype), ("dO", dO, results, Q.dtype), ("l", l, rows, wide), ("m", m, rows, wide)
    ):  # fmt: skip
        tensor(op, name, x)
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(
                f"{op}: {name} has dtype {x.dtype}; for Q of {Q.dtype} and use_half={use_half} it must be {dtype}"
            )
        if x.device != Q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, Q on {Q.device}; move them to one device")


def _tile(Bc: int, Br: int, q: Tensor, k: Tensor, v: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which attention, and the backward of what it computes, has tiles of Bc keys by Br queries."""
    _check_tile(Bc, Br)
    if (Bc, Br) == CHOOSE or q.device.type == "cpu":
        return contextlib.nullcontext()
    attention_op.check(*attention_op.bind((q, k, v), {}))
    if (Bc, Br) == _own_tile(q, k, v):
        return contextlib.nullcontext()
    tile = f"triton:block_n={Bc}:block_m={Br}"
    return use(attention=tile, attention_vjp=tile)


def _own_tile(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int] | None:
    """(Bc, Br) that the Triton kernel takes by itself for this call; None on a device that it does not reach."""
    if missing("triton", q.device) is not None:
        return None
    config = attention_op.kernel("triton").fn.configure(attention_op.bind((q, k, v), {}))
    return config.block_n, config.block_m


refuse_calls(sys.modules[__name__], "tilesmith.ops.attention, or flash_attn_func of this module")
