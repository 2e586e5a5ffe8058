"""What every public name refuses: an error that names the argument, before anything runs, with nothing changed.

One table for each family: (what is wrong, the call, the error, words of its message). A message must name the argument.
"""

import warnings

import pytest
import torch
from torch import nn as torch_nn

import tilesmith
from tilesmith import core, nn, ops, use
from tilesmith import flash_attention as fa
from tilesmith.nn.cache import KVCache
from tilesmith.ops.attn.mask import Blocks

GENERATOR = torch.Generator().manual_seed(0)
NAN, INF = float("nan"), float("inf")


def r(*shape, dtype=torch.float32, device=None):
    return torch.randn(shape, generator=GENERATOR).to(dtype).to(device or "cpu")


def ids(*shape, most=11):
    return torch.randint(0, most, shape, generator=GENERATOR)


HALF, LONG, FP8, COMPLEX = torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64
X, W, VECTOR, LABELS = r(2, 5, 8), r(11, 8), r(8), ids(2, 5)
Q, K, V = r(2, 4, 6, 8), r(2, 2, 6, 8), r(2, 2, 6, 8)
COS, SIN = r(16, 4), r(16, 4)
SEED = torch.zeros(2, dtype=torch.int64)
I32 = torch.int32
LEARNED = torch.ones(2, 1, 1, requires_grad=True)
with warnings.catch_warnings(action="ignore"):  # torch's, that this kind of nested tensor is a prototype
    NESTED = torch.nested.nested_tensor([r(4, 6, 8), r(4, 3, 8)])


PAGES, STARTS = torch.tensor([[0, 1], [1, 2]], dtype=I32), torch.tensor([0, 3, 6], dtype=I32)


def refused(table):
    return pytest.mark.parametrize(
        ("call", "error", "words"), [pytest.param(*row[1:], id=row[0].replace(" ", "_")) for row in table]
    )


def check(call, error, words):
    before = torch.get_rng_state()
    with pytest.raises(error, match=words):
        call()
    assert torch.equal(before, torch.get_rng_state())


NORMS = [
    ("rank", lambda: ops.rms_norm(r(), VECTOR), ValueError, r"rms_norm: x has shape \(\)"),
    ("no columns", lambda: ops.rms_norm(r(3, 0), None), ValueError, r"rms_norm: x has shape \(3, 0\)"),
    ("dtype", lambda: ops.rms_norm(X.to(LONG), VECTOR), TypeError, "rms_norm: x has dtype torch.int64"),
    ("fp8", lambda: ops.rms_norm(X.to(FP8), VECTOR), TypeError, "rms_norm: x has dtype torch.float8"),
    ("weight size", lambda: ops.rms_norm(X, r(7)), ValueError, r"rms_norm: weight has shape \(7,\).*\[8\]"),
    ("weight rank", lambda: ops.rms_norm(X, r(1, 8)), ValueError, "rms_norm: weight has shape"),
    ("weight device", lambda: ops.rms_norm(X, VECTOR.to("meta")), ValueError, "rms_norm: weight is on meta, x on cpu"),
    ("eps", lambda: ops.rms_norm(X, VECTOR, -1.0), ValueError, "rms_norm: eps is -1.0; it must be"),
    ("eps nan", lambda: ops.rms_norm(X, VECTOR, NAN), ValueError, "rms_norm: eps is nan"),
    (
        "casting",
        lambda: ops.rms_norm(X, VECTOR, casting=""),
        ValueError,
        "rms_norm: casting is ''.*'fp32', 'llama' or 'none'",
    ),
    ("groups", lambda: ops.rms_norm_gated(X, X, groups=3), ValueError, "rms_norm_gated: groups is 3.*8 columns"),
    ("gate", lambda: ops.rms_norm_gated(X.to(HALF), X), TypeError, "rms_norm_gated: gate has dtype torch.float32"),
    ("opening", lambda: ops.rms_norm_gated(X, X, activation="relu"), ValueError, "rms_norm_gated: activation"),
    ("rmsnorm", lambda: ops.rmsnorm(X, r(7)), ValueError, "rmsnorm: weight has shape"),
    ("bias", lambda: ops.layer_norm(X, VECTOR, r(9)), ValueError, "layer_norm: bias has shape"),
    ("layer eps", lambda: ops.layer_norm(X, VECTOR, VECTOR, -1.0), ValueError, "layer_norm: eps is -1.0"),
    ("residual", lambda: ops.add_rms_norm(X, r(2, 5, 9), VECTOR), ValueError, "add_rms_norm: residual has shape"),
    ("residual broadcast", lambda: ops.add_rms_norm(X, r(1, 5, 8), VECTOR), ValueError, "add_rms_norm: residual has"),
    (
        "residual dtype",
        lambda: ops.add_layer_norm(X, X.half(), VECTOR),
        TypeError,
        "add_layer_norm: residual has dtype",
    ),
    ("p 1", lambda: ops.dropout_add_norm(X, X, p=1.0), ValueError, r"dropout_add_norm: p must be in \[0, 1\), got 1.0"),
    ("p nan", lambda: ops.dropout_add_norm(X, X, p=NAN), ValueError, "dropout_add_norm: p must be"),
    ("p None", lambda: ops.dropout_add_norm(X, X, p=None), TypeError, "dropout_add_norm: p must be a number.*None"),
    (
        "kind",
        lambda: ops.dropout_add_norm(X, X, p=0.5, kind="rmsnorm"),
        ValueError,
        "dropout_add_norm: kind must be one of",
    ),
    ("shapes after p", lambda: ops.dropout_add_norm(X, r(2, 5), p=0.5), ValueError, "dropout_add_norm: residual has"),
    (
        "rms has no bias",
        lambda: ops.dropout_add_norm(X, X, VECTOR, VECTOR, p=0.5, kind="rms"),
        ValueError,
        "dropout_add_norm: bias is given",
    ),
]

ELEMENTWISE = [
    ("dtype", lambda: ops.silu(X.to(LONG)), TypeError, "silu: x has dtype torch.int64.*float32"),
    ("complex", lambda: ops.gelu(X.to(COMPLEX)), TypeError, "gelu: x has dtype torch.complex64"),
    ("fp8", lambda: ops.sigmoid(X.to(FP8)), TypeError, "sigmoid: x has dtype torch.float8"),
    ("slope", lambda: ops.xielu(X, VECTOR, r(1)), ValueError, r"xielu: alpha_p has shape \(8,\); it must be \[1\]"),
    ("cut above 0", lambda: ops.xielu(X, r(1), r(1), eps=0.1), ValueError, "xielu: eps is 0.1"),
    ("bool", lambda: ops.relu_squared(X > 0), TypeError, "relu_squared: x has dtype torch.bool"),
    ("approximate", lambda: ops.gelu(X, "erf"), ValueError, "gelu: approximate is 'erf'; it must be 'none' or 'tanh'"),
    ("pair shape", lambda: ops.swiglu(X, r(1, 5, 8)), ValueError, "swiglu: up has shape"),
    ("pair dtype", lambda: ops.geglu(X, X.to(HALF)), TypeError, "geglu: up has dtype torch.bfloat16, gate has"),
    ("pair device", lambda: ops.swiglu(X, X.to("meta")), ValueError, "swiglu: up is on meta"),
    ("geglu", lambda: ops.geglu(X, X, "fast"), ValueError, "geglu: approximate is 'fast'"),
    ("add", lambda: ops.fused_add_relu(X, r(8)), ValueError, "add_relu: y has shape"),
    ("bias", lambda: ops.fused_bias_gelu(X, r(1)), ValueError, "bias_gelu: bias has shape"),
    ("bias fp8", lambda: ops.bias_gelu(X, VECTOR.to(FP8)), TypeError, "bias_gelu: bias has dtype"),
    ("p", lambda: ops.fused_bias_dropout(X, VECTOR, 1.5), ValueError, "bias_dropout: p must be in"),
    ("p negative", lambda: ops.bias_dropout(X, VECTOR, -0.1), ValueError, "bias_dropout: p must be in"),
    ("p string", lambda: ops.bias_dropout(X, VECTOR, "0.5"), TypeError, "bias_dropout: p must be a number.*'0.5'"),
    ("p bool", lambda: ops.bias_dropout(X, VECTOR, True), TypeError, "bias_dropout: p must be a number"),
    ("training", lambda: ops.bias_dropout(X, VECTOR, 0.5, "no"), TypeError, "bias_dropout: training must be True or"),
    ("draws nothing", lambda: ops.bias_dropout(X, r(7), 0.5), ValueError, "bias_dropout: bias has shape"),
    ("seed dtype", lambda: ops.bias_dropout(X, None, seed=SEED.int()), ValueError, "bias_dropout: seed must be int64"),
    ("seed size", lambda: ops.softmax_dropout(X, 0.5, seed=SEED[:1]), ValueError, "softmax_dropout: seed must be"),
    (
        "seed device",
        lambda: ops.bias_dropout(X, None, seed=SEED.to("meta")),
        ValueError,
        "bias_dropout: seed is on meta, x on cpu",
    ),
    (
        "residual",
        lambda: ops.bias_dropout_residual(X, r(5, 8)),
        ValueError,
        r"bias_dropout_residual: residual has shape \(5, 8\)",
    ),
]

