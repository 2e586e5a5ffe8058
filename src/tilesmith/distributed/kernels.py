"""The attention that ranks run on their pieces: this library's, or cuDNN's for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.distributed.layout import Range
from tilesmith.distributed.pieces import Call
from tilesmith.distributed.schedule import HeadRange
from tilesmith.ops.attn.op import attention_vjp

Gradients = tuple[Tensor, ...]  # of q, k and v, and of sinks if the terms have them


class Terms(NamedTuple):
    """What makes scores and hides keys on one rank, beside the schedule.

    bias, mask: [B|1, H|1, T, S]: a rank's queries with all keys of the sequence in their order. q_documents [B, T],
    k_documents [B, S]: ids likewise. alibi [H], sinks [H]. seed: of this rank's dropout.
    """

    scale: float | None = None
    softcap: float = 0.0
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    deterministic: bool = False

    def of_heads(self, heads: HeadRange) -> Terms:
        """For some of the query heads."""
        some = slice(*heads)
        alibi, sinks = (None if x is None else x[..., some] for x in (self.alibi, self.sinks))
        bias, mask = (x if x is None or x.shape[1] == 1 else x[:, some] for x in (self.bias, self.mask))
        return self._replace(alibi=alibi, sinks=sinks, bias=bias, mask=mask)

    def of(self, call: Call, held: Sequence[Range], index: int, sinks: Tensor | None = None) -> Terms:
        """For one call, the index-th of its rank, on keys that hold these ranges of the sequence. sinks: its own."""
        if self.bias is self.mask is self.q_documents is self.seed is None:
            return self if sinks is self.sinks else self._replace(sinks=sinks)
        rows = slice(call.q, call.q + call.tokens)
        bias, mask = (None if x is None else _columns(_rows(x, rows), call, held) for x in (self.bias, self.mask))
        q_documents = None if self.q_documents is None else self.q_documents[:, rows].contiguous()
        k_documents = None if self.k_documents is None else _columns(self.k_documents, call, held).contiguous()
        seed = None if self.seed is None else self.seed + torch.tensor([index, 0], device=self.seed.device)
        return self._replace(
            sinks=sinks, bias=bias, mask=mask, q_documents=q_documents, k_documents=k_documents, seed=seed
        )


class Kernel(Protocol):
    """Attention over some keys and its gradients, given out and lse over all keys. sinks: whether it takes them."""

    name: str
    sinks: bool

    def summand(self, x: Tensor) -> torch.dtype:
        """The dtype of its results and gradients where they are parts of sums, for inputs like x."""

    def rejects(self, q: Tensor, call: Call, terms: Terms) -> str | None:
        """Why it cannot serve a call; None if it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, terms: Terms, summand: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse of q [B, H, T, D] over k and v [B, G, S, D]. summand: out is part of a sum, in that dtype, else
        of q's."""

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        terms: Terms, summand: bool,
    ) -> Gradients:  # fmt: skip
        """Gradients of q, k and v by these keys' share; summand: parts of sums, in that dtype, else of their dtypes. If
        terms have sinks, also the sum over these queries of the sinks' gradients."""


