"""Peers of attention: SDPA with its own choice, FlashAttention 2, cuDNN, FlashAttention 4, compiled FlexAttention; of
attention on e4m3 values, cuDNN's for these. And ours by `attention_fp8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilesmith.bench.missing import Missing, absent, only
from tilesmith.ops import Mask, Score, attention_fp8

_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "prefix_lengths", "q_documents", "k_documents", "page_table")
_FACTORS = ("q_scale", "k_scale", "v_scale")


def _sdpa(args: Mapping[str, Any], peer: str, backend: SDPBackend | None) -> Callable[[], Any]:
    absent(args, peer, *_PACKED, *_FACTORS, "block_offsets", "alibi", "sinks", "softcap", "deterministic")
    only(args, peer, window_left=-1, window_right=-1)
    q, k, v = args["q"], args["k"], args["v"]
    bias, mask, causal = args.get("bias"), args.get("mask"), args.get("causal", False)
    if (bias is not None and (mask is not None or causal)) or (mask is not None and causal):
        raise Missing(f"{peer} takes one of bias, mask and causal")
    allowed = bias if bias is not None else mask
    if causal and q.shape[2] == 1:
        causal = False  # the last query sees every key; cuDNN is faster when it is not told to mask
    elif causal and q.shape[2] != k.shape[2]:
        from torch.nn.attention.bias import causal_lower_right

        allowed, causal = causal_lower_right(q.shape[2], k.shape[2]), False
    named = {"attn_mask": allowed, "is_causal": causal, "scale": args.get("scale")}
    named["dropout_p"] = args.get("dropout_p", 0.0)  # it drops others than ours does

    def call():
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **named)

    def pinned():
        with sdpa_kernel(backend):
            return call()

    return call if backend is None else pinned


def _listed(args: Mapping[str, Any], peer: str) -> tuple[Tensor, Tensor]:
    """Of block lists, the blocks that are seen, and those seen whole: bool [B|1, H|1, rows, columns]."""
    only(args, peer, window_left=-1, window_right=-1)
    offsets, indices, q, k = (args[name] for name in ("block_offsets", "block_indices", "q", "k"))
    (batch, many, ends), columns = offsets.shape, -(-k.shape[2] // args["block_k"])
    counts = offsets.long().diff(dim=-1).flatten()
    row = torch.arange(counts.numel(), device=q.device).repeat_interleave(counts)
    seen = torch.zeros(counts.numel(), columns, dtype=torch.bool, device=q.device)
    seen[row, indices[: row.numel()].long()] = True
    seen = seen.view(batch, many, ends - 1, columns)
    if many not in (1, q.shape[1]):
        seen = seen.repeat_interleave(q.shape[1] // many, 1)
    if not args.get("causal", False):
        return seen, seen
    query = (torch.arange(ends - 1, device=q.device) * args["block_q"] + k.shape[2] - q.shape[2])[:, None]
    key = torch.arange(columns, device=q.device) * args["block_k"]
    return seen & (key < query + args["block_q"]), seen & (key + args["block_k"] <= query + 1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which, as these peers take them: lists of one length."""
    blocks = blocks.int().contiguous()
    return blocks.sum(-1).int(), blocks.argsort(dim=-1, descending=True, stable=True).int()


def _flash_attention_4(args: Mapping[str, Any]) -> Callable[[], Any]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    peer = "FlashAttention 4"
    absent(args, peer, "prefix_lengths", "q_documents", *_FACTORS)
    absent(args, peer, "alibi", "bias", "mask", "dropout_p")
    q, k, v = (args[name].transpose(1, 2) for name in ("q", "k", "v"))
    window = tuple(None if args.get(side, -1) < 0 else args[side] for side in ("window_left", "window_right"))
    named = {"causal": args.get("causal", False), "softcap": args.get("softcap", 0.0), "window_size": window}
    named |= {"softmax_scale": args.get("scale"), "learnable_sink": args.get("sinks")}
    named |= {"deterministic": args.get("deterministic", False)}
    attend = flash_attn_func
    if args.get("block_offsets") is not None:
        if named["causal"]:
            raise Missing("FlashAttention 4 takes a causal mask besides block lists only as a CuTe function")
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        absent(args, peer, "cu_seqlens_q")
        seen, sizes = _listed(args, peer)[0], (args["block_q"], args["block_k"])
        for end, blocks in (("", seen), ("_bwd", seen.mT)):
            lists = *_ordered(torch.zeros_like(blocks)), *_ordered(blocks)
            named[f"block_sparse_tensors{end}"] = BlockSparseTensorsTorch(*lists, block_size=sizes)
    if args.get("cu_seqlens_q") is not None:
        q, k, v, attend = q[0], k[0], v[0], flash_attn_varlen_func
        for side in ("q", "k"):
            starts = args[f"cu_seqlens_{side}"]
            named |= {f"cu_seqlens_{side}": starts, f"max_seqlen_{side}": int(starts.diff().max())}

    if args.get("kv_lengths") is not None:
        attend = flash_attn_varlen_func
        named |= {"seqused_k": args["kv_lengths"], "page_table": args.get("page_table")}

    def call():
        out = attend(q, k, v, **named)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(0, 1)[None] if out.ndim == 3 else out.transpose(1, 2)

    return call


def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # else it runs uncompiled after eight shapes
    return torch.compile(flex_attention, dynamic=False)