PROBABILITIES = [
    ("dtype", lambda: ops.softmax(X.to(LONG)), TypeError, "softmax: x has dtype"),
    ("rank", lambda: ops.softmax(r()), ValueError, r"softmax: x has shape \(\)"),
    ("causal", lambda: ops.softmax(r(5), causal=True), ValueError, "softmax: x has shape.*causal"),
    ("p", lambda: ops.softmax_dropout(X, 1.0), ValueError, r"softmax_dropout: p must be in \[0, 1\)"),
    ("shape after p", lambda: ops.softmax_dropout(r(5), 0.5, causal=True), ValueError, "softmax_dropout: x has shape"),
    ("weights lse", lambda: ops.attention_weights(Q, K, r(2, 4, 5)), ValueError, "attention_weights: lse must be"),
    ("weights scale", lambda: ops.attention_weights(Q, K, r(2, 4, 6), NAN), ValueError, "attention_weights: scale"),
    ("weights dtype", lambda: ops.attention_weights(Q, K, r(2, 4, 6).half()), TypeError, "attention_weights: lse has"),
    ("stats heads", lambda: ops.attention_stats(Q, r(2, 3, 6, 8)), ValueError, "attention_stats: k has 3 heads"),
    ("stats rank", lambda: ops.attention_stats(Q, K[0]), ValueError, "attention_stats: k must be"),
]

ROTARY = [
    ("rank", lambda: ops.rope(Q[0], None, COS, SIN), ValueError, r"rope: q has shape \(4, 6, 8\)"),
    ("k size", lambda: ops.rope(Q, r(2, 2, 7, 8), COS, SIN), ValueError, "rope: k has shape"),
    ("k dtype", lambda: ops.rope(Q, K.half(), COS, SIN), TypeError, "rope: k has dtype torch.float16"),
    ("fp8", lambda: ops.rope(Q.to(FP8), None, COS, SIN), TypeError, "rope: q has dtype torch.float8"),
    ("angles", lambda: ops.rope(Q, K, r(16, 5), r(16, 5)), ValueError, "rope: cos has 5 angles"),
    ("sin", lambda: ops.rope(Q, K, COS, SIN[:4]), ValueError, "rope: sin is"),
    ("table", lambda: ops.rope(Q, K, COS[:5], SIN[:5]), ValueError, "rope: cos holds 5 positions"),
    ("offset", lambda: ops.rope(Q, K, COS, SIN, offset=-1), ValueError, "rope: offset is -1"),
    ("offset end", lambda: ops.rope(Q, K, COS, SIN, offset=11), ValueError, "rope: cos holds 16 positions.*offset 11"),
    ("positions", lambda: ops.rope(Q, K, COS, SIN, r(6)), TypeError, "rope: positions has dtype"),
    ("positions size", lambda: ops.rope(Q, K, COS, SIN, ids(5)), ValueError, "rope: positions has shape"),
    (
        "position above",
        lambda: ops.rope(Q, K, COS, SIN, torch.full((6,), 16)),
        ValueError,
        "rope: one of positions is 16; cos holds the positions 0 … 15",
    ),
    (
        "offsets above",
        lambda: ops.rope(Q, K, COS, SIN, offsets=torch.tensor([0, 12])),
        ValueError,
        "rope: a position with offsets is 16; cos holds",
    ),
    (
        "both position above",
        lambda: ops.rms_norm_rope(Q, K, None, None, COS, SIN, torch.full((6,), 99)),
        ValueError,
        "rms_norm_rope: one of positions is 99",
    ),
    (
        "documents",
        lambda: ops.rope(Q[:1], K[:1], COS, SIN, cu_seqlens=torch.tensor([2, 6])),
        ValueError,
        "rope: cu_seqlens holds",
    ),
    ("device", lambda: ops.rope(Q, K, COS.to("meta"), SIN), ValueError, "rope: cos is on meta"),
    (
        "cu_seqlens batch",
        lambda: ops.rope(Q, K, COS, SIN, cu_seqlens=torch.tensor([0, 6])),
        ValueError,
        "rope: cu_seqlens is given with a batch of 2",
    ),
    ("both name the op", lambda: ops.rms_norm_rope(Q[0], None, None, None, COS, SIN), ValueError, "rms_norm_rope: q"),
    ("both angles", lambda: ops.rms_norm_rope(Q, K, None, None, r(16, 5), r(16, 5)), ValueError, "rms_norm_rope: cos"),
    ("q_weight", lambda: ops.rms_norm_rope(Q, K, r(7), None, COS, SIN), ValueError, "rms_norm_rope: q_weight has"),
    (
        "norm_dim",
        lambda: ops.rms_norm_rope(Q, K, None, None, COS, SIN, norm_dim="all"),
        ValueError,
        "rms_norm_rope: norm_dim is 'all'; it must be 'head' or 'row'",
    ),
]

PRODUCTS = [
    ("inner", lambda: ops.linear(X, r(11, 7)), ValueError, r"linear: weight has shape \(11, 7\)"),
    ("dtype", lambda: ops.linear(X.to(LONG), W), TypeError, "linear: x has dtype"),
    ("bias", lambda: ops.fused_linear_forward(X, W, r(1)), ValueError, "fused_linear_forward: bias has shape"),
    ("activation", lambda: ops.linear_act(X, W, None, "relu6"), ValueError, "linear_act: activation is 'relu6'"),
    ("lora_a", lambda: ops.lora_linear(X, W, r(2, 7), r(W.shape[0], 2)), ValueError, "lora_linear: lora_a has shape"),
    ("lora_b", lambda: ops.lora_linear(X, W, r(2, 8), r(5, 3)), ValueError, "lora_linear: lora_b has shape"),
    ("lora dtype", lambda: ops.lora_linear(X, W, ids(2), r(11, 2)), TypeError, "lora_linear: lora_a has dtype"),
    (
        "lora bias",
        lambda: ops.lora_linear(X, None, r(2, 8), r(5, 2), r(5)),
        ValueError,
        "lora_linear: bias is given without a weight",
    ),
    ("lora weight", lambda: ops.lora_linear(X, W[0], r(2, 8), r(5, 2)), ValueError, "lora_linear: weight has shape"),
    ("sums of ints", lambda: ops.column_sums(X.to(LONG)), TypeError, "column_sums: x has dtype torch.int64"),
    ("sums of a scalar", lambda: ops.column_sums(r()), ValueError, "column_sums: x has no dims"),
    ("sums to ints", lambda: ops.column_sums(X, "int32"), ValueError, "column_sums: dtype is 'int32'; it must be"),
    ("matmul vector", lambda: ops.matmul(X, r(8)), ValueError, "matmul: b has shape"),
    ("matmul dtype", lambda: ops.matmul(X, W.T.half()), TypeError, "matmul: b has dtype"),
    ("norm_linear", lambda: ops.norm_linear(X, W, norm_weight=r(7)), ValueError, "norm_linear: norm_weight has"),
    ("norm kind", lambda: ops.norm_linear(X, W, kind="batch"), ValueError, "norm_linear: kind is 'batch'"),
    ("norm eps", lambda: ops.norm_linear(X, W, eps=NAN), ValueError, "norm_linear: eps is nan"),
    (
        "chunk_rows",
        lambda: ops.memory_efficient_linear(X, W, chunk_rows=-1),
        ValueError,
        "memory_efficient_linear: chunk_rows is -1",
    ),
]