class Ours:
    """`ops.attention` and its gradient."""

    name = "tilesmith"
    sinks = True

    def summand(self, x: Tensor) -> torch.dtype:
        """At least fp32: a part that is rounded adds its rounding to that of the sum."""
        return torch.promote_types(x.dtype, torch.float32)

    def rejects(self, q: Tensor, call: Call, terms: Terms) -> str | None:
        """It serves everything."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, terms: Terms, summand: bool
    ) -> tuple[Tensor, Tensor]:
        """As the protocol says; terms.sinks are part of the softmax here."""
        mask, score = _mask_and_score(call, terms)
        named = {"sinks": terms.sinks, "dropout_p": terms.dropout_p, "seed": terms.seed}
        named |= {"deterministic": terms.deterministic, **_packed(call, q.device)}
        if summand:
            return ops.attention_partial(q, k, v, **named, **mask.lower(), **score.lower())
        return ops.attention(q, k, v, mask, score, **named)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        terms: Terms, summand: bool,
    ) -> Gradients:  # fmt: skip
        """As the protocol says."""
        mask, score = _mask_and_score(call, terms)
        *found, _, dsinks = attention_vjp(
            **{
                **_NOTHING, **mask.lower(), **score.lower(), **_packed(call, q.device), "dout": dout, "dlse": dlse,
                "q": q, "k": k, "v": v, "out": out, "lse": lse, "sinks": terms.sinks, "dropout_p": terms.dropout_p,
                "seed": terms.seed, "deterministic": terms.deterministic, "gradients_fp32": summand,
                "output_mask": [True, True, True, False, terms.sinks is not None],
            }
        )  # fmt: skip
        return tuple(found) if terms.sinks is None else (*found, dsinks)


class Cudnn:
    """cuDNN's attention through ATen, so that schedules can be compared with the same kernel inside."""

    name = "cudnn"
    sinks = False

    def summand(self, x: Tensor) -> torch.dtype:
        """As its inputs."""
        return x.dtype

    def rejects(self, q: Tensor, call: Call, terms: Terms) -> str | None:
        """It serves full and square causal calls of unpacked sequences on CUDA devices."""
        if q.device.type != "cuda":
            return f"q is on {q.device}, not on a CUDA device"
        if call.cu_q or call.left >= 0 or (call.right >= 0 and (call.right, call.tokens) != (0, call.keys)):
            return "only full and square causal calls are supported"
        asked = [terms.alibi, terms.bias, terms.mask, terms.q_documents, terms.sinks]
        if terms.softcap or terms.dropout_p or any(x is not None for x in asked):
            return "softcap, dropout, sinks, ALiBi, biases, masks and documents are not served"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, terms: Terms, summand: bool
    ) -> tuple[Tensor, Tensor]:
        """As the protocol says, but always of q's dtype."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, call.right == 0, False, scale=terms.scale
        )
        return out, lse.squeeze(-1) if lse.ndim == 4 else lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call,
        terms: Terms, summand: bool,
    ) -> Gradients:  # fmt: skip
        """As the protocol says, but always of their dtypes; it knows no gradient of lse."""
        if dlse is not None:
            raise ValueError("context_parallel_attention: kernel 'cudnn' has no gradient of lse; use 'tilesmith'")
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0,
            call.right == 0, scale=terms.scale,
        )  # fmt: skip


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Ours(), Cudnn())}


# arguments of the gradient that restrict nothing
_NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(attention_vjp.parameters), "causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0,
    "max_seqlen_q": 0, "max_seqlen_k": 0, "block_q": 0, "block_k": 0,
}  # fmt: skip


def _mask_and_score(call: Call, terms: Terms) -> tuple[ops.Mask, ops.Score]:
    if terms.mask is terms.q_documents is None:
        mask = _mask(call.left, call.right)
    else:
        documents = None if terms.q_documents is None else (terms.q_documents, terms.k_documents)
        mask = replace(_mask(call.left, call.right), documents=documents, dense=terms.mask)
    if terms.alibi is terms.bias is None:
        return mask, _score(terms.scale, terms.softcap)
    return mask, ops.Score(terms.scale, terms.softcap, terms.alibi, terms.bias)


@lru_cache(maxsize=512)
def _mask(left: int, right: int) -> ops.Mask:
    causal = right == 0
    sides = left, -1 if causal else right
    return ops.Mask(causal, None if sides == (-1, -1) else sides)


@lru_cache(maxsize=64)
def _score(scale: float | None, softcap: float) -> ops.Score:
    return ops.Score(scale, softcap)


def _packed(call: Call, device: torch.device) -> dict[str, Tensor | int]:
    if not call.cu_q:
        return {}
    starts = {"cu_seqlens_q": _starts(call.cu_q, device), "cu_seqlens_k": _starts(call.cu_k, device)}
    return {**starts, "max_seqlen_q": call.longest[0], "max_seqlen_k": call.longest[1]}


@lru_cache(maxsize=512)
def _starts(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., rows, :]


def _columns(x: Tensor, call: Call, held: Sequence[Range]) -> Tensor:
    """The keys of a call, by their place in the sequence, out of the last dim of x."""
    if x.shape[-1] == 1:
        return x
    parts, at = [], 0
    for start, stop in held:
        low, high = max(call.k, at), min(call.k + call.keys, at + stop - start)
        if low < high:
            parts.append(x[..., start + low - at : start + high - at])
        at += stop - start
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
