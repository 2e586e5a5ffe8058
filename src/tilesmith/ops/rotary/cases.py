"""Example inputs of the rotary family."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, SMALL
from tilesmith.engine.inits import far_heads, tokens_first
from tilesmith.ops.rotary import norm_cases
from tilesmith.ops.rotary.norm_cases import angle_bytes, normed

TILES = frozenset({"test", "compile"})  # shapes that Hopper's kernels serve


def _packed(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
    """[B, H, T, D] inside a [B, T, 2H, D] projection that holds other heads too."""
    batch, heads, tokens, dim = shape
    return tokens_first(generator, (batch, 2 * heads, tokens, dim), device)[:, heads:]


def _angles(function: Callable[[Tensor], Tensor], repeated: str = ""):
    """cos or sin for the first shape[-2] positions, theta 10000; "halves" or "pairs" is a view of a table that holds
    each angle twice."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        pairs = shape[-1]
        inverse = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64, device=device) / max(1, pairs))
        angle = torch.arange(shape[-2], dtype=torch.float64, device=device)[:, None] * inverse
        table = function(angle).float().expand(shape)
        if repeated == "halves":
            return torch.cat((table, table), dim=-1)[..., :pairs]
        if repeated == "pairs":
            return table.repeat_interleave(2, dim=-1)[..., ::2]
        return table.clone()

    return init