def attention(q=Q, k=K, v=V, *args, **named):
    return ops.attention(q, k, v, *args, **named)


TWO_BY_TWO = Blocks.of(torch.ones(1, 1, 2, 2, dtype=torch.bool), 2, 2)


def seen(**fields):
    return ops.Mask(**fields).materialize(6, 6)


ATTENTION = [
    ("rank", lambda: attention(Q[0]), ValueError, "attention: q must be"),
    (
        "heads",
        lambda: attention(k=r(2, 3, 6, 8), v=r(2, 3, 6, 8)),
        ValueError,
        "attention: k has 3 heads.*4 heads of q",
    ),
    ("head dim", lambda: attention(k=r(2, 2, 6, 9)), ValueError, "attention: k must have q's head dim 8, got 9"),
    (
        "keys",
        lambda: attention(v=r(2, 2, 7, 8)),
        ValueError,
        r"attention: v must be \[2, 2, 6, head dim\].*got \[2, 2, 7, 8\]",
    ),
    ("no heads", lambda: attention(q=Q[:, :0], k=K[:, :0], v=V[:, :0]), ValueError, "at least one head, got 0 and 0"),
    ("batch", lambda: attention(k=K[:1], v=V[:1]), ValueError, "attention: k must have q's batch size"),
    ("dtypes", lambda: attention(k=K.half()), TypeError, "attention: k has dtype torch.float16"),
    ("integers", lambda: attention(q=Q.to(LONG)), TypeError, "attention: q has dtype torch.int64"),
    ("q fp8", lambda: attention(q=Q.to(FP8)), TypeError, "attention: q has dtype torch.float8_e4m3fn; give q_scale wi"),
    ("nested", lambda: attention(NESTED, NESTED, NESTED), TypeError, "attention: q is a nested tensor"),
    ("nested keys", lambda: attention(k=NESTED), TypeError, "attention: k is a nested tensor"),
    ("device", lambda: attention(k=K.to("meta")), ValueError, "attention: k is on meta, q on cpu"),
    ("scale nan", lambda: attention(score=ops.Score(scale=NAN)), ValueError, "Score: scale must be finite"),
    (
        "scale 0",
        lambda: attention(score=ops.Score(scale=0.0)),
        ValueError,
        "attention: scale must be a positive number",
    ),
    (
        "scale string",
        lambda: attention(score=ops.Score(scale="1")),
        TypeError,
        "Score: scale must be a number, got '1'",
    ),
    ("softcap", lambda: attention(score=ops.Score(softcap=-1.0)), ValueError, "Score: softcap must be at least 0.0"),
    ("softcap None", lambda: attention(score=ops.Score(softcap=None)), TypeError, "Score: softcap must be a number"),
    ("bias list", lambda: attention(score=ops.Score(bias=[1.0])), TypeError, "Score: bias must be a tensor, got list"),
    ("bias shape", lambda: attention(score=ops.Score(bias=r(6, 5))), ValueError, "attention: bias must be"),
    ("alibi", lambda: attention(score=ops.Score(alibi=r(3))), ValueError, "attention: alibi must be"),
    ("alibi fp8", lambda: attention(score=ops.Score(alibi=r(4).to(FP8))), TypeError, "attention: alibi has dtype"),
    ("window", lambda: attention(mask=ops.Mask(window=-2)), ValueError, "attention: window_left must be -1"),
    (
        "window right",
        lambda: attention(mask=ops.Mask(window=(0, -3))),
        ValueError,
        "attention: window_right must be -1",
    ),
    ("window three", lambda: attention(mask=ops.Mask(window=(1, 2, 3))), TypeError, "Mask: window must be an int or"),
    ("window float", lambda: attention(mask=ops.Mask(window=1.5)), TypeError, "Mask: window must be an int or a pair"),
    ("causal", lambda: attention(mask=ops.Mask(causal="yes")), TypeError, "Mask: causal must be True or False"),
    ("dense dtype", lambda: attention(mask=ops.Mask(dense=r(6, 6))), TypeError, "attention: mask must be torch.bool"),
    ("dense list", lambda: attention(mask=ops.Mask(dense=[[True]])), TypeError, "Mask: dense must be a tensor"),
    ("prefix", lambda: attention(mask=ops.Mask(prefix=ids(2))), TypeError, "attention: prefix_lengths must be int32"),
    ("prefix int", lambda: attention(mask=ops.Mask(prefix=3)), TypeError, "Mask: prefix must be a tensor, got 3"),
    ("documents", lambda: attention(mask=ops.Mask(documents=ids(2, 5).int())), ValueError, "attention: q_documents"),
    ("documents list", lambda: attention(mask=ops.Mask(documents=[SEED])), ValueError, "Mask: documents must be"),
    ("documents three", lambda: attention(mask=ops.Mask(documents=(SEED,) * 3)), ValueError, "Mask: documents must be"),
    ("blocks", lambda: attention(mask=ops.Mask(blocks=(SEED, SEED))), TypeError, "Mask: blocks must be Blocks"),
    ("seen tokens", lambda: ops.Mask().materialize(-1, 3), ValueError, "Mask.materialize: tokens must be at least 0"),
    ("seen keys", lambda: ops.Mask().materialize(3, 2.5), TypeError, "Mask.materialize: keys must be an int, got 2.5"),
    (
        "seen heads",
        lambda: seen(dense=torch.ones(1, 2, 6, 6) > 0),
        ValueError,
        "^Mask.materialize: mask must be .1, 1, 6",
    ),
    ("seen dense", lambda: seen(dense=torch.ones(6, 5) > 0), ValueError, "Mask.materialize: mask must be"),
    ("seen floats", lambda: seen(dense=torch.ones(6, 6)), TypeError, "Mask.materialize: mask must be torch.bool"),
    ("seen prefix", lambda: seen(prefix=PAGES[0]), ValueError, "Mask.materialize: prefix_lengths must be .1., got .2."),
    ("seen window", lambda: seen(window=-3), ValueError, "Mask.materialize: window_left must be -1"),
    ("seen lists", lambda: seen(blocks=TWO_BY_TWO), ValueError, "Mask.materialize: block_offsets must be"),
    (
        "seen starts",
        lambda: ops.Mask().materialize(6, 6, cu_seqlens_q=STARTS),
        ValueError,
        "Mask.materialize: with cu_seqlens_q give either cu_seqlens_k",
    ),
    (
        "seen order",
        lambda: ops.Mask().materialize(6, 6, cu_seqlens_q=STARTS.flip(0), cu_seqlens_k=STARTS),
        ValueError,
        "Mask.materialize: cu_seqlens_q holds .6, 3, 0.",
    ),
    ("seen lengths", lambda: ops.Mask().materialize(6, 6, kv_lengths=[3]), TypeError, "kv_lengths must be a tensor"),
    ("seen device", lambda: ops.Mask().materialize(6, 6, device="gpu"), ValueError, "device must be a torch.device"),
    (
        "added tokens",
        lambda: ops.Score().materialize(-1, 3),
        ValueError,
        "Score.materialize: tokens must be at least 0",
    ),
    ("added bias", lambda: ops.Score(bias=r(6, 5)).materialize(6, 6), ValueError, "Score.materialize: bias must be"),
    ("added heads", lambda: ops.Score(alibi=r(3), bias=r(2, 1, 1)).materialize(6, 6), ValueError, "bias must be"),
    ("added list", lambda: ops.Score(alibi=[0.1]).materialize(6, 6), TypeError, "Score: alibi must be a tensor"),
    (
        "added dims",
        lambda: ops.Score(alibi=r(1, 2, 3)).materialize(6, 6),
        ValueError,
        "Score.materialize: alibi must be",
    ),
    ("not a mask", lambda: attention(mask=torch.ones(6, 6)), TypeError, "attention: mask must be a Mask, got Tensor"),
    ("not a score", lambda: attention(score=1.0), TypeError, "attention: score must be a Score, got float"),
    ("sinks", lambda: attention(sinks=r(2)), ValueError, "attention: sinks must be"),
    ("p", lambda: attention(dropout_p=1.0), ValueError, r"attention: dropout_p must be in \[0, 1\)"),
    ("p string", lambda: attention(dropout_p="x"), TypeError, "attention: dropout_p must be a number"),
    ("draws nothing", lambda: attention(k=r(2, 3, 6, 8), v=r(2, 3, 6, 8), dropout_p=0.5), ValueError, "k has 3 heads"),
    ("cu_seqlens_k", lambda: attention(cu_seqlens_k=ids(3).int()), ValueError, "attention: with cu_seqlens_q the"),
    ("kv_lengths", lambda: attention(kv_lengths=ids(3).int()), ValueError, "attention: kv_lengths must be"),
    ("kv_lengths long", lambda: attention(kv_lengths=ids(2)), TypeError, "attention: kv_lengths must be int32"),
    ("max_seqlen", lambda: attention(max_seqlen_q=-1), ValueError, "attention: max_seqlen_q must be"),
    ("q_scale", lambda: attention(q_scale=r(4)), ValueError, "attention: q_scale must be"),
    ("q_scale learned", lambda: attention(q_scale=LEARNED), ValueError, "attention: q_scale requires a gradient but"),
    (
        "alibi learned",
        lambda: attention(score=ops.Score(alibi=LEARNED[0, 0].expand(4))),
        ValueError,
        "attention: alibi requires a gradient but",
    ),
    ("page_table", lambda: attention(page_table=ids(2).int()), ValueError, "attention: page_table must be"),
    (
        "page",
        lambda: attention(page_table=PAGES),
        ValueError,
        "page_table holds 2 for slots 6 to 11 of row 1; the cache",
    ),
    (
        "page of a document",
        lambda: attention(Q[:1], cu_seqlens_q=STARTS, kv_lengths=PAGES[1], page_table=PAGES + 1),
        ValueError,
        "page_table holds 2 for slots 0 to 5 of row 1",
    ),
    (
        "block size",
        lambda: ops.attention.__globals__["attention_op"](Q, K, V, block_q=-1),
        ValueError,
        "attention: block_q must be 0",
    ),
    (
        "transposed lists alone",
        lambda: ops.attention.__globals__["attention_op"](
            Q, K, V, block_offsets_t=ids(1, 1, 2).int(), block_indices_t=ids(1).int(), block_q=64, block_k=64
        ),
        ValueError,
        "attention: block_offsets and block_indices go together",
    ),
    ("merge", lambda: ops.merge_attention(Q, r(2, 4, 5), Q, r(2, 4, 6)), ValueError, "merge_attention: lse_a must be"),
    (
        "merge device",
        lambda: ops.merge_attention(Q, r(2, 4, 6), Q, r(2, 4, 6).to("meta")),
        ValueError,
        "merge_attention: lse_b is on meta, out_a on cpu",
    ),
    (
        "accumulate",
        lambda: ops.accumulate_attention(Q, r(2, 4, 6), Q[:1], r(2, 4, 6)),
        ValueError,
        "accumulate_attention: out_a and out_b must be",
    ),
    (
        "accumulate expanded",
        lambda: ops.accumulate_attention(Q[:1].expand_as(Q), r(2, 4, 6), Q, r(2, 4, 6)),
        ValueError,
        "accumulate_attention: out_a is expanded",
    ),
    (
        "accumulate gradient",
        lambda: ops.accumulate_attention(Q.clone(), r(2, 4, 6).requires_grad_(), Q, r(2, 4, 6)),
        ValueError,
        "accumulate_attention: lse_a requires a gradient",
    ),
    ("copy rank", lambda: ops.copy_runs(Q[0], Q, Q, Q, [0, 0, 1]), ValueError, r"copy_runs: a has shape .* \[B, H, T"),
    ("copy heads", lambda: ops.copy_runs(Q, K, Q, K, [0, 0, 1]), ValueError, "copy_runs: b has shape .*; but for D"),
    (
        "copy D",
        lambda: ops.copy_runs(Q, Q, Q[..., :4], Q, [0, 0, 1]),
        ValueError,
        "copy_runs: into_a has shape",
    ),
    ("copy dtype", lambda: ops.copy_runs(Q, Q, Q, Q.half(), [0, 0, 1]), TypeError, "copy_runs: into_b has dtype"),
    ("copy numbers", lambda: ops.copy_runs(Q, Q, Q, Q, [0, 0]), ValueError, "copy_runs: runs has 2 numbers"),
    (
        "copy source",
        lambda: ops.copy_runs(Q, Q, Q, Q, [4, 0, 3]),
        ValueError,
        "a run of 3 tokens from 4 on of a",
    ),
    ("copy place", lambda: ops.copy_runs(Q, Q, Q, Q, [0, -1, 3]), ValueError, "run of 3 tokens from -1 on of into_a"),
    ("copy twice", lambda: ops.copy_runs(Q, Q, Q, Q, [0, 0, 2, 3, 1, 2]), ValueError, "copy_runs: runs .* overlap"),
    (
        "copy expanded",
        lambda: ops.copy_runs(Q, Q, Q, Q[:, :1].expand_as(Q), [0, 0, 1]),
        ValueError,
        "copy_runs: into_b is expanded",
    ),
    (
        "copy device",
        lambda: ops.copy_runs(Q, Q, Q, Q.to("meta"), [0, 0, 1]),
        ValueError,
        "copy_runs: into_b is on meta, a on cpu",
    ),
    (
        "copy gradient",
        lambda: ops.copy_runs(Q.clone().requires_grad_(), Q, Q, Q, [0, 0, 1]),
        ValueError,
        "copy_runs: a requires a gradient",
    ),
    ("add tokens", lambda: ops.add_runs(Q, Q, Q, Q, Q[:, :, :3], Q, []), ValueError, "add_runs: into_b has 6 tokens"),
    ("add more", lambda: ops.add_runs(Q, Q, Q, Q[:, :, :3], Q, Q, []), ValueError, "add_runs: more_b has 3 tokens"),
    ("add ints", lambda: ops.add_runs(Q.long(), Q, Q, Q, Q, Q, []), TypeError, "add_runs: a has dtype torch.int64"),
    (
        "add fp8",
        lambda: ops.add_runs(Q, Q, Q.to(FP8), Q, Q, Q, []),
        TypeError,
        "add_runs: more_a has dtype torch.float8",
    ),
    ("add place", lambda: ops.add_runs(Q, Q, Q, Q, Q, Q, [0, 5, 2]), ValueError, "run of 2 tokens from 5 on of a,"),
    (
        "partial of 8 bits",
        lambda: ops.attention_partial(*[Q.to(torch.float8_e4m3fn)] * 3),
        TypeError,
        "attention_partial: q has dtype torch.float8_e4m3fn; 8-bit values",
    ),
    ("partial", lambda: ops.attention_partial(Q, K, V, scale=-1.0), ValueError, "attention: scale must be"),
    ("forward", lambda: ops.flash_attention_forward(Q, K, V[:1]), ValueError, "flash_attention_forward: v must be"),
    (
        "forward causal",
        lambda: ops.flash_attention_forward(Q, K, V, None, "x"),
        TypeError,
        "flash_attention_forward: causal must be",
    ),
    (
        "backward",
        lambda: ops.flash_attention_backward(Q, K, V, Q, r(2, 4, 6), [1.0]),
        TypeError,
        "flash_attention_backward: dout must be a tensor, got list",
    ),
    (
        "backward lse",
        lambda: ops.flash_attention_backward(Q, K, V, Q, r(2, 4, 5), Q),
        ValueError,
        "flash_attention_backward: lse must be",
    ),
    ("heads packed", lambda: ops.memory_efficient_attention(X, X, X, 3), ValueError, "num_heads is 3, which does not"),
    ("heads 0", lambda: ops.memory_efficient_attention(X, X, X, 0), ValueError, "num_heads must be at least 1, got 0"),
    ("heads float", lambda: ops.memory_efficient_attention(X, X, X, 2.0), TypeError, "num_heads must be an int, got 2"),
    ("packed rank", lambda: ops.memory_efficient_attention(X[0], X, X, 2), ValueError, "query must be"),
    (
        "packed list",
        lambda: ops.memory_efficient_attention(X, [1.0], X, 2),
        TypeError,
        "key must be a tensor, got list",
    ),
    ("packed dtype", lambda: ops.memory_efficient_attention(X, X.half(), X, 2), TypeError, "key has dtype"),
    ("packed device", lambda: ops.memory_efficient_attention(X, X, X.to("meta"), 2), ValueError, "value is on meta"),
    ("packed tokens", lambda: ops.memory_efficient_attention(X, X, r(2, 6, 8), 2), ValueError, "value must have key's"),
    ("packed p", lambda: ops.memory_efficient_attention(X, X, X, 2, 1.0), ValueError, "dropout_p must be in"),
    ("packed causal", lambda: ops.memory_efficient_attention(X, X, X, 2, 0.0, 1), TypeError, "is_causal must be True"),
]

