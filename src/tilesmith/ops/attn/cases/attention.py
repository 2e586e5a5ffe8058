"""Example inputs of attention, alone and as attention_partial.

B batch, T query tokens, S key tokens, H query heads, G kv heads.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import GPU, HALF, SMALL, TEST, TIMED, UNCHECKED, Init
from tilesmith.engine.inits import dropout_seed, far_heads, int32s, tokens_first
from tilesmith.ops.attn.cases import decode as decode_cases
from tilesmith.ops.attn.cases import fp8 as fp8_cases
from tilesmith.ops.attn.cases.draws import padding
from tilesmith.ops.attn.cases.groups import UNEVEN_GROUPS
from tilesmith.ops.attn.cases.windows import WINDOW_PACKED


def _apart(*values: float) -> Init:
    """Numbers (fp32 or int32) with others between them, as a column of a table has."""
    dtype = torch.int32 if isinstance(values[0], int) else torch.float32
    return lambda g, s, device: torch.tensor(values, dtype=dtype, device=device).repeat_interleave(2).roll(1)[1::2]


def _cut(*ends: int) -> Init:
    """Document ids of tokens that lie one after another: the first ends at the first number, and so on."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        token = torch.arange(shape[1], device=device)
        ids = torch.searchsorted(torch.tensor(ends, device=device), token, right=True)
        return ids.int().expand(*shape).contiguous()

    return init


def _kept(share: float) -> Init:
    """A bool mask that lets `share` of its elements through, and nothing of its last row."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        mask = torch.rand(shape, generator=generator, device=device) < share
        if shape[-2] > 1:
            mask[..., -1, :] = False
        return mask

    return init


def _slopes(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """Slopes [H], or of rows [B, H], each row's steeper than those of the one before."""
    slopes = torch.exp2(-8.0 * torch.arange(1, shape[-1] + 1, device=device) / shape[-1])
    return slopes if len(shape) == 1 else torch.arange(1, shape[0] + 1, device=device)[:, None] * slopes


