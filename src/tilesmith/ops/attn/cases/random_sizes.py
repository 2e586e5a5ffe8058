"""Cases of attention with sizes drawn at random. What compiles into a kernel is the same for all cases of a kind.

Sizes are odd, or multiples of 16 where a kind says so, and products of heads are neither 1 nor a multiple of 16: Triton
compiles a kernel anew for such numbers, which would otherwise come and go from case to case.
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.inits import tokens_first
from tilesmith.ops.attn.cases.attention import attend
from tilesmith.ops.attn.visibility import visibility

BF16, FP16, FP32 = (torch.bfloat16,), (torch.float16,), (torch.float32,)


@dataclass(frozen=True)
class Kind:
    """What cases of a kind have in common.

    dims: head dims of q and v. group: heads of q for each of k and v. options: arguments of `attention`; a window of
    None or of (least, most) is drawn, lists are (heads: 1, "kv" or "all", block_q, block_k), planes say which dims are
    not 1. tokens: how many queries at most. square: as many keys as queries. aligned: multiples of 16. packed, lengths,
    prefix, documents: whether there are any. shuffled: documents whose tokens lie among those of others. few: at most 8
    queries, which kernels for decoding serve, too.
    """

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, int]
    group: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 600
    square: bool = False
    aligned: bool = False
    packed: bool = False
    lengths: bool = False
    prefix: bool = False
    documents: bool = False
    shuffled: bool = False
    few: bool = False

    @property
    def without(self) -> tuple[str, ...]:
        """Backends that would compile kernels for case after case."""
        return () if self.few else ("triton_split",)

    def sample(self, name: str, number: int, longest: int | None = None) -> Case:
        """Case `number` of this kind. longest: fewer tokens than the kind has."""
        chance = random.Random(f"{name} {number}")
        longest = min(longest or self.tokens, self.tokens)
        batch, kv_heads = (1 if self.packed else chance.choice((2, 3))), chance.choice((3, 5))
        heads = kv_heads * self.group
        tokens = _size(chance, longest, self.aligned)
        keys = tokens if self.square else _size(chance, 3 * longest if self.few else longest, self.aligned)
        if self.few:
            tokens = chance.randint(1, 8)
        args = dict(self.options)
        for side in ("window_left", "window_right"):
            if isinstance(args.get(side), tuple):
                args[side] = chance.randint(*args[side])
            elif side in args:
                args[side] = 2 * chance.randint(1, max(keys // 2, 1)) + 1
        if self.packed:
            args |= _packed(chance, tokens, keys, self.square, self.lengths)
        elif self.lengths:
            args["kv_lengths"] = tuple(chance.randint(0, keys) for _ in range(batch))
        if self.prefix:
            args["prefix_lengths"] = tuple(chance.randint(0, keys) for _ in range(batch))
        if self.documents:
            args["documents"] = sorted(chance.randint(1, max(tokens, keys)) for _ in range(4))
        if "lists" in args:
            of, block_q, block_k = args["lists"]
            many = {"1": 1, "kv": kv_heads, "all": heads}[str(of)]
            args["lists"] = (chance.choice((1, batch)), many, block_q, block_k, chance.choice((0.2, 0.5, 0.9)))
        for plane in ("bias", "mask"):
            if plane in args:
                full = (batch, heads, tokens, keys)
                args[plane] = tuple(n if wide else 1 for n, wide in zip(full, args[plane]))
        if "alibi" in args:
            args["alibi"] = (heads,)
        init = chance.choice(("normal", tokens_first, _of_a_projection))
        given = attend(batch, heads, kv_heads, tokens, keys, *self.dims, init=init, **args)
        if self.shuffled:
            for side, many in (("q", tokens), ("k", keys)):
                given[f"{side}_documents"] = T(batch, many, dtype=torch.int32, init=_ids)
        return Drawn(f"{name}_{number}", given, frozenset(), self.dtypes)


class Drawn(Case):
    """A case in which queries that see nothing and keys that nobody sees are NaN."""

    def build(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        args = super().build(device, dtype, generator)
        q, k, v = args["q"], args["k"], args["v"]
        known = {n: x for n, x in args.items() if n in _SEEN}
        seen = visibility(*q.shape[:3], k.shape[2], q.device, **known)[2].expand(*q.shape[:3], -1)
        unread = ~seen.unflatten(1, (k.shape[1], -1)).any(2).any(-2)
        with torch.no_grad():
            q[~seen.any(-1)] = float("nan")
            k[unread], v[unread] = float("nan"), float("nan")
        return args


def _of_a_projection(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """[B, H, T, D] in the middle of a projection [B, T, 3 * H * D] that makes queries, keys and values at once."""
    batch, heads, tokens, dim = shape
    whole = torch.randn(batch, tokens, 3, heads, dim, generator=generator, device=device)
    return whole[:, :, 1].transpose(1, 2)


def _ids(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Ids of documents in no order, with gaps between them."""
    return 7 * torch.randint(-1, 3, tuple(shape), generator=generator, device=device).int()


_SEEN = set(inspect.signature(visibility).parameters)