LOSSES = [
    (
        "labels above",
        lambda: ops.cross_entropy(r(3, 4), torch.tensor([0, 4, 1])),
        ValueError,
        "target holds the label 4",
    ),
    (
        "labels below",
        lambda: ops.cross_entropy(r(2, 4), torch.tensor([0, -1])),
        ValueError,
        "target holds the label -1",
    ),
    ("linear labels", lambda: ops.linear_cross_entropy(X, W, LABELS + 20), ValueError, "target holds the label"),
    ("probabilities", lambda: ops.cross_entropy(r(3, 4), r(3)), TypeError, "cross_entropy: target has dtype"),
    ("target shape", lambda: ops.cross_entropy(r(3, 4), ids(4)), ValueError, "cross_entropy: target has shape"),
    ("target device", lambda: ops.cross_entropy(r(3, 4), ids(3).to("meta")), ValueError, "target is on meta"),
    ("integer logits", lambda: ops.cross_entropy(ids(3, 4), ids(3)), TypeError, "cross_entropy: logits has dtype"),
    ("fp8 logits", lambda: ops.cross_entropy(r(3, 4).to(FP8), ids(3)), TypeError, "cross_entropy: logits has dtype"),
    ("no classes", lambda: ops.cross_entropy(r(3, 0), ids(3)), ValueError, "cross_entropy: logits has shape"),
    (
        "smoothing",
        lambda: ops.cross_entropy(r(3, 11), ids(3), label_smoothing=1.5),
        ValueError,
        "label_smoothing is 1.5",
    ),
    ("smoothing nan", lambda: ops.cross_entropy(r(3, 11), ids(3), label_smoothing=NAN), ValueError, "label_smoothing"),
    ("z_loss", lambda: ops.cross_entropy(r(3, 11), ids(3), z_loss=-1.0), ValueError, "cross_entropy: z_loss is -1"),
    ("softcap", lambda: ops.cross_entropy(r(3, 11), ids(3), softcap=-1.0), ValueError, "cross_entropy: softcap is -1"),
    (
        "reduction",
        lambda: ops.cross_entropy(r(3, 11), ids(3), reduction=""),
        ValueError,
        "cross_entropy: reduction is ''",
    ),
    ("class weight", lambda: ops.cross_entropy(r(3, 11), ids(3), r(10)), ValueError, "cross_entropy: weight has shape"),
    (
        "class weight grad",
        lambda: ops.cross_entropy(r(3, 11), ids(3), r(11).requires_grad_()),
        ValueError,
        "cross_entropy: weight requires a gradient",
    ),
    (
        "linear weight",
        lambda: ops.linear_cross_entropy(X, r(11, 7), LABELS),
        ValueError,
        "linear_cross_entropy: weight",
    ),
    ("linear bias", lambda: ops.linear_cross_entropy(X, W, LABELS, r(10)), ValueError, "linear_cross_entropy: bias"),
    ("linear rank", lambda: ops.linear_cross_entropy(r(), W, LABELS), ValueError, "linear_cross_entropy: x has shape"),
    (
        "linear meta",
        lambda: ops.linear_cross_entropy(X, W.to("meta"), LABELS),
        ValueError,
        "weight is on meta, x on cpu",
    ),
    ("chunk", lambda: ops.linear_cross_entropy(X, W, LABELS, chunk_tokens=-1), ValueError, "chunk_tokens is -1"),
    ("mode", lambda: ops.linear_cross_entropy(X, W, LABELS, mode="fast"), ValueError, "mode is 'fast'"),
    ("kl shape", lambda: ops.kl_div(X, r(2, 5, 7)), ValueError, "kl_div: target has shape"),
    ("kl fp8", lambda: ops.kl_div(X, X.to(FP8)), TypeError, "kl_div: target has dtype"),
    ("kl reduction", lambda: ops.kl_div(X, X, "average"), ValueError, "kl_div: reduction is 'average'"),
    ("jsd beta", lambda: ops.jsd(X, X, beta=2.0), ValueError, "jsd: beta is 2.0"),
    ("tvd labels", lambda: ops.tvd(X, X, ids(5)), ValueError, "tvd: labels has shape"),
    ("tvd grad_mask", lambda: ops.tvd(X, X, grad_mask=(True,)), ValueError, "tvd: grad_mask is"),
    (
        "teacher",
        lambda: ops.linear_distillation(X, W, r(2, 4, 8), W),
        ValueError,
        r"linear_distillation: teacher has shape \(2, 4, 8\)",
    ),
    ("divergence", lambda: nn.distillation_loss(X, W, X, W, divergence="l2"), ValueError, "divergence is 'l2'"),
    ("teacher list", lambda: nn.distillation_loss(X, W, [1.0], W), TypeError, "distillation_loss: teacher must be a"),
    (
        "chunk_size",
        lambda: nn.distillation_loss(X, W, X, W, chunk_size=-1),
        ValueError,
        "chunk_size must be at least 0",
    ),
    ("KLDivLoss", lambda: nn.KLDivLoss(reduction="avg"), ValueError, "KLDivLoss: reduction must be one of"),
    ("JSD", lambda: nn.JSD(beta=-0.5), ValueError, "JSD: beta must be between"),
    ("TVDLoss", lambda: nn.TVDLoss(reduction=None), ValueError, "TVDLoss: reduction must be one of"),
    ("temperature", lambda: nn.FusedLinearJSD(temperature=0.0), ValueError, "temperature must be above 0"),
    ("hard weight", lambda: nn.FusedLinearDistillationLoss(NAN), ValueError, "weight_hard_loss must be finite"),
    ("odd pairs", lambda: nn.preference_loss(r(3, 5, 8), W, ids(3, 5)), ValueError, "target has shape"),
    (
        "loss_type",
        lambda: nn.preference_loss(r(4, 5, 8), W, ids(4, 5), loss_type="dpo"),
        ValueError,
        "loss_type must be one of .* got 'dpo'",
    ),
    ("ref", lambda: nn.preference_loss(r(4, 5, 8), W, ids(4, 5), ref_logps=r(1)), ValueError, "ref_logps must be"),
    (
        "odds of a reference",
        lambda: nn.preference_loss(r(4, 5, 8), W, ids(4, 5), loss_type="odds_ratio", ref_logps=r(4)),
        ValueError,
        "ref_logps was given, and loss_type is 'odds_ratio'",
    ),
    ("beta", lambda: nn.preference_loss(r(4, 5, 8), W, ids(4, 5), beta=NAN), ValueError, "beta must be finite"),
    ("kto", lambda: nn.kto_loss(r(4, 5, 8), W, ids(4, 5), None), TypeError, "preference_labels"),
    ("kto size", lambda: nn.kto_loss(r(4, 5, 8), W, ids(4, 5), r(1) > 0), ValueError, "preference_labels must be"),
    (
        "advantages",
        lambda: nn.grpo_loss(r(4, 5, 8), W, ids(4, 5), torch.ones(4, 5), r(1)),
        ValueError,
        "grpo_loss: advantages must be",
    ),
    (
        "grpo mask",
        lambda: nn.grpo_loss(r(4, 5, 8), W, ids(4, 5), torch.ones(4, 1), r(4)),
        ValueError,
        "grpo_loss: attention_mask must be",
    ),
    (
        "grpo temperature",
        lambda: nn.grpo_loss(r(4, 5, 8), W, ids(4, 5), torch.ones(4, 5), r(4), temperature=0.0),
        ValueError,
        "grpo_loss: temperature must be above 0",
    ),
]