def _hidden(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """An additive bias, -inf for a third of its elements and for a whole row."""
    bias = torch.randn(shape, generator=generator, device=device)
    bias[torch.rand(shape, generator=generator, device=device) < 0.3] = float("-inf")
    bias[..., 3, :] = float("-inf")
    return bias


# lengths of 24 documents of 32,768 tokens, drawn once: uniform cuts, as of a shuffled corpus packed to a context
_DOCUMENTS = (2710, 318, 1542, 96, 3987, 871, 2203, 455, 1236, 689, 2981, 1750, 41, 1107, 2466, 530, 903, 1689, 377,
              1988, 264, 1425, 2117, 1023)  # fmt: skip


def _listed(
    tokens: int, keys: int, batch: int, heads: int, block_q: int, block_k: int, share: float, both: bool = False
) -> dict:
    """Block lists that hold `share` of the blocks, and nothing of one block of queries. batch, heads: of the lists.
    both: the transposed lists as well."""
    rows, columns = -(-tokens // block_q), -(-keys // block_k)
    chance = random.Random(rows * columns)
    seen = [[chance.random() < share for _ in range(columns)] for _ in range(batch * heads * rows)]
    seen[rows // 2] = [False] * columns
    sides = {"": [[j for j, here in enumerate(row) if here] for row in seen]}
    if both:
        sides["_t"] = [
            [i for i in range(rows) if seen[of * rows + i][j]] for of in range(batch * heads) for j in range(columns)
        ]
    args: dict = {"block_q": block_q, "block_k": block_k}
    for end, lists in sides.items():
        ends = (0, *accumulate(map(len, lists)))
        long = len(lists) // (batch * heads)
        starts = [ends[first : first + long + 1] for first in range(0, len(lists), long)]
        offsets, indices = tuple(x for row in starts for x in row), tuple(j for row in lists for j in row)
        args[f"block_offsets{end}"] = T(batch, heads, long + 1, dtype=torch.int32, init=int32s(*offsets))
        args[f"block_indices{end}"] = T(len(indices), dtype=torch.int32, init=int32s(*indices))
    return args


def attend(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    tokens: int = 33,
    keys: int = 33,
    dim: int = 16,
    dim_v: int | None = None,
    init: str | Init = "normal",
    layout: str = "contiguous",
    **options,
) -> dict:
    """Arguments of one call. Shapes of bias, mask, alibi, and numbers of lengths and packed documents, are short for
    the tensors."""
    kind = {"init": init, "layout": layout}
    args: dict = {
        "q": T(batch, heads, tokens, dim, **kind),
        "k": T(batch, kv_heads, keys, dim, **kind),
        "v": T(batch, kv_heads, keys, dim_v or dim, **kind),
    }
    for name in [n for n in ("kv_lengths", "prefix_lengths") if n in options]:
        values = options.pop(name)
        args[name] = T(len(values), dtype=torch.int32, init=int32s(*values))
    for name in [n for n in ("cu_seqlens_q", "cu_seqlens_k") if n in options]:
        values = (0, *accumulate(options.pop(name)))
        args[name] = T(len(values), dtype=torch.int32, init=int32s(*values))
    if "mask" in options:
        args["mask"] = T(*options.pop("mask"), dtype=torch.bool, init=_kept(0.7))
    if "bias" in options:
        args["bias"] = T(*options.pop("bias"), init=options.pop("bias_init", "normal"))
    if "alibi" in options:
        args["alibi"] = T(*options.pop("alibi"), dtype=torch.float32, grad=False, init=_slopes)
    if options.pop("sinks", False):
        args["sinks"] = T(heads)
    if "documents" in options:
        ends = options.pop("documents")
        args["q_documents"] = T(batch, tokens, dtype=torch.int32, init=_cut(*ends))
        args["k_documents"] = T(batch, keys, dtype=torch.int32, init=_cut(*ends))
    if "lists" in options:
        args |= _listed(tokens, keys, *options.pop("lists"))
    if options.get("dropout_p"):
        args["seed"] = T(2, dtype=torch.int64, init=dropout_seed)
    return {**args, **options}


def _train(batch: int, tokens: int, heads: int, dim: int, **options) -> dict:
    kv_heads = options.pop("kv_heads", heads)
    return attend(batch, heads, kv_heads, tokens, tokens, dim, init=tokens_first, **options)


PACKED = {"cu_seqlens_q": (13, 0, 20, 7), "cu_seqlens_k": (13, 0, 20, 7)}

ATTENTION = [
    Case("plain", attend(tokens=9, keys=9), SMALL),
    Case("causal", attend(2, 4, 2, 41, 41, 24, causal=True), SMALL),
    Case("tokens_first", attend(2, 4, 2, 20, 37, init=tokens_first, causal=True), SMALL),
    Case("strided", attend(2, 2, 1, 20, 37, 24, layout="strided"), SMALL),
    Case("transposed", attend(1, 2, 2, 20, 24, 16, layout="transposed"), TEST),
    Case("two_head_dims", attend(1, 2, 2, 17, 40, 24, 40), SMALL),
    Case("dim_72_one_kv_head", attend(1, 3, 1, 17, 40, 72, 16, causal=True), SMALL),
    Case("one_query", attend(2, 2, 2, 1, 40, causal=True), SMALL),
    Case("one_key", attend(tokens=7, keys=1), SMALL),
    Case("no_keys", attend(tokens=7, keys=0, sinks=True), SMALL),
    Case("no_queries", attend(tokens=0, keys=7), SMALL),
    Case("no_rows", attend(batch=0), SMALL),
    Case("causal_more_queries", attend(tokens=45, keys=20, causal=True), SMALL),
    Case("causal_more_keys", attend(tokens=20, keys=61, causal=True), SMALL),
    Case("window", attend(tokens=64, keys=64, causal=True, window_left=7), SMALL),
    Case("window_both_sides", attend(tokens=40, keys=64, window_left=3, window_right=5), SMALL),
    Case("window_right", attend(tokens=40, keys=64, window_right=0), SMALL),
    Case("window_more_queries", attend(tokens=61, keys=20, window_left=4, window_right=9), SMALL),
    Case("window_of_one", attend(tokens=40, keys=40, causal=True, window_left=0), SMALL),
    Case("softcap", attend(tokens=20, keys=37, causal=True, softcap=50.0, scale=0.3), SMALL),
    Case("softcap_tight", attend(tokens=20, keys=37, softcap=2.0, scale=1.0), SMALL),
    Case("alibi", attend(1, 4, 2, 20, 37, alibi=(4,)), SMALL),
    Case("alibi_of_rows", attend(2, 2, 2, 20, 20, alibi=(2, 2), causal=True), SMALL),
    Case("sinks", attend(tokens=40, keys=20, causal=True, sinks=True), SMALL),
    Case("mask", attend(2, 2, 2, 33, 37, mask=(2, 2, 33, 37)), SMALL),
    Case("mask_of_keys", attend(2, 2, 2, 33, 37, mask=(2, 1, 1, 37), causal=True), SMALL),
    Case("mask_of_queries", attend(1, 2, 2, 33, 37, mask=(1, 1, 33, 1), sinks=True), SMALL),
    Case("mask_of_nothing", attend(mask=(1, 1, 2, 1), tokens=2), TEST),
    Case("bias", attend(2, 2, 1, 33, 37, bias=(2, 2, 33, 37)), SMALL),
    Case("bias_of_heads", attend(2, 2, 2, 33, 37, bias=(1, 2, 33, 37), causal=True), SMALL),
    Case("bias_of_keys", attend(2, 2, 2, 33, 37, bias=(2, 1, 1, 37)), SMALL),
    Case("bias_of_queries", attend(2, 2, 2, 33, 37, bias=(1, 1, 33, 1)), SMALL),
    Case("bias_of_all", attend(bias=(1, 1, 1, 1)), SMALL),
    Case("bias_hides", attend(2, 2, 2, 20, 37, bias=(1, 2, 20, 37), bias_init=_hidden), SMALL),
    Case("bias_window", attend(tokens=40, keys=50, bias=(1, 2, 40, 50), causal=True, window_left=9), SMALL),
    Case("lengths", attend(3, 2, 1, 5, 50, causal=True, kv_lengths=(50, 17, 0)), SMALL),
    Case("lengths_full", attend(2, 2, 2, 20, 50, kv_lengths=(50, 3)), SMALL),
    Case("lengths_over_nan", {**attend(2, 2, 2, 9, 40, kv_lengths=(40, 21)), **dict.fromkeys(
        ("k", "v"), T(2, 2, 40, 16, init=padding(40, 21)))}, SMALL),
    Case("vectors_apart", {**attend(3, 2, 1, 9, 20, 64, causal=True), "sinks": T(2, init=_apart(0.5, 2.0)),
        "kv_lengths": T(3, dtype=torch.int32, init=_apart(20, 17, 3))}, SMALL),
    Case("packed_apart", {**attend(1, 2, 2, 15, 20, 64, causal=True), "sinks": T(2, init=_apart(0.5, 2.0)),
        **{n: T(3, dtype=torch.int32, init=_apart(0, 7, e)) for n, e in (("cu_seqlens_q", 15), ("cu_seqlens_k", 20))}},
        SMALL),
    Case("prefix", attend(2, 2, 2, 50, 50, causal=True, prefix_lengths=(13, 40)), SMALL),
    Case("prefix_window", attend(2, 2, 2, 60, 60, causal=True, window_left=5, prefix_lengths=(3, 39)), SMALL),
    Case("prefix_window_bias", attend(
        tokens=60, keys=60, causal=True, window_left=5, prefix_lengths=(39,), bias=(1, 1, 60, 60)), SMALL),
    Case("documents", attend(2, 2, 2, 50, 50, causal=True, documents=(17, 34)), SMALL),
    Case("documents_over_nan", {**attend(tokens=11, keys=5, causal=True, documents=(5, 7)), **dict.fromkeys(
        ("k", "v"), T(1, 2, 5, 16, init=padding(0)))}, SMALL),
    Case("documents_cross", attend(1, 2, 2, 33, 60, documents=(17, 50)), SMALL),
    Case("packed", attend(1, 4, 2, 45, 45, causal=True, **PACKED), SMALL),
    Case("packed_cross", attend(1, 2, 2, 40, 64, cu_seqlens_q=(13, 20, 7), cu_seqlens_k=(10, 0, 50)), SMALL),
    Case("packed_one", attend(tokens=20, keys=20, causal=True, cu_seqlens_q=(20,), cu_seqlens_k=(20,)), SMALL),
    Case("packed_alibi", attend(tokens=40, keys=40, causal=True, alibi=(4, 2), **PACKED), SMALL),
    Case("packed_window", attend(tokens=40, keys=40, causal=True, window_left=4, alibi=(2,), **PACKED), SMALL),
    Case("packed_prefix", attend(
        tokens=40, keys=40, causal=True, window_left=4, prefix_lengths=(5, 0, 18, 3), **PACKED), SMALL),
    Case("packed_lengths", attend(
        tokens=30, keys=60, causal=True, cu_seqlens_q=(10, 5, 15), cu_seqlens_k=(20, 20, 20),
        kv_lengths=(20, 9, 16)), SMALL),
    Case("packed_lengths_beyond", attend(
        tokens=30, keys=60, causal=True, cu_seqlens_q=(10, 5, 15), cu_seqlens_k=(20, 20, 20),
        kv_lengths=(23, -4, 20)), SMALL),
    Case("dropout", attend(2, 2, 2, 33, 36, dropout_p=0.3), SMALL),
    Case("dropout_apart", {**attend(1, 1, 1, 17, 20, dropout_p=0.3), "seed": T(
        2, dtype=torch.int64, init=lambda g, s, device: torch.tensor([[3, 7], [4, -9]], device=device)[:, 1])}, SMALL),
    Case("dropout_by_eight", attend(2, 2, 1, 33, 40, dropout_p=0.3), SMALL),
    Case("dropout_odd", attend(1, 4, 2, 33, 37, dropout_p=0.6, causal=True, bias=(1, 4, 1, 37)), SMALL),
    Case("everything", attend(
        2, 4, 2, 40, 52, causal=True, window_left=20, softcap=5.0, alibi=(4,), sinks=True, bias=(2, 1, 40, 52),
        mask=(2, 1, 40, 52), kv_lengths=(52, 31), prefix_lengths=(4, 0), dropout_p=0.2), SMALL),
    Case("lists", attend(2, 2, 2, 70, 90, lists=(2, 2, 16, 16, 0.4)), SMALL),
    Case("lists_transposed", attend(1, 4, 2, 70, 70, causal=True, lists=(1, 2, 32, 16, 0.6, True)), SMALL),
    Case("lists_of_heads", attend(2, 4, 2, 50, 61, window_left=9, window_right=5, lists=(1, 4, 24, 40, 0.7)), SMALL),
    Case("lists_ragged", attend(1, 2, 1, 45, 45, causal=True, sinks=True, lists=(1, 1, 5, 7, 0.5)), SMALL),
    Case("lists_packed", attend(1, 2, 2, 45, 45, causal=True, lists=(1, 1, 16, 16, 0.6), **PACKED), SMALL),
    Case("lists_lengths", attend(
        2, 2, 1, 20, 50, causal=True, kv_lengths=(50, 17), lists=(2, 1, 16, 32, 0.6)), SMALL),
    Case("lists_everything", attend(
        2, 4, 2, 40, 52, causal=True, window_left=20, softcap=5.0, alibi=(4,), sinks=True, bias=(2, 1, 40, 52),
        mask=(2, 1, 40, 52), prefix_lengths=(4, 0), documents=(17, 34), dropout_p=0.2,
        lists=(1, 4, 16, 24, 0.7)), SMALL),
    Case("lists_bias", attend(1, 2, 2, 40, 52, bias=(1, 2, 40, 52), lists=(1, 2, 12, 24, 0.5)), SMALL),
    Case("lists_of_nothing", attend(tokens=20, keys=20, lists=(1, 1, 32, 32, 0.5)), SMALL),
    Case("d64_small", attend(1, 2, 1, 70, 130, 64, causal=True, sinks=True), SMALL),
    Case("d72_small", attend(1, 2, 2, 20, 40, 72, window_left=9, softcap=9.0), SMALL),
    Case("d64_packed_small", attend(
        1, 2, 1, 50, 60, 64, causal=True, cu_seqlens_q=(13, 0, 30), cu_seqlens_k=(20, 5, 33)), SMALL),
    Case("d64_window_small", attend(1, 2, 1, 140, 150, 64, causal=True, window_left=30), SMALL),
    Case("d64_narrow_small", attend(1, 2, 2, 150, 140, 64, causal=True, window_left=30), SMALL),
    Case("d64_lists_small", attend(1, 2, 1, 130, 130, 64, causal=True, lists=(1, 1, 128, 64, 0.6)), SMALL),
    Case("d128_lists_small", attend(1, 2, 1, 130, 130, 128, causal=True, lists=(1, 1, 128, 128, 0.9)), SMALL),
    Case("d512_small", attend(1, 2, 1, 40, 45, 512, causal=True, sinks=True), SMALL),
    Case("d512_packed_small", attend(
        1, 2, 1, 40, 45, 512, causal=True, sinks=True, cu_seqlens_q=(13, 0, 27), cu_seqlens_k=(15, 5, 25)), SMALL),
    Case("d264_packed_window_small", attend(
        1, 2, 2, 40, 40, 264, causal=True, window_left=4, softcap=9.0, **PACKED), SMALL),
    Case("d320_documents_small", attend(1, 2, 1, 40, 40, 320, causal=True, documents=(17, 34)), SMALL),
    Case("d512_everything_small", attend(
        2, 2, 1, 20, 26, 512, 264, causal=True, window_left=20, softcap=5.0, alibi=(2,), sinks=True,
        bias=(2, 1, 20, 26), mask=(2, 1, 20, 26), kv_lengths=(26, 15), prefix_lengths=(4, 0), dropout_p=0.2), SMALL),
    Case("d192_128_small", attend(1, 2, 1, 70, 40, 192, 128, causal=True), SMALL),
    Case("d256_small", attend(1, 2, 2, 20, 40, 256), SMALL),
    Case("d64_dropout_small", attend(1, 2, 1, 70, 136, 64, causal=True, dropout_p=0.3), SMALL),
    Case("d64_dropout_packed_small", attend(
        1, 2, 1, 50, 60, 64, causal=True, dropout_p=0.6, cu_seqlens_q=(13, 0, 30), cu_seqlens_k=(20, 5, 33)), SMALL),
    Case("d128_dropout_small", attend(1, 2, 2, 20, 45, 128, sinks=True, dropout_p=0.3), SMALL),
    Case("d128_shares_small", attend(1, 8, 1, 250, 40, 128), TEST | {"compile"}),
    Case("d128_key_shares_small", attend(1, 1, 1, 20, 4000, 128), TEST | {"compile"}),
    Case("d128_causal_key_shares_small", attend(1, 1, 1, 20, 4000, 128, causal=True), TEST | {"compile"}),
    Case("d64_key_shares_small", attend(1, 1, 1, 20, 4000, 64), TEST | {"compile"}),
    Case("d64_tiles", attend(2, 4, 4, 1030, 1030, 64, init=tokens_first), GPU, HALF),
    Case("d64_causal_tiles", attend(2, 8, 2, 1030, 1030, 64, init=tokens_first, causal=True), GPU, HALF),
    Case("d128_tiles", attend(2, 4, 4, 777, 1030, 128, init=tokens_first), GPU, HALF),
    Case("d128_causal_tiles", attend(2, 8, 2, 1030, 1030, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("d128_whole_tiles", attend(2, 4, 4, 1024, 1024, 128, causal=True), GPU, HALF),
    Case("d128_whole_more_keys", attend(2, 4, 2, 384, 1152, 128, causal=True, softcap=9.0, sinks=True), GPU, HALF),
    Case("d128_whole_more_queries", attend(2, 4, 2, 640, 256, 128, causal=True), GPU, HALF),
    Case("d64_two_programs", attend(4, 20, 4, 500, 500, 64, init=tokens_first, causal=True), GPU, HALF),
    Case("d64_whole_turns", attend(2, 6, 2, 448, 2112, 64, init=tokens_first, causal=True), GPU, HALF),
    Case("d64_whole_turns_softcap", attend(1, 4, 2, 320, 2176, 64, causal=True, softcap=9.0, sinks=True), GPU, HALF),
    Case("d64_whole_more_queries", attend(1, 12, 12, 2240, 2112, 64, causal=True), GPU, HALF),
    Case("d64_causal_turns", attend(1, 4, 2, 4200, 4200, 64, init=tokens_first, causal=True), GPU, HALF),
    Case("d128_shares", attend(1, 8, 2, 700, 300, 128), GPU, HALF),
    Case("d128_shares_behind", attend(2, 32, 16, 900, 640, 128, init=tokens_first), GPU, HALF),
    Case("d64_shares", attend(1, 12, 2, 700, 520, 64), GPU, HALF),
    Case("d128_causal_sections", attend(2, 32, 16, 600, 760, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("d64_turns", attend(2, 12, 12, 600, 900, 64, deterministic=True), GPU, HALF),
    Case("d128_key_shares", attend(2, 6, 2, 300, 2700, 128), GPU, HALF),
    Case("d128_key_shares_behind", attend(1, 92, 4, 130, 3072, 128, init=tokens_first), GPU, HALF),
    Case("d128_key_shares_softcap", attend(2, 75, 25, 100, 3000, 128, softcap=9.0, sinks=True), GPU, HALF),
    Case("d128_causal_key_shares", attend(1, 6, 2, 300, 4100, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("d128_right_key_shares", attend(1, 2, 2, 4100, 4000, 128, window_right=70, softcap=9.0), GPU, HALF),
    Case("d64_key_shares", attend(2, 6, 2, 300, 2700, 64, init=tokens_first, softcap=9.0, sinks=True), GPU, HALF),
    Case("d64_key_shares_behind", attend(1, 67, 67, 200, 2600, 64), GPU, HALF),
    Case("d96_128_key_shares", attend(1, 3, 3, 200, 2600, 96, 128), GPU, HALF),
    Case("d96_tiles", attend(2, 4, 2, 520, 520, 96, init=tokens_first, causal=True), GPU, HALF),
    Case("d80_tiles", attend(2, 4, 2, 520, 517, 80, init=tokens_first), GPU, HALF),
    Case("d72_causal_tiles", attend(1, 4, 4, 700, 700, 72, init=tokens_first, causal=True), GPU, HALF),
    Case("d80_key_shares", attend(1, 4, 4, 2500, 2500, 80, init=tokens_first), GPU, HALF),
    Case("d96_turns", attend(2, 6, 6, 600, 900, 96, deterministic=True), GPU, HALF),
    Case("d80_packed", attend(
        1, 4, 2, 1000, 1000, 80, causal=True, cu_seqlens_q=(130, 1, 269, 600), cu_seqlens_k=(130, 1, 269, 600)),
        GPU, HALF),
    Case("d72_key_shares_behind", attend(1, 140, 4, 120, 3072, 72, init=tokens_first), GPU, HALF),
    Case("d96_causal_key_shares", attend(1, 6, 2, 300, 4100, 96, causal=True, softcap=9.0), GPU, HALF),
    Case("d88_group_of_3", attend(2, 9, 3, 333, 517, 88, causal=True, sinks=True), GPU, HALF),
    Case("d96_whole_more_keys", attend(2, 4, 2, 384, 1152, 96, causal=True, softcap=9.0, sinks=True), GPU, HALF),
    Case("d80_whole_more_queries", attend(2, 4, 2, 640, 256, 80, causal=True), GPU, HALF),
    Case("d72_two_programs", attend(5, 16, 16, 729, 729, 72, init=tokens_first), GPU, HALF),
    Case("d80_window", attend(1, 4, 2, 300, 700, 80, causal=True, window_left=200), GPU, HALF),
    Case("d72_packed_window", attend(1, 4, 2, 300, 720, 72, window_left=100, window_right=33,
        cu_seqlens_q=(100, 5, 150), cu_seqlens_k=(300, 20, 400)), GPU, HALF),
    Case("d80_lists", attend(
        1, 4, 2, 520, 520, 80, init=tokens_first, causal=True, lists=(1, 4, 128, 128, 0.4)), GPU, HALF),
    Case("d96_lists_narrow", attend(1, 2, 2, 400, 400, 96, lists=(1, 1, 256, 64, 0.5)), GPU, HALF),
    Case("d72_64_tiles", attend(1, 4, 2, 300, 520, 72, 64, causal=True), GPU, HALF),
    Case("d64_96_tiles", attend(2, 4, 2, 520, 517, 64, 96), GPU, HALF),
    Case("d192_80_tiles", attend(1, 4, 2, 300, 520, 192, 80, causal=True), GPU, HALF),
    Case("d128_72_tiles", attend(1, 4, 2, 300, 520, 128, 72, causal=True), GPU, HALF),
    Case("d72_lists", attend(1, 4, 2, 520, 520, 72, lists=(1, 4, 128, 128, 0.5)), GPU, HALF),
    Case("d72_wide_tiles", attend(3, 16, 8, 384, 512, 72, init=tokens_first), GPU, HALF),
    Case("d72_wide_causal_tiles", attend(1, 66, 22, 576, 576, 72, init=tokens_first, causal=True), GPU, HALF),
    Case("d72_wide_causal_more_keys", attend(3, 22, 22, 517, 650, 72, causal=True, sinks=True), GPU, HALF),
    Case("d72_wide_group_of_3", attend(3, 12, 4, 640, 640, 72), GPU, HALF),
    Case("d72_wide_causal_group_of_2", attend(3, 32, 16, 384, 517, 72, causal=True), GPU, HALF),
    Case("d88_both_joined", attend(3, 22, 22, 257, 257, 88, sinks=True), GPU | {"compile"}, HALF),
    Case("d128_group_of_7", attend(1, 14, 2, 700, 700, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("d64_group_of_3", attend(2, 9, 3, 333, 517, 64, causal=True), GPU, HALF),
    Case("d192_128_tiles", attend(2, 4, 4, 520, 520, 192, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("d192_128_grouped", attend(1, 6, 2, 300, 700, 192, 128, sinks=True, softcap=9.0), GPU, HALF),
    Case("d192_128_window", attend(1, 4, 2, 300, 700, 192, 128, causal=True, window_left=200), GPU, HALF),
    Case("d192_128_more_queries", attend(2, 4, 2, 300, 130, 192, 128, causal=True, sinks=True), GPU, HALF),
    Case("d192_128_packed", attend(
        1, 4, 2, 700, 700, 192, 128, causal=True, cu_seqlens_q=(300, 5, 390), cu_seqlens_k=(300, 5, 390)), GPU, HALF),
    Case("d192_128_whole", attend(2, 4, 4, 512, 640, 192, 128, causal=True), GPU, HALF),
    Case("d192_128_lists", attend(
        1, 4, 2, 520, 520, 192, 128, init=tokens_first, causal=True, lists=(1, 4, 128, 128, 0.4)), GPU, HALF),
    Case("d192_128_lists_narrow", attend(1, 2, 2, 400, 400, 192, 128, lists=(1, 1, 256, 64, 0.5)), GPU, HALF),
    Case("d184_120_tiles", attend(1, 2, 2, 200, 300, 184, 120), GPU, HALF),
    Case("d128_64_tiles", attend(2, 4, 2, 520, 520, 128, 64, causal=True), GPU, HALF),
    Case("d64_128_tiles", attend(1, 4, 2, 300, 520, 64, 128), GPU, HALF),
    Case("d256_128_tiles", attend(1, 4, 2, 300, 520, 256, 128, causal=True), GPU, HALF),
    Case("d192_256_tiles", attend(1, 2, 2, 300, 300, 192, 256), GPU, HALF),
    Case("d192_tiles", attend(1, 4, 4, 300, 700, 192, causal=True, window_left=200), GPU, HALF),
    Case("d512_tiles", attend(1, 4, 2, 300, 520, 512, init=tokens_first, causal=True), GPU, HALF),
    Case("d320_tiles", attend(1, 2, 2, 200, 130, 320, window_left=70, window_right=33), GPU, HALF),
    Case("d512_whole_tiles", attend(2, 4, 1, 256, 384, 512), GPU, HALF),
    Case("d512_more_queries", attend(1, 4, 2, 300, 130, 512, causal=True, sinks=True), GPU, HALF),
    Case("d264_tiles", attend(2, 4, 2, 333, 517, 264, causal=True), GPU, HALF),
    Case("d384_512_tiles", attend(1, 4, 1, 257, 257, 384, 512, causal=True, deterministic=True), GPU, HALF),
    Case("d512_288_window", attend(1, 2, 2, 900, 900, 512, 288, causal=True, window_left=100), GPU, HALF),
    Case("d512_softcap", attend(1, 2, 2, 300, 300, 512, causal=True, softcap=9.0), GPU, HALF),
    Case("d512_many", attend(1, 40, 8, 700, 700, 512, init=tokens_first, causal=True), GPU, HALF),
    Case("d512_full_tiles", attend(2, 2, 2, 390, 270, 512, init=tokens_first), GPU, HALF),
    Case("d512_right", attend(1, 4, 2, 500, 420, 512, window_right=70), GPU, HALF),
    Case("d512_window_tiles", attend(1, 4, 4, 700, 900, 512, causal=True, window_left=300, sinks=True), GPU, HALF),
    Case("d512_264_grouped", attend(1, 6, 2, 300, 700, 512, 264, causal=True), GPU, HALF),
    Case("d320_512_more_queries", attend(1, 4, 4, 640, 130, 320, 512, causal=True, softcap=9.0), GPU, HALF),
    Case("d512_one_token", attend(2, 2, 1, 1, 300, 512, causal=True), GPU, HALF),
    Case("d512_packed_tiles", attend(
        1, 4, 2, 900, 900, 512, init=tokens_first, causal=True, cu_seqlens_q=(417, 0, 130, 353),
        cu_seqlens_k=(417, 0, 130, 353)), GPU, HALF),
    Case("d512_packed_cross_tiles", attend(
        1, 4, 1, 700, 900, 512, causal=True, window_left=200, sinks=True, cu_seqlens_q=(300, 5, 395),
        cu_seqlens_k=(200, 300, 400)), GPU, HALF),
    Case("d264_packed_tiles", attend(
        1, 8, 2, 640, 640, 264, init=tokens_first, causal=True, cu_seqlens_q=(300, 340),
        cu_seqlens_k=(300, 340)), GPU, HALF),
    Case("d512_documents_tiles", attend(2, 4, 2, 500, 500, 512, causal=True, documents=(170, 340)), GPU, HALF),
    Case("d512_lengths_tiles", attend(2, 4, 2, 500, 700, 512, causal=True, kv_lengths=(700, 333)), GPU, HALF),
    Case("d512_bands", attend(1, 4, 2, 2300, 2300, 512, init=tokens_first, causal=True), GPU, HALF),
    Case("d512_bands_full", attend(1, 4, 1, 2500, 2500, 512, 320), GPU, HALF),
    Case("d512_bands_window", attend(1, 4, 1, 3000, 2900, 512, window_left=400, window_right=90), GPU, HALF),
    Case("d512_bands_of_heads", attend(1, 16, 1, 200, 9000, 512, causal=True), GPU, HALF),
    Case("d256_more_queries", attend(2, 4, 2, 300, 130, 256, causal=True, sinks=True), GPU, HALF),
    Case("d256_packed", attend(
        1, 4, 2, 700, 700, 256, causal=True, cu_seqlens_q=(300, 5, 390), cu_seqlens_k=(300, 5, 390)), GPU, HALF),
    Case("d256_tiles", attend(2, 4, 2, 520, 520, 256, init=tokens_first, causal=True), GPU, HALF),
    Case("d256_many_tiles", attend(2, 12, 4, 1040, 1000, 256, init=tokens_first, causal=True), GPU, HALF),
    Case("d256_many_tiles_full", attend(2, 12, 6, 1040, 1100, 256, softcap=20.0), GPU, HALF),
    Case("d64_more_queries", attend(2, 4, 2, 300, 130, 64, causal=True), GPU, HALF),
    Case("d64_long", attend(1, 4, 2, 500, 2100, 64), GPU, HALF),
    Case("d64_causal_long", attend(1, 4, 2, 700, 8300, 64, init=tokens_first, causal=True, sinks=True), GPU, HALF),
    Case("d64_packed_long", attend(
        1, 4, 2, 900, 8300, 64, causal=True, cu_seqlens_q=(300, 5, 595), cu_seqlens_k=(4000, 300, 4000)), GPU, HALF),
    Case("d128_more_queries", attend(2, 4, 2, 300, 130, 128, causal=True), GPU, HALF),
    Case("d128_one_query", attend(2, 8, 2, 1, 700, 128, causal=True), GPU, HALF),
    Case("d128_window_sinks", attend(1, 8, 2, 900, 900, 128, causal=True, window_left=200, sinks=True), GPU, HALF),
    Case("d64_window_128", attend(1, 8, 2, 900, 1100, 64, causal=True, window_left=127, sinks=True), GPU, HALF),
    Case("d64_narrow", attend(
        2, 4, 4, 1500, 1500, 64, init=tokens_first, causal=True, window_left=127, deterministic=True), GPU, HALF),
    Case("d64_narrow_softcap", attend(1, 8, 8, 900, 700, 64, window_left=60, window_right=20, softcap=9.0), GPU, HALF),
    Case("d128_narrow", attend(2, 4, 4, 1500, 1400, 128, init=tokens_first, causal=True, window_left=127), GPU, HALF),
    Case("d128_narrow_softcap", attend(
        1, 4, 4, 900, 700, 128, window_left=60, window_right=20, softcap=9.0), GPU, HALF),
    Case("d96_narrow", attend(1, 4, 4, 700, 700, 96, causal=True, window_left=90, sinks=True), GPU, HALF),
    Case("d96_window_sides", attend(
        2, 4, 4, 700, 500, 96, 128, init=tokens_first, window_left=64, window_right=64), GPU, HALF),
    Case("d136_tiles", attend(1, 4, 2, 300, 500, 136, init=tokens_first, causal=True), GPU, HALF),
    Case("d256_both_sides", attend(1, 4, 2, 400, 300, 256, window_left=70, window_right=33), GPU, HALF),
    Case("d256_deterministic", attend(1, 8, 2, 700, 700, 256, causal=True, deterministic=True), GPU, HALF),
    Case("d128_deterministic", attend(
        2, 8, 2, 1030, 1030, 128, init=tokens_first, causal=True, deterministic=True), GPU, HALF),
    Case("d128_deterministic_sections", attend(
        1, 3, 3, 8190, 8250, 128, init=tokens_first, causal=True, deterministic=True), GPU, HALF),
    Case("d128_deterministic_sections_behind", attend(
        1, 3, 3, 8330, 8250, 128, causal=True, deterministic=True), GPU, HALF),
    Case("d64_deterministic", attend(2, 8, 8, 900, 1300, 64, deterministic=True), GPU, HALF),
    Case("d64_deterministic_one_start", attend(2, 128, 16, 1300, 600, 64, deterministic=True), GPU, HALF),
    Case("d128_deterministic_ring", attend(2, 6, 2, 2100, 2200, 128, sinks=True, deterministic=True), GPU, HALF),
    Case("d128_deterministic_ring_drawn", attend(
        1, 12, 12, 1990, 2050, 128, init=tokens_first, deterministic=True), GPU, HALF),
    Case("d128_deterministic_ring_more_keys", attend(1, 8, 4, 100, 1100, 128, deterministic=True), GPU, HALF),
    Case("d72_deterministic_ring", attend(
        1, 12, 12, 1990, 2050, 72, init=tokens_first, deterministic=True), GPU, HALF),
    Case("d96_deterministic_ring", attend(1, 12, 12, 1500, 1500, 96, deterministic=True), GPU, HALF),
    Case("d80_deterministic_packed", attend(
        1, 8, 2, 1100, 1100, 80, causal=True, deterministic=True, cu_seqlens_q=(300, 5, 790),
        cu_seqlens_k=(300, 5, 790)), GPU, HALF),
    Case("d96_packed_more_keys", attend(
        1, 4, 2, 700, 1100, 96, causal=True, cu_seqlens_q=(130, 0, 270, 300), cu_seqlens_k=(130, 200, 470, 300)),
        GPU, HALF),
    Case("d96_deterministic_window", attend(
        1, 8, 2, 1500, 1500, 96, causal=True, window_left=200, deterministic=True), GPU, HALF),
    Case("d64_deterministic_packed", attend(
        1, 8, 2, 1100, 1100, 64, causal=True, deterministic=True, cu_seqlens_q=(300, 5, 790),
        cu_seqlens_k=(300, 5, 790)), GPU, HALF),
    Case("d64_both_sides", attend(1, 8, 8, 700, 900, 64, window_left=70, window_right=33), GPU, HALF),
    Case("fp32_tiles", attend(1, 4, 2, 260, 300, 128, causal=True), GPU, (torch.float32,)),
    Case("window_tiles", attend(1, 4, 2, 1500, 1500, 64, causal=True, window_left=200, sinks=True), GPU, HALF),
    *(Case(name, attend(*sizes, init=tokens_first, **options), GPU, HALF)
      for name, (sizes, options) in (WINDOW_PACKED | UNEVEN_GROUPS).items()),
    Case("packed_tiles", attend(
        1, 8, 2, 2000, 2000, 128, init=tokens_first, causal=True, cu_seqlens_q=(700, 3, 0, 900, 140, 200),
        cu_seqlens_k=(700, 3, 0, 900, 140, 200)), GPU, HALF),
    Case("d64_packed_tail", attend(
        1, 4, 4, 1000, 1000, 64, causal=True, cu_seqlens_q=(130, 1, 64, 600), cu_seqlens_k=(130, 1, 64, 600)),
        GPU, HALF),
    Case("packed_many", attend(
        1, 4, 2, 1240, 1240, 128, causal=True, cu_seqlens_q=(31,) * 40, cu_seqlens_k=(31,) * 40), GPU, HALF),
    Case("packed_cross_window", attend(
        1, 4, 2, 530, 760, 128, init=tokens_first, causal=True, window_left=70, sinks=True,
        cu_seqlens_q=(13, 200, 0, 300, 1), cu_seqlens_k=(100, 0, 50, 150, 400)), GPU, HALF),
    Case("d64_packed_lengths", attend(
        1, 4, 2, 300, 720, 64, window_left=100, window_right=33, cu_seqlens_q=(100, 5, 150),
        cu_seqlens_k=(200, 200, 300), kv_lengths=(200, 90, 160)), GPU, HALF),
    Case("documents_tiles", attend(1, 4, 2, 1100, 1100, 128, causal=True, documents=(300, 310, 900)), GPU, HALF),
    Case("bias_tiles", attend(2, 4, 4, 500, 500, 64, bias=(1, 4, 500, 500)), GPU, HALF),
    Case("mask_tiles", attend(2, 4, 4, 500, 500, 128, mask=(2, 1, 500, 500)), GPU, HALF),
    Case("softcap_tiles", attend(1, 8, 4, 700, 700, 256, causal=True, softcap=50.0, window_left=300), GPU, HALF),
    Case("dropout_tiles", attend(1, 4, 2, 600, 600, 128, causal=True, dropout_p=0.2), GPU, HALF),
    Case("dropout_d64", attend(2, 8, 2, 520, 712, 64, causal=True, sinks=True, dropout_p=0.1), GPU, HALF),
    Case("dropout_d80", attend(2, 4, 2, 333, 517, 80, causal=True, dropout_p=0.3), GPU, HALF),
    Case("dropout_d72_packed", attend(
        1, 4, 2, 300, 720, 72, dropout_p=0.7, cu_seqlens_q=(100, 5, 150), cu_seqlens_k=(300, 20, 400)), GPU, HALF),
    Case("dropout_d96_softcap", attend(
        1, 4, 2, 700, 704, 96, window_right=40, softcap=9.0, dropout_p=0.5, deterministic=True), GPU, HALF),
    Case("dropout_whole", attend(2, 4, 4, 1024, 1024, 128, causal=True, dropout_p=0.9), GPU, HALF),
    Case("dropout_many", attend(1, 32, 8, 1536, 1536, 128, init=tokens_first, causal=True, dropout_p=0.1), GPU, HALF),
    Case("dropout_uneven", attend(2, 4, 2, 333, 517, 128, dropout_p=0.2), GPU, HALF),
    Case("dropout_d64_window", attend(1, 4, 2, 900, 901, 64, causal=True, window_left=70, dropout_p=0.1), GPU, HALF),
    Case("dropout_narrow", attend(1, 4, 4, 700, 600, 128, window_left=60, window_right=20, dropout_p=0.1), GPU, HALF),
    Case("dropout_packed", attend(
        1, 8, 2, 1243, 1243, 128, init=tokens_first, causal=True, dropout_p=0.2, cu_seqlens_q=(700, 3, 0, 400, 140),
        cu_seqlens_k=(700, 3, 0, 400, 140)), GPU, HALF),
    Case("dropout_d64_packed_lengths", attend(
        1, 4, 2, 300, 720, 64, window_left=100, window_right=33, dropout_p=0.7, cu_seqlens_q=(100, 5, 150),
        cu_seqlens_k=(200, 200, 300), kv_lengths=(200, 90, 160)), GPU, HALF),
    Case("prefix_tiles", attend(2, 4, 2, 700, 700, 128, causal=True, window_left=100, prefix_lengths=(30, 500)),
         GPU, HALF),
    Case("lengths_tiles", attend(3, 4, 2, 300, 900, 128, causal=True, kv_lengths=(900, 301, 120)), GPU, HALF),
    *(
        Case(f"d{dim}_lists{name}", attend(2, 4, 2, 1030, 1030, dim, init=tokens_first, **lists), GPU, HALF)
        for dim in (64, 128) for name, lists in (
            ("", {"lists": (1, 4, 128, 128, 0.4)}), ("_causal", {"causal": True, "lists": (2, 2, 128, 128, 0.4, True)}),
            ("_wide", {"window_left": 300, "lists": (1, 1, 64, 256, 0.6)}),
            ("_narrow", {"causal": True, "sinks": True, "lists": (1, 4, 256, 64, 0.5)}))
    ),
    Case("far", attend(1, 2, 2, 200, 200, 64, init=far_heads, causal=True), GPU, (torch.bfloat16,)),
    *(
        Case(f"d{dim}_{tokens // 1024}k{name}", _train(16384 // tokens, tokens, 2048 // dim, dim, causal=causal),
             UNCHECKED, HALF)
        for dim in (64, 128, 256) for tokens in (1024, 4096, 16384) for name, causal in (("", False), ("_causal", True))
    ),
    *(
        Case(f"mla_{tokens // 1024}k_causal", _train(1, tokens, 16, 192, dim_v=128, causal=True), UNCHECKED, HALF)
        for tokens in (2048, 4096, 8192, 16384)
    ),
    *(
        Case(f"d512_{tokens // 1024}k_causal", _train(1, tokens, 8, 512, kv_heads=2, causal=True), UNCHECKED, HALF)
        for tokens in (4096, 8192, 16384)
    ),
    Case("llama_4k", _train(2, 4096, 32, 128, kv_heads=8, causal=True), UNCHECKED, HALF),
    Case("llama_window_16k", _train(1, 16384, 32, 128, kv_heads=8, causal=True, window_left=4096), UNCHECKED, HALF),
    Case("gpt_oss_window", _train(1, 16384, 64, 64, kv_heads=8, causal=True, window_left=127, sinks=True), UNCHECKED,
         HALF),
    Case("gemma_softcap", _train(1, 8192, 16, 256, kv_heads=8, causal=True, softcap=50.0), UNCHECKED, HALF),
    Case("packed_16k", _train(1, 16384, 32, 128, kv_heads=8, causal=True, cu_seqlens_q=(9000, 500, 84, 5000, 1800),
                              cu_seqlens_k=(9000, 500, 84, 5000, 1800)), UNCHECKED, HALF),
    *(
        Case(f"window_128_32k_d{dim}", _train(1, 32768, 2048 // dim, dim, causal=True, window_left=127), TIMED, HALF)
        for dim in (64, 128)
    ),
    *(
        Case(f"d{dim}_{tokens // 1024}k{name}_deterministic",
             _train(16384 // tokens, tokens, 2048 // dim, dim, causal=causal, deterministic=True), TIMED, HALF)
        for dim, lengths in ((64, (1024, 4096, 16384)), (128, (1024, 4096, 16384)), (256, (4096,)))
        for tokens in lengths for name, causal in (("", False), ("_causal", True))
    ),
    Case("gqa_64_8_4k", _train(2, 4096, 64, 128, kv_heads=8), TIMED, HALF),
    Case("gqa_64_8_4k_causal", _train(2, 4096, 64, 128, kv_heads=8, causal=True), TIMED, HALF),
    Case("packed_32k", _train(1, 32768, 16, 128, causal=True, cu_seqlens_q=_DOCUMENTS, cu_seqlens_k=_DOCUMENTS),
         TIMED, HALF),
    *(
        Case(f"lists_16k{of}{name}", _train(1, 16384, 2048 // dim, dim, lists=(1, 1, 128, 128, share), causal=causal),
             TIMED, HALF)
        for of, dim, share in (("", 128, 0.25), ("_eighth", 128, 0.12), ("_d64", 64, 0.25))
        for name, causal in (("", False), ("_causal", True))
    ),
    Case("bias_2k", _train(2, 2048, 16, 64, bias=(1, 16, 2048, 2048)), UNCHECKED, HALF),
    Case("dropout_4k", _train(4, 4096, 16, 128, causal=True, dropout_p=0.1), UNCHECKED, HALF),
]  # fmt: skip


PARTIAL = [
    Case("fp32_causal", attend(1, 4, 2, 20, 20, 64, init=tokens_first, causal=True), SMALL),
    Case("fp32_packed", attend(
        1, 2, 1, 60, 60, 64, causal=True, cu_seqlens_q=(13, 0, 30), cu_seqlens_k=(20, 5, 33)), SMALL),
    Case("fp32_key_shares_small", attend(1, 1, 1, 20, 4000, 128), frozenset({"compile"})),
    Case("fp32_d128_tiles", attend(2, 4, 4, 777, 1030, 128, init=tokens_first), GPU, HALF),
    Case("fp32_d128_causal_tiles", attend(2, 8, 2, 1030, 1030, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d128_key_shares_behind", attend(1, 92, 4, 130, 3072, 128, init=tokens_first), GPU, HALF),
    Case("fp32_d128_causal_key_shares", attend(1, 6, 2, 300, 4100, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d128_narrow", attend(2, 4, 4, 1500, 1400, 128, causal=True, window_left=127), GPU, HALF),
    Case("fp32_d80_causal_tiles", attend(1, 4, 2, 700, 700, 80, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d96_key_shares", attend(1, 1, 1, 200, 8000, 96, init=tokens_first), GPU, HALF),
    Case("fp32_d64_causal_turns", attend(1, 4, 2, 4200, 4200, 64, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d64_turns", attend(2, 12, 12, 600, 900, 64), GPU, HALF),
    Case("fp32_d72_causal_tiles", attend(1, 4, 4, 700, 700, 72, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d72_wide_tiles", attend(2, 32, 8, 384, 512, 72), GPU, HALF),
    Case("fp32_d72_wide_causal_tiles", attend(2, 32, 8, 517, 650, 72, causal=True), GPU, HALF),
    Case("fp32_d192_128_tiles", attend(2, 4, 4, 520, 520, 192, 128, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d256_tiles", attend(2, 4, 2, 520, 520, 256, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_d256_packed", attend(
        1, 4, 2, 700, 700, 256, causal=True, cu_seqlens_q=(300, 5, 390), cu_seqlens_k=(300, 5, 390)), GPU, HALF),
    Case("fp32_d512_tiles", attend(1, 4, 2, 300, 520, 512, init=tokens_first, causal=True), GPU, HALF),
    Case("fp32_dropout_whole", attend(2, 4, 4, 1024, 1024, 128, causal=True, dropout_p=0.9), GPU, HALF),
    Case("fp32_packed_tiles", attend(
        1, 8, 2, 2000, 2000, 128, init=tokens_first, causal=True, cu_seqlens_q=(700, 3, 0, 900, 140, 200),
        cu_seqlens_k=(700, 3, 0, 900, 140, 200)), GPU, HALF),
]  # fmt: skip

CASES: dict[str, list[Case]] = {
    "attention": [*ATTENTION, *decode_cases.CASES, *fp8_cases.ATTENTION],
    "attention_partial": PARTIAL,
    "attention_quantize": fp8_cases.QUANTIZE,
    "attention_dequantize": fp8_cases.DEQUANTIZE,
    "attention_fp8_gradients": fp8_cases.GRADIENTS,
}
