"""Cases of attention's weights and row statistics."""

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import GPU, SMALL, TEST, UNCHECKED
from tilesmith.engine.memory import held
from tilesmith.ops.attn.cases.draws import row_lse

HALF = (torch.bfloat16, torch.float16)


def _pair(batch: int, heads: int, kv_heads: int, tokens: int, keys: int, dim: int, **options) -> dict:
    layout = options.pop("layout", "contiguous")
    q, k = T(batch, heads, tokens, dim, layout=layout), T(batch, kv_heads, keys, dim, layout=layout)
    return {"q": q, "k": k, **options}


def _weigh(batch: int, heads: int, kv_heads: int, tokens: int, keys: int, dim: int, **options) -> dict:
    lse = T(batch, heads, tokens, dtype=torch.float32, init=row_lse)
    pair = _pair(batch, heads, kv_heads, tokens, keys, dim, **options)
    return {"q": pair.pop("q"), "k": pair.pop("k"), "lse": lse, **pair}


def _shapes(build) -> list[Case]:
    return [
        Case("plain", build(1, 2, 2, 9, 13, 16), SMALL),
        Case("causal_grouped", build(2, 4, 2, 41, 41, 24, causal=True), SMALL),
        Case("one_kv_head", build(1, 3, 1, 17, 40, 72, scale=0.3), SMALL),
        Case("causal_more_queries", build(1, 2, 2, 45, 20, 16, causal=True), SMALL),
        Case("causal_more_keys", build(1, 2, 1, 20, 61, 16, causal=True), SMALL),
        Case("dim_of_one", build(1, 1, 1, 5, 7, 1), SMALL),
        Case("strided", build(2, 2, 1, 20, 37, 24, layout="strided"), SMALL),
        Case("transposed", build(1, 2, 2, 20, 24, 16, layout="transposed"), SMALL),
        Case("one_key", build(1, 2, 2, 7, 1, 16), SMALL),
        Case("no_keys", build(1, 2, 2, 7, 0, 16), SMALL),
        Case("no_queries", build(1, 2, 2, 0, 7, 16), SMALL),
        Case("no_rows", build(0, 2, 2, 3, 7, 16), SMALL),
        Case("wide_heads", build(1, 1, 1, 5, 9, 320), TEST),
        Case("tiles", build(2, 4, 2, 300, 333, 128, causal=True), GPU, HALF),
        Case("wide_tiles", build(1, 2, 1, 200, 260, 256), GPU, HALF),
        Case("fp32_tiles", build(1, 4, 2, 260, 300, 128, causal=True), GPU, (torch.float32,)),
        Case("train_2k", build(4, 16, 16, 2048, 2048, 128, causal=True), UNCHECKED, HALF),
    ]


CASES: dict[str, list[Case]] = {"attention_weights": _shapes(_weigh), "attention_stats": _shapes(_pair)}


def _plane(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


bytes_moved = {
    "attention_weights": lambda q, k, lse: held(q, k, lse) + _plane(q, k) * q.element_size(),
    "attention_weights_vjp": lambda dweights, q, k, lse: held(dweights, lse) + 2 * held(q, k, lse),
    "attention_stats": lambda q, k: held(q, k) + 8 * q.shape[0] * q.shape[1] * q.shape[2],
}
flops = {
    "attention_weights": lambda q, k: 2 * _plane(q, k) * q.shape[3],
    "attention_weights_vjp": lambda q, k: 8 * _plane(q, k) * q.shape[3],
    "attention_stats": lambda q, k: 2 * _plane(q, k) * q.shape[3],
}