DOOR = [
    ("rank", lambda: fa.flash_attention_forward(Q[0], K, V), ValueError, "flash_attention_forward: Q must be"),
    ("none", lambda: fa.flash_attention_forward(Q, None, V), TypeError, "K must be a tensor, got None"),
    ("heads", lambda: fa.flash_attention_forward(Q, r(2, 3, 6, 8), V), ValueError, "K has 3 heads.* 4 heads of Q"),
    ("dtypes", lambda: fa.flash_attention_forward(Q, K, V.half()), TypeError, "V has dtype torch.float16"),
    ("devices", lambda: fa.flash_attention_forward(Q, K.to("meta"), V), ValueError, "K is on meta, Q on cpu"),
    ("tile", lambda: fa.flash_attention_forward(Q, K, V, 48), ValueError, "Bc must be a power of two"),
    ("tile type", lambda: fa.flash_attention_forward(Q, K, V, 32, "32"), ValueError, "Br must be a power of two"),
    ("half", lambda: fa.flash_attention_forward(Q, K, V, use_half="no"), TypeError, "use_half must be True or False"),
    ("stats", lambda: fa.flash_attention_forward_with_stats(Q, K, r(2, 2, 5, 8)), ValueError, "V must be"),
    (
        "backward l",
        lambda: fa.flash_attention_backward(Q, K, V, Q, Q, r(2, 4, 5), r(2, 4, 6)),
        ValueError,
        "flash_attention_backward: l must be",
    ),
    (
        "backward dO",
        lambda: fa.flash_attention_backward(Q, K, V, Q, Q.half(), r(2, 4, 6), r(2, 4, 6)),
        TypeError,
        "flash_attention_backward: dO has dtype",
    ),
    ("module tile", lambda: fa.FlashAttention(bc=0), ValueError, "bc must be a power of two"),
    ("module heads", lambda: fa.FlashAttention(num_heads=0), ValueError, "num_heads must be at least 1"),
    ("module width", lambda: fa.FlashAttention(num_heads=3)(X, X, X), ValueError, "num_heads is 3.*width of Q"),
    ("sizes", lambda: fa.get_optimal_block_sizes(0, 64), ValueError, "sequence_length must be at least 1"),
    ("sizes type", lambda: fa.get_optimal_block_sizes(128, "64"), TypeError, "head_dim must be an int, got '64'"),
    ("memory", lambda: fa.estimate_memory_usage(1, 2, -3, 4), ValueError, "seq_len must be at least 1, got -3"),
    ("memory float", lambda: fa.estimate_memory_usage(1.5, 2, 3, 4), TypeError, "batch_size must be an int, got 1.5"),
]