def _size(chance: random.Random, longest: int, aligned: bool) -> int:
    return 16 * chance.randint(1, longest // 16) if aligned else 2 * chance.randint(1, longest // 2) + 1


def _parts(chance: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Lengths of documents, some of them 0, that fill at most `total` tokens."""
    cuts = sorted(chance.randint(0, total) for _ in range(parts))
    return tuple(b - a for a, b in zip((0, *cuts[:-1]), cuts))


def _packed(chance: random.Random, tokens: int, keys: int, square: bool, lengths: bool) -> dict[str, tuple[int, ...]]:
    q_parts = _parts(chance, tokens, chance.randint(2, 7))
    k_parts = q_parts if square else _parts(chance, keys, len(q_parts))
    args = {"cu_seqlens_q": q_parts, "cu_seqlens_k": k_parts}
    if lengths:
        args["kv_lengths"] = tuple(chance.randint(0, n) for n in k_parts)
    return args


def _options(**options: Any) -> dict[str, Any]:
    return options


CAUSAL, SINKS = _options(causal=True), _options(sinks=True)
WINDOW, SIDES = _options(causal=True, window_left=None), _options(window_left=None, window_right=None)
NARROW = _options(causal=True, window_left=(0, 128))

ATTENTION: dict[str, Kind] = {
    "d64": Kind(BF16, (64, 64)),
    "d64_causal": Kind(FP16, (64, 64), 4, CAUSAL, square=True, aligned=True),
    "d64_sides": Kind(BF16, (64, 64), 2, SIDES),
    "d64_narrow": Kind(BF16, (64, 64), 1, NARROW | SINKS, square=True),
    "d64_narrow_group": Kind(BF16, (64, 64), 4, NARROW),
    "d64_narrow_sides": Kind(FP16, (64, 64), 1, _options(window_left=(0, 64), window_right=(0, 64), softcap=20.0)),
    "d64_packed": Kind(BF16, (64, 64), 2, CAUSAL, 1200, square=True, packed=True),
    "d64_packed_lengths": Kind(FP16, (64, 64), 1, CAUSAL | SINKS, 900, packed=True, lengths=True),
    "d64_lists": Kind(BF16, (64, 64), 2, _options(lists=("all", 128, 128)), 900),
    "d64_lists_causal": Kind(BF16, (64, 64), 4, CAUSAL | _options(lists=("all", 128, 256)), 900, square=True),
    "d96_causal": Kind(BF16, (96, 96), 1, CAUSAL),
    "d128": Kind(FP16, (128, 128), 2, SINKS, aligned=True),
    "d128_causal": Kind(BF16, (128, 128), 4, CAUSAL),
    "d128_narrow": Kind(BF16, (128, 128), 1, NARROW, 900),
    "d128_window": Kind(BF16, (128, 128), 1, WINDOW | SINKS),
    "d128_softcap": Kind(BF16, (128, 128), 2, WINDOW | _options(softcap=20.0)),
    "d128_packed": Kind(BF16, (128, 128), 2, WINDOW, 1200, packed=True),
    "d128_packed_group": Kind(BF16, (128, 128), 4, CAUSAL, 1200, packed=True),
    "d128_lists": Kind(BF16, (128, 128), 2, CAUSAL | _options(lists=("kv", 128, 64)), 900, square=True),
    "d192_128": Kind(BF16, (192, 128), 1, CAUSAL),
    "d256_causal": Kind(FP16, (256, 256), 2, CAUSAL, 400),
    "d128_few": Kind(BF16, (128, 128), 4, CAUSAL, few=True, lengths=True),
    "d48_fp32": Kind(FP32, (48, 48), 2, WINDOW),
    "d64_bias": Kind(BF16, (64, 64), 1, _options(bias=(1, 1, 1, 1))),
    "d80_bias_of_heads": Kind(FP16, (80, 80), 2, CAUSAL | _options(bias=(0, 1, 1, 1), alibi=None)),
    "d32_mask": Kind(BF16, (32, 32), 2, SINKS | _options(mask=(1, 0, 1, 1))),
    "d64_documents": Kind(FP16, (64, 64), 2, CAUSAL, documents=True),
    "d32_shuffled": Kind(FP32, (32, 32), 2, SIDES, 300, shuffled=True),
    "d128_prefix": Kind(BF16, (128, 128), 1, WINDOW, prefix=True, square=True),
    "d64_dropout": Kind(FP16, (64, 64), 2, CAUSAL | _options(dropout_p=0.2)),
    "d128_dropout": Kind(BF16, (128, 128), 2, WINDOW | SINKS | _options(dropout_p=0.6)),
    "d128_dropout_packed": Kind(BF16, (128, 128), 2, CAUSAL | _options(dropout_p=0.1), 1200, packed=True),
    "d64_packed_all": Kind(
        FP16, (64, 64), 2, WINDOW | SINKS | _options(softcap=9.0, dropout_p=0.2, alibi=None), 700, packed=True,
        lengths=True),
    "d128_lengths": Kind(BF16, (128, 128), 2, CAUSAL, lengths=True),
    "d32_lists": Kind(FP32, (32, 32), 2, WINDOW | SINKS | _options(softcap=9.0, lists=(1, 24, 40)), 400),
}  # fmt: skip

SAMPLES = {"attention": ATTENTION}