def _flex(args: Mapping[str, Any]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    peer = "this adapter of FlexAttention"
    absent(args, peer, *_PACKED, *_FACTORS, "bias", "mask", "sinks", "dropout_p")
    q, k, v = args["q"], args["k"], args["v"]
    if q.device.type == "cpu" and any(t.requires_grad for t in (q, k, v)):
        raise Missing("FlexAttention has no backward on a CPU")
    if q.device.type == "cpu" and not k.shape[2]:
        raise Missing("FlexAttention on a CPU divides by the number of keys")
    shift = k.shape[2] - q.shape[2]
    causal, left, right = args.get("causal", False), args.get("window_left", -1), args.get("window_right", -1)
    softcap, alibi = args.get("softcap", 0.0), args.get("alibi")

    def visible(b, h, i, j):
        seen = j >= 0
        if causal:
            seen = seen & (j <= i + shift)
        if left >= 0:
            seen = seen & (j >= i + shift - left)
        if right >= 0:
            seen = seen & (j <= i + shift + right)
        return seen

    def score(s, b, h, i, j):
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        return s - alibi[h] * (i + shift - j).abs() if alibi is not None else s

    masked = causal or left >= 0 or right >= 0
    blocks = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device) if masked else None
    if args.get("block_offsets") is not None:
        seen, whole = _listed(args, peer)
        lists, sizes = (*_ordered(seen & ~whole), *_ordered(whole)), (args["block_q"], args["block_k"])
        blocks = BlockMask.from_kv_blocks(*lists, sizes, visible, (q.shape[2], k.shape[2]))
    named = {"score_mod": score if softcap or alibi is not None else None, "block_mask": blocks}
    named |= {"scale": args.get("scale"), "enable_gqa": q.shape[1] != k.shape[1]}
    flex = _compiled_flex()
    return lambda: flex(q, k, v, **named)


def _cudnn_e4m3(args: Mapping[str, Any]) -> Callable[[], Any]:
    """cuDNN's attention of e4m3 values, by its frontend: to e4m3, with factors of 1 for p and the output."""
    import cudnn

    peer = "cuDNN's attention of e4m3 values"
    absent(args, peer, *_PACKED, "block_offsets", "bias", "mask", "alibi", "sinks", "softcap", "dropout_p")
    only(args, peer, window_left=-1, window_right=-1)
    named = {name: args[name] for name in ("q", "k", "v")}
    if any(x.dtype != torch.float8_e4m3fn for x in named.values()):
        raise Missing(f"{peer} has no {args['q'].dtype}")
    factors = {f"descale_{name}": args.get(f"{name}_scale") for name in named}
    if any(factor is None or factor.numel() != 1 for factor in factors.values()):
        raise Missing(f"{peer} has one factor a tensor")
    kinds = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    given, device = {}, args["q"].device

    def enter(name, x, kind):
        node = graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        given[node] = x.view(torch.uint8) if kind == kinds.FP8_E4M3 else x
        return node

    def leave(node, x, kind):
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        given[node] = x.view(torch.uint8) if kind == kinds.FP8_E4M3 else x

    one = torch.ones(1, 1, 1, 1, device=device)
    factors |= dict.fromkeys(("descale_s", "scale_s", "scale_o"), one)
    nodes = {name: enter(name, x.contiguous(), kinds.FP8_E4M3) for name, x in named.items()}
    nodes |= {name: enter(name, x.reshape(1, 1, 1, 1), kinds.FLOAT) for name, x in factors.items()}
    scale = args.get("scale")
    scale = args["q"].shape[3] ** -0.5 if scale is None else scale
    results = graph.sdpa_fp8(
        **nodes, generate_stats=True, attn_scale=scale, use_causal_mask=args.get("causal", False), name="attention"
    )
    out = args["q"].new_empty(*args["q"].shape[:3], args["v"].shape[3])
    leave(results[0], out, kinds.FP8_E4M3)
    leave(results[1], torch.empty(*out.shape[:3], 1, device=device), kinds.FLOAT)
    for largest in results[2:]:
        leave(largest, torch.zeros_like(one), kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    room = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def call():
        graph.execute(given, room, handle=handle)
        return out

    return call


def in_e4m3(args: Mapping[str, Any]) -> Callable[[], Any]:
    """Ours by `attention_fp8`: quantised, then attended."""
    name = "attention_fp8, in this adapter,"
    absent(args, name, *_PACKED, *_FACTORS, "block_offsets", "bias", "mask", "alibi", "sinks", "dropout_p")
    only(args, name, window_left=-1, window_right=-1)
    mask = Mask(causal=args.get("causal", False))
    score = Score(scale=args.get("scale"), softcap=args.get("softcap", 0.0))
    return lambda: attention_fp8(args["q"], args["k"], args["v"], mask, score)


PEERS: dict[str, Callable[[Mapping[str, Any]], Callable[[], Any]]] = {
    "pytorch": lambda args: _sdpa(args, "SDPA", None),
    "flash2": lambda args: _sdpa(args, "SDPA's FlashAttention", SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda args: _sdpa(args, "cuDNN's SDPA", SDPBackend.CUDNN_ATTENTION),
    "flash4": _flash_attention_4,
    "flex": _flex,
    "cudnn_e4m3": _cudnn_e4m3,
}