DECODER = nn.DecoderConfig(11, 8, 16, 1, 2, 1, max_positions=16)


def decoder():
    with torch.random.fork_rng():
        return nn.Decoder(DECODER)


ATTENTION_LAYER = nn.Attention(8, 4)


def cached(dtype=torch.float32, layer=0):
    """Attention with a cache, which stays as it was."""
    cache = KVCache.empty(2, 2, 4, 9, 2, dtype=dtype)
    cache.keys.zero_()
    try:
        with torch.no_grad():
            ATTENTION_LAYER(X, nn.RotaryEmbedding(2, 16), cache=cache, layer=layer)
    finally:
        assert not cache.keys.any()


SMALL = decoder()
LAYER = core.AttentionLayer(8, 2)
LAYERS = [
    ("heads", lambda: core.AttentionLayer(8, 3), ValueError, "num_heads is 3, which does not divide d_model, 8"),
    ("dropout", lambda: core.AttentionLayer(8, 2, 1.0), ValueError, r"dropout must be in \[0, 1\)"),
    ("d_model", lambda: core.AttentionLayer("8", 2), TypeError, "d_model must be an int, got '8'"),
    ("input", lambda: LAYER(r(2, 5, 7)), ValueError, "x must be"),
    ("mask", lambda: LAYER(X, torch.ones(2, 4)), ValueError, "attention_mask must be"),
    ("mask list", lambda: LAYER(X, [1, 1]), TypeError, "attention_mask must be a tensor, got list"),
    ("mask device", lambda: LAYER(X, torch.ones(2, 5, device="meta")), ValueError, "attention_mask is on meta"),
    ("level", lambda: core.OptimizedLinear(8, 3, optimization_level="max"), ValueError, "optimization_level is 'max'"),
    ("features", lambda: core.OptimizedLinear(-8, 3), ValueError, "in_features must be at least 0, got -8"),
    ("gelu", lambda: core.FusedGELU(approximate="erf"), ValueError, "approximate is 'erf'"),
    ("kv heads", lambda: nn.Attention(8, 4, 3), ValueError, "num_kv_heads is 3, which does not divide num_heads, 4"),
    ("kv heads 0", lambda: nn.Attention(8, 4, 0), ValueError, "num_kv_heads must be at least 1, got 0"),
    ("window", lambda: nn.Attention(8, 4, window=-1), ValueError, "window must be at least 0, got -1"),
    ("scale", lambda: nn.Attention(8, 4, scale=NAN), ValueError, "scale must be finite"),
    (
        "no rotary",
        lambda: ATTENTION_LAYER(X, None),
        TypeError,
        "Attention: rotary must be a RotaryEmbedding, got None",
    ),
    ("layer", lambda: cached(layer=2), ValueError, "Attention: layer is 2; the cache has layers 0 to 1"),
    ("layer below 0", lambda: cached(layer=-1), ValueError, "Attention: layer must be at least 0, got -1"),
    ("layer string", lambda: cached(layer="0"), TypeError, "Attention: layer must be an int, got '0'"),
    ("cache dtype", lambda: cached(HALF), TypeError, "Attention: cache has dtype torch.bfloat16, q torch.float32"),
    ("attention dropout", lambda: nn.Attention(8, 4, dropout=1.5), ValueError, "dropout must be in"),
    ("norm", lambda: nn.RMSNorm(0), ValueError, "dim must be at least 1, got 0"),
    ("norm eps", lambda: nn.RMSNorm(8, NAN), ValueError, "eps must be finite"),
    ("norm casting", lambda: nn.RMSNorm(8, casting="bf16"), ValueError, "casting must be one of"),
    ("layer norm", lambda: nn.LayerNorm(8, "1"), TypeError, "eps must be a number, got '1'"),
    ("mlp", lambda: nn.GatedMLP(8, 4, "relu"), ValueError, "activation must be one of.*got 'relu'"),
    ("mlp size", lambda: nn.GatedMLP(8, 4.0), TypeError, "intermediate_size must be an int"),
    ("rotary", lambda: nn.RotaryEmbedding(5, 8), ValueError, "dim is 5"),
    ("rotary theta", lambda: nn.RotaryEmbedding(4, 8, 0.0), ValueError, "theta must be above 0"),
    ("rotary scaling", lambda: nn.RotaryEmbedding(4, 8, scaling=2.0), TypeError, "scaling must be a Llama3Scaling"),
    ("cache", lambda: KVCache.empty(1, 2, 1, -4, 8), ValueError, "slots must be at least 0, got -4"),
    ("config", lambda: nn.DecoderConfig(11, 8, 16, 1, 0), ValueError, "num_heads must be at least 1, got 0"),
    (
        "config p",
        lambda: nn.DecoderConfig(11, 8, 16, 1, 2, hidden_dropout=1.0),
        ValueError,
        "hidden_dropout must be in",
    ),
    ("slots", lambda: SMALL.new_cache(2, 17), ValueError, "slots is 17"),
    ("tokens", lambda: SMALL(r(2, 5)), TypeError, "tokens has dtype torch.float32"),
    ("tokens rank", lambda: SMALL(ids(5)), ValueError, "tokens must be"),
    ("too long", lambda: SMALL(ids(1, 17)), ValueError, "tokens has 17 tokens a row; max_positions is 16"),
    ("not a cache", lambda: SMALL(LABELS, cache=[1]), TypeError, "cache must be a KVCache"),
    ("prompt", lambda: nn.generate(SMALL, LABELS[:, :0], 3), ValueError, "prompt has no tokens"),
    ("prompt list", lambda: nn.generate(SMALL, [1, 2], 3), TypeError, "prompt must be a tensor, got list"),
    ("new tokens", lambda: nn.generate(SMALL, LABELS, -1), ValueError, "max_new_tokens must be at least 0, got -1"),
    ("positions", lambda: nn.generate(SMALL, LABELS, 12), ValueError, "max_new_tokens = 12"),
    (
        "temperature",
        lambda: nn.generate(SMALL, LABELS, 2, temperature=-1.0),
        ValueError,
        "temperature must be at least",
    ),
    ("top_k", lambda: nn.generate(SMALL, LABELS, 2, temperature=1.0, top_k=0), ValueError, "top_k must be at least 1"),
    (
        "lengths",
        lambda: nn.generate(SMALL, LABELS, 2, prompt_lengths=ids(3).int()),
        ValueError,
        "prompt_lengths must be",
    ),
    (
        "KernelConfig heads",
        lambda: tilesmith.KernelConfig(num_attention_heads=3),
        ValueError,
        "KernelConfig: num_attention_heads is 3, which does not divide",
    ),
    ("KernelConfig size", lambda: tilesmith.KernelConfig(hidden_size="8"), TypeError, "hidden_size must be an int"),
    ("KernelConfig p", lambda: tilesmith.KernelConfig(hidden_dropout_prob=1.0), ValueError, "hidden_dropout_prob must"),
    ("MemoryConfig", lambda: tilesmith.MemoryConfig(1.0, 2.0), ValueError, "min_memory_gb is 2.0"),
    ("MemoryConfig type", lambda: tilesmith.MemoryConfig("4"), TypeError, "max_memory_gb must be a number of GB"),
]