def _integers(*values: int):
    """The values, repeated until the shape is full."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor(values * (-(-count // len(values))), device=device)[:count].view(*shape).int()

    return init


def _rope(
    batch: int,
    q_heads: int,
    k_heads: int | None,
    tokens: int,
    dim: int,
    *,
    rotated: int | None = None,
    k_dim: int | None = None,
    table: int | None = None,
    per_token: int = 0,
    repeated: str = "",
    angle_dtype: torch.dtype | None = torch.float32,
    layout: str = "contiguous",
    init: str | Callable = tokens_first,
    **others: object,
) -> dict:
    """Arguments of one call. k_dim: the size of k's heads, dim if None. table: P of [P, R/2] angles, T if None;
    per_token: rows of [rows, T, R/2] angles."""

    def states(heads: int, dim: int) -> T:
        return T(batch, heads, tokens, dim, layout=layout, init=init)

    pairs = (dim if rotated is None else rotated) // 2
    shape = (per_token, tokens, pairs) if per_token else (tokens if table is None else table, pairs)
    return {
        "q": states(q_heads, dim),
        "k": None if k_heads is None else states(k_heads, dim if k_dim is None else k_dim),
        "cos": T(*shape, dtype=angle_dtype, grad=False, init=_angles(torch.cos, repeated)),
        "sin": T(*shape, dtype=angle_dtype, grad=False, init=_angles(torch.sin, repeated)),
        **others,
    }


def _ints(*shape: int, values: Sequence[int]) -> T:
    return T(*shape, dtype=torch.int32, grad=False, init=_integers(*values))


REPEATED = {"per_token": 1, "repeated": "halves", "angle_dtype": None}
LATENT = {**REPEATED, "interleaved": True, "last": True, "halved": True}
DOCUMENTS = _ints(5, values=(0, 3, 3, 9, 11))

CASES: dict[str, list[Case]] = {
    "rope": [
        Case("plain", _rope(2, 4, 2, 5, 16), SMALL),
        Case("interleaved", _rope(2, 4, 2, 5, 16, interleaved=True), SMALL),
        Case("q_only", _rope(2, 3, None, 5, 16), SMALL),
        Case("many_blocks", _rope(2, 9, 3, 37, 16), frozenset({"test"})),
        Case("heads_first", _rope(2, 3, 1, 5, 16, init="normal"), SMALL),
        Case("partial", _rope(1, 2, 1, 4, 40, rotated=16), SMALL),
        Case("partial_interleaved", _rope(1, 2, 1, 4, 40, rotated=10, interleaved=True), SMALL),
        Case("halved", _rope(2, 4, 2, 5, 16, interleaved=True, halved=True), SMALL),
        Case("last", _rope(1, 2, 1, 4, 40, rotated=16, last=True), SMALL),
        Case("last_interleaved", _rope(1, 2, 1, 4, 40, rotated=10, interleaved=True, last=True), SMALL),
        Case("first_halved", _rope(1, 2, 1, 4, 40, rotated=10, interleaved=True, halved=True), SMALL),
        Case("smaller_keys", _rope(2, 3, 2, 4, 40, rotated=16, k_dim=20), SMALL),
        Case("larger_keys", _rope(2, 3, 2, 4, 16, k_dim=24, interleaved=True, last=True), SMALL),
        Case("latent", _rope(2, 4, 1, 5, 24, rotated=8, k_dim=8, **LATENT), SMALL),
        Case("latent_transposed", _rope(2, 4, 1, 5, 24, rotated=8, k_dim=8, layout="transposed", **LATENT), SMALL),
        Case("dim_80", _rope(1, 2, 1, 3, 80), SMALL),
        Case("dim_96_interleaved", _rope(1, 2, 1, 3, 96, interleaved=True), SMALL),
        Case("odd_dim", _rope(1, 2, 1, 3, 17), SMALL),
        Case("nothing_rotated", _rope(1, 2, 1, 3, 8, rotated=0), SMALL),
        Case("one_pair", _rope(1, 1, 1, 3, 2), SMALL),
        Case("angles_in_run_dtype", _rope(2, 2, 1, 5, 16, angle_dtype=None), SMALL),
        Case("angles_repeated", _rope(2, 2, 1, 5, 16, per_token=2, repeated="halves", angle_dtype=None), SMALL),
        Case("angles_repeated_pairs", _rope(2, 2, 1, 5, 16, per_token=1, repeated="pairs", interleaved=True), SMALL),
        Case("offset", _rope(1, 2, 1, 4, 16, table=9, offset=5), SMALL),
        Case("offsets", _rope(3, 2, 1, 2, 16, table=9, offsets=_ints(3, values=(0, 7, 3))), SMALL),
        Case("both_offsets", _rope(2, 2, 1, 1, 16, table=9, offsets=_ints(2, values=(4, 0)), offset=2), SMALL),
        Case("positions", _rope(2, 2, 1, 5, 16, table=9, positions=_ints(2, 5, values=(8, 0, 3))), SMALL),
        Case("positions_shared", _rope(2, 2, 1, 5, 16, table=9, positions=_ints(5, values=(8, 0, 3))), SMALL),
        Case("packed", _rope(1, 2, 1, 11, 16, cu_seqlens=DOCUMENTS), SMALL),
        Case("packed_past_the_end", _rope(1, 2, 1, 13, 16, cu_seqlens=DOCUMENTS), SMALL),
        Case(
            "packed_offsets",
            _rope(1, 2, 1, 11, 16, table=20, cu_seqlens=DOCUMENTS, offsets=_ints(4, values=(1, 2, 9)), offset=3),
            SMALL,
        ),
        Case("strided", _rope(2, 2, 1, 5, 24, layout="strided", init="normal"), SMALL),
        Case("transposed", _rope(2, 2, 1, 5, 24, layout="transposed", init="normal"), SMALL),
        Case("inside_projection", _rope(2, 3, 3, 5, 16, init=_packed), SMALL),
        Case("one_token", _rope(4, 8, 2, 1, 16), SMALL),
        Case("no_tokens", _rope(2, 2, 1, 0, 16), SMALL),
        Case("no_rows", _rope(0, 2, 1, 4, 16), SMALL),
        Case("no_key_heads", _rope(1, 2, 0, 4, 16), SMALL),
        Case("far", _rope(1, 2, None, 64, 128, init=far_heads), GPU, (torch.bfloat16,)),
        Case("many_tokens", _rope(3, 3, 1, 1030, 64), GPU),
        Case("llama_4x4096", _rope(4, 32, 8, 4096, 128), BENCH),
        Case("llama_1x16384", _rope(1, 32, 8, 16384, 128), BENCH),
        Case("dim64_8x2048", _rope(8, 64, 8, 2048, 64), BENCH),
        Case("per_token_4x4096", _rope(4, 32, 8, 4096, 128, per_token=1, repeated="halves", angle_dtype=None), BENCH),
        Case("interleaved_4x4096", _rope(4, 32, 8, 4096, 128, interleaved=True), BENCH),
        Case("partial_4x4096", _rope(4, 32, 8, 4096, 128, rotated=64), BENCH),
        Case("deepseek_v3_2x4096", _rope(2, 16, 1, 4096, 192, rotated=64, k_dim=64, **LATENT), BENCH),
        Case("decode_128", _rope(128, 32, 8, 1, 128, table=8192, offsets=_ints(128, values=(4000, 17))), BENCH),
    ],
    "rms_norm_rope": [
        normed("plain", _rope(2, 4, 2, 5, 16), SMALL),
        normed("row", _rope(2, 4, 2, 5, 16), SMALL, norm_dim="row"),
        normed("row_odd_heads", _rope(2, 5, 3, 7, 16), SMALL, norm_dim="row"),
        normed("interleaved", _rope(2, 4, 2, 5, 16, interleaved=True), SMALL),
        normed("row_interleaved", _rope(1, 3, 2, 5, 16, interleaved=True), SMALL, norm_dim="row"),
        normed("q_only", _rope(2, 3, None, 5, 16), SMALL),
        normed("many_blocks", _rope(2, 9, 3, 37, 16), SMALL),
        normed("heads_first", _rope(2, 3, 1, 5, 16, init="normal"), SMALL),
        normed("partial", _rope(1, 2, 1, 4, 40, rotated=16), SMALL),
        normed("row_partial", _rope(1, 3, 1, 4, 40, rotated=16), SMALL, norm_dim="row"),
        normed("partial_interleaved", _rope(1, 2, 1, 4, 40, rotated=10, interleaved=True), SMALL),
        normed("dim_80", _rope(1, 2, 1, 3, 80), SMALL),
        normed("odd_dim", _rope(1, 2, 1, 3, 17), SMALL),
        normed("nothing_rotated", _rope(1, 2, 1, 3, 8, rotated=0), SMALL),
        normed("one_pair", _rope(1, 1, 1, 3, 2), SMALL),
        normed("no_weights", _rope(2, 2, 1, 5, 16), SMALL, weights=""),
        normed("q_weight_alone", _rope(2, 2, 1, 5, 16), SMALL, weights="q"),
        normed("frozen_weights", _rope(2, 2, 1, 5, 16), SMALL, frozen=True),
        normed("fp32_weights", _rope(2, 2, 1, 5, 16), SMALL, weight_dtype=torch.float32),
        normed("offset_weights", _rope(2, 2, 1, 5, 16), SMALL, weight_offset=1.0, eps=1e-3),
        normed("no_eps", _rope(2, 9, 3, 37, 16), SMALL, eps=0.0),
        normed("row_no_eps", _rope(2, 9, 3, 37, 16), SMALL, norm_dim="row", eps=0.0),
        normed("llama", _rope(2, 2, 1, 5, 16), SMALL, casting="llama"),
        normed("llama_no_weights", _rope(2, 2, 1, 5, 16), SMALL, weights="", casting="llama"),
        normed("llama_fp32_weights", _rope(2, 2, 1, 5, 16), SMALL, weight_dtype=torch.float32, casting="llama"),
        normed("llama_row", _rope(2, 2, 1, 5, 16), SMALL, norm_dim="row", casting="llama"),
        normed("angles_repeated", _rope(2, 2, 1, 5, 16, per_token=2, repeated="halves", angle_dtype=None), SMALL),
        normed("offset", _rope(1, 2, 1, 4, 16, table=9, offset=5), SMALL),
        normed("both_offsets", _rope(2, 2, 1, 1, 16, table=9, offsets=_ints(2, values=(4, 0)), offset=2), SMALL),
        normed("positions", _rope(2, 2, 1, 5, 16, table=9, positions=_ints(2, 5, values=(8, 0, 3))), SMALL),
        normed("packed", _rope(1, 2, 1, 11, 16, cu_seqlens=DOCUMENTS), SMALL),
        normed("strided", _rope(2, 2, 1, 5, 24, layout="strided", init="normal"), SMALL),
        normed("transposed", _rope(2, 2, 1, 5, 24, layout="transposed", init="normal"), SMALL),
        normed("inside_projection", _rope(2, 3, 3, 5, 16, init=_packed), SMALL),
        normed("one_token", _rope(4, 8, 2, 1, 16), SMALL),
        normed("no_tokens", _rope(2, 2, 1, 0, 16), SMALL),
        normed("no_rows", _rope(0, 2, 1, 4, 16), SMALL),
        normed("no_key_heads", _rope(1, 2, 0, 4, 16), SMALL),
        normed("tiles", _rope(2, 5, 1, 37, 64), TILES),
        normed("tiles_even", _rope(2, 32, 8, 8, 128, positions=_ints(8, values=(8, 0, 3)), table=9), TILES),
        normed("tiles_wide", _rope(1, 3, 2, 5, 256, offsets=_ints(1, values=(4,)), table=9), TILES),
        normed("tiles_alone", _rope(2, 2, None, 5, 128, offset=1, table=6), TILES, weights=""),
        normed("tiles_row", _rope(2, 5, 1, 37, 64), TILES, norm_dim="row"),
        normed("tiles_row_alone", _rope(2, 4, None, 5, 64), TILES, norm_dim="row", weight_dtype=torch.float32),
        normed("tiles_row_even", _rope(2, 32, 8, 8, 128), TILES, norm_dim="row", weight_offset=1.0),
        normed("tiles_row_wide", _rope(1, 33, 2, 5, 128, **REPEATED), TILES, norm_dim="row"),
        normed("row_5120", _rope(1, 40, 8, 9, 128), GPU, norm_dim="row"),
        normed("row_16384", _rope(1, 128, 8, 9, 128), GPU, norm_dim="row"),
        normed("far", _rope(1, 2, None, 64, 128, init=far_heads), GPU),
        normed("many_tokens_row", _rope(2, 6, 2, 1030, 64), GPU, norm_dim="row"),
        normed("many_tokens", _rope(2, 6, 2, 1030, 64), GPU),
        normed(
            "many_packed", _rope(1, 4, 1, 2049, 32, cu_seqlens=_ints(4, values=(0, 3, 1500, 2049))), GPU, weights=""
        ),
        normed("many_inside_projection", _rope(2, 3, 3, 1025, 128, init=_packed), GPU, casting="llama"),
        normed("qwen3_4x4096", _rope(4, 32, 8, 4096, 128), BENCH),
        normed("qwen3_1x16384", _rope(1, 32, 8, 16384, 128), BENCH),
        normed("dim64_8x2048", _rope(8, 64, 8, 2048, 64), BENCH),
        normed("dim64_1x16384", _rope(1, 64, 8, 16384, 64), BENCH),
        normed("llama_4x4096", _rope(4, 32, 8, 4096, 128), BENCH, casting="llama"),
        normed("row_4x4096", _rope(4, 32, 8, 4096, 128), BENCH, norm_dim="row"),
    ],
}


def _moved(x: Tensor | None) -> int:
    """x read and written."""
    return 0 if x is None else 2 * x.numel() * x.element_size()


bytes_moved = {
    "rope": lambda q, k, cos: _moved(q) + _moved(k) + angle_bytes(cos, q.shape[2]),
    "rope_vjp": lambda q, k, cos: _moved(q) + _moved(k) + angle_bytes(cos, q.shape[2]),
    **norm_cases.bytes_moved,
}