def pinned(**pins):
    with use(**pins):
        return ops.rms_norm(X, VECTOR)


NAMES = [
    ("model", lambda: tilesmith.optimize("llama"), TypeError, "model is str"),
    ("undo", lambda: tilesmith.undo(None), TypeError, "model is NoneType"),
    (
        "only",
        lambda: tilesmith.optimize(torch_nn.Linear(2, 2, device="meta"), only="norms"),
        ValueError,
        "only names norms",
    ),
    (
        "only list",
        lambda: tilesmith.optimize(torch_nn.Linear(2, 2, device="meta"), only=[1]),
        TypeError,
        "only must be",
    ),
    (
        "no rules",
        lambda: tilesmith.optimize(torch_nn.Linear(2, 2, device="meta"), only=[]),
        ValueError,
        r"only is \[\], which names no rule, .*; give some of norm, .*, or None for all",
    ),
    (
        "exclude",
        lambda: tilesmith.optimize(torch_nn.Linear(2, 2, device="meta"), exclude=3),
        TypeError,
        "exclude must be",
    ),
    ("explain", lambda: tilesmith.explain("rms"), ValueError, "explain: there is no op 'rms'. .*rms_norm"),
    ("explain call", lambda: tilesmith.explain("rms_norm", X, r(7)), ValueError, "rms_norm: weight has shape"),
    ("unknown op", lambda: pinned(rmsnorm="triton"), ValueError, "there is no op 'rmsnorm'. Did you mean 'rms_norm'"),
    ("unknown kernel", lambda: pinned(rms_norm="cuda"), ValueError, "rms_norm has no kernel 'cuda'; it has:.*triton"),
    ("pin field", lambda: pinned(rms_norm="triton:block=x"), ValueError, r"rms_norm must be backend\[:field"),
    ("kernel name", lambda: tilesmith.register_kernel("a b"), ValueError, "must be an identifier, got 'a b'"),
    (
        "num_warps",
        lambda: tilesmith.optimize_kernel(num_warps=0),
        ValueError,
        "num_warps must be a positive int, got 0",
    ),
    ("odd warps", lambda: tilesmith.optimize_kernel(num_warps=3), ValueError, "num_warps must be a power of two"),
    ("num_stages", lambda: tilesmith.optimize_kernel(num_stages=True), ValueError, "num_stages must be a positive int"),
    (
        "argument",
        lambda: ops.rms_norm(X, VECTOR, epsilon=1.0),
        TypeError,
        "argument 'epsilon'; its parameters are x, weight",
    ),
    ("missing", lambda: ops.rms_norm(), TypeError, "missing 1 required positional argument: 'x'"),
]


@refused(NORMS)
def test_norms(call, error, words):
    check(call, error, words)


@refused(ELEMENTWISE)
def test_elementwise(call, error, words):
    check(call, error, words)


@refused(PROBABILITIES)
def test_probabilities(call, error, words):
    check(call, error, words)


@refused(ROTARY)
def test_rotary(call, error, words):
    check(call, error, words)


MOE_X, MOE_UP, MOE_DOWN, CHOSEN, SHARES = r(5, 8), r(4, 12, 8), r(4, 8, 6), ids(5, 2, most=4), r(5, 2)


def moe(x=MOE_X, gate_up=MOE_UP, down=MOE_DOWN, indices=CHOSEN, weights=SHARES, **more):
    return lambda: ops.experts(x, gate_up, down, indices, weights, **more)


EXPERTS = [
    ("dtype", moe(x=MOE_X.long()), TypeError, "experts: x has dtype torch.int64"),
    ("scalar", moe(x=r()), ValueError, "experts: x is a scalar"),
    ("gate_up rank", moe(gate_up=r(12, 8)), ValueError, r"experts: gate_up has shape \(12, 8\)"),
    ("gate_up kept transposed", moe(gate_up=r(4, 8, 12)), ValueError, r"gate_up.transpose\(1, 2\)"),
    ("gate_up dtype", moe(gate_up=MOE_UP.half()), TypeError, "experts: gate_up has dtype torch.float16, x has"),
    ("gate_up device", moe(gate_up=MOE_UP.to("meta")), ValueError, "experts: gate_up is on meta, x on cpu"),
    ("no experts", moe(gate_up=r(0, 12, 8), down=r(0, 8, 6)), ValueError, "experts: gate_up has no experts"),
    ("odd", moe(gate_up=r(4, 11, 8)), ValueError, "experts: gate_up has 11 rows an expert; with 'swiglu'"),
    ("down", moe(down=r(4, 6, 8)), ValueError, r"experts: down has shape.*\[4, 8, 6\]"),
    ("down of others", moe(down=r(3, 8, 6)), ValueError, "experts: down has shape"),
    ("ungated", moe(activation="relu"), ValueError, r"experts: down has shape.*'relu' it must be \[4, 8, 12\]"),
    ("gate_up_bias", moe(gate_up_bias=r(4, 8)), ValueError, r"experts: gate_up_bias has shape.*\[4, 12\]"),
    ("down_bias dtype", moe(down_bias=r(4, 8).double()), TypeError, "experts: down_bias has dtype"),
    ("indices dtype", moe(indices=CHOSEN.short()), TypeError, "experts: indices has dtype torch.int16"),
    ("indices rank", moe(indices=CHOSEN[0]), ValueError, r"experts: indices has shape.*\[5, K\]"),
    ("no choice", moe(indices=CHOSEN[:, :0], weights=SHARES[:, :0]), ValueError, "experts: indices has shape"),
    ("indices device", moe(indices=CHOSEN.to("meta")), ValueError, "experts: indices is on meta"),
    ("weights shape", moe(weights=SHARES[:, :1]), ValueError, "experts: weights has shape"),
    ("weights dtype", moe(weights=CHOSEN), TypeError, "experts: weights has dtype torch.int64"),
    ("activation", moe(activation="tanh"), ValueError, "experts: activation is 'tanh'; it must be one of 'swiglu'"),
    ("limit", moe(limit=-1.0), ValueError, "experts: limit is -1.0"),
    ("limit nan", moe(limit=NAN), ValueError, "experts: limit is nan"),
    ("alpha", moe(activation="geglu", alpha=2.0), ValueError, "experts: alpha is 2.0 with activation 'geglu'"),
    (
        "no gate",
        moe(activation="relu", down=r(4, 8, 12), interleaved=True),
        ValueError,
        "experts: interleaved is given with activation 'relu'",
    ),
    ("top_k", lambda: ops.route(X, 9), ValueError, "route: top_k is 9; it must be from 1 to 8"),
    ("top_k 0", lambda: ops.route(X, 0), ValueError, "route: top_k is 0"),
    ("groups", lambda: ops.route(X, 2, groups=3), ValueError, "route: groups is 3; it must divide the 8 experts"),
    ("kept", lambda: ops.route(X, 2, groups=2, kept_groups=3), ValueError, "route: kept_groups is 3"),
    ("too few kept", lambda: ops.route(X, 3, groups=4), ValueError, "route: top_k is 3; it must be from 1 to 2"),
    ("group score", lambda: ops.route(X, 2, group_score="sum"), ValueError, "route: group_score is 'sum'"),
    ("scores", lambda: ops.route(X, 2, scores="relu"), ValueError, "route: scores is 'relu'"),
    ("logits", lambda: ops.route(X.long(), 2), TypeError, "route: logits has dtype"),
    ("no logits", lambda: ops.route(r(3, 0), 1), ValueError, "route: logits has shape"),
    ("correction", lambda: ops.route(X, 2, r(7)), ValueError, r"route: bias has shape \(7,\); it must be \[8\]"),
    (
        "correction of a gradient",
        lambda: ops.route(X, 2, r(8).requires_grad_()),
        ValueError,
        "route: bias requires a gradient but would receive none",
    ),
    ("loss scores", lambda: ops.router_losses(X, ids(2, 5, 2), "max"), ValueError, "router_losses: scores is 'max'"),
    ("loss indices", lambda: ops.router_losses(X, ids(2, 4, 2)), ValueError, "router_losses: indices has shape"),
    ("loss dtype", lambda: ops.router_losses(X, r(2, 5, 2)), TypeError, "router_losses: indices has dtype"),
]


@refused(EXPERTS)
def test_experts(call, error, words):
    check(call, error, words)


@refused(PRODUCTS)
def test_products(call, error, words):
    check(call, error, words)


@refused(ATTENTION)
def test_attention(call, error, words):
    check(call, error, words)


@refused(LOSSES)
def test_losses(call, error, words):
    check(call, error, words)


@refused(DOOR)
def test_flash_attention(call, error, words):
    check(call, error, words)


@refused(LAYERS)
def test_layers(call, error, words):
    check(call, error, words)


@refused(NAMES)
def test_names(call, error, words):
    check(call, error, words)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": r(2, 1, 3, 9)}, ValueError, "k_cache has shape"),
        ({"v": r(2, 1, 3, 9)}, ValueError, "v_cache has shape"),
        ({"k": r(2, 2, 3, 8), "v": r(2, 2, 3, 8)}, ValueError, "k_cache has shape"),
        ({"v": r(2, 1, 4, 8)}, ValueError, "v has shape"),
        ({"lengths": torch.zeros(3, dtype=I32)}, ValueError, "lengths has shape"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths has dtype"),
        ({"lengths": torch.zeros(2, dtype=I32, device="meta")}, ValueError, "lengths is on meta"),
        ({"cos": COS}, ValueError, "sin is missing"),
        ({"q": Q[:, :, :3]}, ValueError, "q is given without cos"),
        ({"cos": r(16, 5), "sin": r(16, 5)}, ValueError, "cos has 5 angles"),
        (
            {"k_cache": torch.zeros(2, 1, 8, 8).to(FP8), "v_cache": torch.zeros(2, 1, 8, 8).to(FP8)},
            ValueError,
            "k_scale",
        ),
        ({"k_scale": r(1, 3, 1)}, ValueError, "k_scale has shape"),
        ({"k_cache": torch.zeros(1, 1, 8, 8).expand(2, 1, 8, 8)}, ValueError, "k_cache is expanded"),
        ({"k": r(2, 1, 3, 8).requires_grad_()}, ValueError, "k requires a gradient"),
        ({"page_table": ids(3, 1).int()}, ValueError, "page_table has shape"),
    ],
)
def test_a_refused_append_leaves_the_caches_alone(change, error, words):
    caches = {"k_cache": torch.zeros(2, 1, 8, 8), "v_cache": torch.zeros(2, 1, 8, 8)}
    given = {**caches, "k": r(2, 1, 3, 8), "v": r(2, 1, 3, 8), "lengths": torch.zeros(2, dtype=I32), **change}
    versions = [cache._version for cache in caches.values()]
    check(lambda: ops.kv_cache_append(**given), error, f"kv_cache_append: .*{words}")
    assert not any(cache.any() for cache in caches.values())
    assert versions == [cache._version for cache in caches.values()]


@pytest.mark.parametrize("tokens", [ids(3, 2), r(2, 2), ids(2, 17)], ids=["rows", "dtype", "length"])
def test_a_refused_decoder_leaves_its_cache_alone(tokens):
    cache = SMALL.new_cache(2)
    cache.keys.zero_()
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match="tokens"):
        SMALL(tokens, cache=cache)
    assert not cache.lengths.any() and not cache.keys.any()


def test_a_pinned_kernel_that_cannot_serve_says_why():
    with use(rms_norm="hopper"), pytest.raises(NotImplementedError, match="rms_norm is pinned to hopper, which cannot"):
        ops.rms_norm(r(3, 8, dtype=torch.float64), VECTOR)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("softmax", {"causal": False}, {"causal": 0}),
        ("softmax", {"scale": 1.0}, {"scale": True}),
        ("token_stats", {"ignore_index": -100}, {"ignore_index": -100.0}),
        ("tvd", {"grad_mask": [True, False]}, {"grad_mask": [1, 0]}),
    ],
)
def test_what_equals_an_argument_of_an_earlier_call_is_refused_all_the_same(name, good, bad):
    """True, 1 and 1.0 are equal, so a call that was made before must not stand for one of another type."""
    rows, labels = torch.ones(3, 8), torch.zeros(3, dtype=torch.int64)
    tensors = {"softmax": (rows,), "token_stats": (rows, labels), "tvd": (rows, rows)}[name]
    call = tilesmith.engine.ops()[name]
    call(*tensors, **good)
    with pytest.raises(TypeError, match=f"{name}: {next(iter(bad))} must be"):
        call(*tensors, **bad)
