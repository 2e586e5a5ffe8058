"""The attention family: what attention and merge_attention are, which kernels they have, and the door to them.

Legend: B batch, T query tokens, S key tokens, H query heads, G kv heads (H % G == 0), D head dim of q and k, Dv head
dim of v, N packed documents.
"""

import inspect
from collections import namedtuple
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.device import portable
from tilesmith.device.dropout import draws_seed
from tilesmith.engine import Op
from tilesmith.engine.argument_checks import probability
from tilesmith.engine.arguments import no_argument
from tilesmith.engine.backends import declare_backend
from tilesmith.engine.metadata import describer
from tilesmith.engine.sharding import distributed
from tilesmith.hardware.detect import arch_of
from tilesmith.ops.attn import checks, reference, sharding
from tilesmith.ops.attn.latent import values_in_keys
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.plan.decode import scattered
from tilesmith.ops.attn.plan.tables import SHARED_LINES


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return reference.out_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_vjp(dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any):
    _, _, bias, _, _, sinks, *_, wanted, fp32 = rest
    gradients = [reference.gradient_like(x, fp32) for x in (q, k, v)]
    gradients += [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks)]
    return tuple(dx if want else q.new_empty(0) for dx, want in zip(gradients, wanted))


def _fake_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return reference.out_like(out_a, out_a.shape[-1]), lse_a.new_empty(lse_a.shape)


def _fake_merge_vjp(dout: Tensor | None, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) if want else x.new_empty(0) for x, want in zip(rest, rest[-1]))


def describe_attention(op_name: str, function):
    """Metadata of a call: a field per parameter, and what kernels for few queries, pages or no softcap want to know.

    rows: query rows of a kv head (T * H / G), rounded up to a power of two, at most 1024. filled: tenths of the device
    that tiles of 128 queries of a head keep busy. page_size: 0 without pages. capped: whether there is a softcap.
    cached: whether keys are at least four times the queries, as a cache's are. factors: of how many tokens the factors
    of q, k and v are: 0 none are given, -1 all, 1 or 128. across: whether the keys of a column of v lie side by side.
    aligned: whether S - T is a multiple of 128. pairs: kv heads of all batch rows, rounded up to a power of two, at
    most 65,536. shared: whether v is the first columns of k, in memory. scattered: whether query rows leave tiles of 64
    more than half empty (`plan.decode`). shared_lines: whether a key shares a line of 128 bytes with that of another
    kv head, and an SM has too many keys for that (`SHARED_LINES`). Lengths of documents are left out: they differ from
    step to step.
    """
    parameters = tuple(inspect.signature(function).parameters)
    plain = describer(op_name, parameters)
    skipped = [parameters.index(name) for name in ("max_seqlen_q", "max_seqlen_k")]
    at_q, at_k, at_pages, at_cap = (parameters.index(name) for name in ("q", "k", "page_table", "softcap"))
    at_v, at_q_scale = (parameters.index(name) for name in ("v", "q_scale"))
    more = ("arch", "rows", "filled", "page_size", "capped", "cached", "factors", "across", "aligned", "pairs",
            "shared", "scattered", "shared_lines")  # fmt: skip
    kind = namedtuple(f"{op_name}_call", [*parameters, *more])

    def describe(*args: Any) -> Any:
        args = list(args)
        for i in skipped:
            args[i] = 0
        q, k, v = args[at_q], args[at_k], args[at_v]
        scales = args[at_q_scale : at_q_scale + 3]
        factors = _NO_FACTORS
        if any(scale is not None for scale in scales):
            factors = tuple(_tokens_of_factor(x, scale) for x, scale in zip((q, k, v), scales))
        group = q.shape[1] // max(1, k.shape[1])
        rows, spread = max(1, q.shape[2] * group), group > 0 and scattered(group, q.shape[2])
        rows = min(1024, 1 << (rows - 1).bit_length())
        paged = args[at_pages] is not None
        cached = paged or k.shape[2] >= 4 * q.shape[2]
        found = plain(*args)
        blocks, places = max(1, -(-q.shape[2] // 128)), max(1, found[-1].sms)
        filled = 10 * q.shape[2] * min(places, q.shape[0] * q.shape[1] * blocks) // (128 * blocks * places)
        page_size, capped = k.shape[2] if paged else 0, args[at_cap] > 0.0
        aligned = (k.shape[2] - q.shape[2]) % 128 == 0
        pairs = min(65_536, 1 << max(q.shape[0] * k.shape[1] - 1, 0).bit_length())
        across, shared = v.stride(2) == 1, values_in_keys(k, v)
        lines = k.stride(1) < k.stride(2) and k.stride(1) * k.element_size() % 128 > 0
        lines = lines and k.shape[2] * min(places, q.shape[0] * k.shape[1]) > SHARED_LINES.value * places
        facts = rows, filled, page_size, capped, cached, factors, across, aligned, pairs, shared, spread, lines
        return kind(*found, *facts)

    return describe


_NO_FACTORS = (0, 0, 0)


def _tokens_of_factor(x: Tensor, scale: Tensor | None) -> int:
    if scale is None:
        return 0
    return -1 if scale.shape[2] == 1 else 1 if scale.shape[2] == x.shape[2] else reference.FACTOR_BLOCK


def _hands_on(device: torch.device, pinned: bool) -> str | None:
    if device.type == "cpu" and not pinned:
        return "it dequantises for another kernel; on a CPU only when pinned"
    return None


declare_backend("triton_split", like="triton")
declare_backend("hopper_split", like="hopper")
declare_backend("hopper_cluster", like="hopper")
declare_backend("hopper_latent", like="hopper")
declare_backend("hopper_fp8", like="hopper")
declare_backend("dequantised", _hands_on)

attention_vjp = Op(
    reference.attention_vjp,
    fake=_fake_vjp,
    outputs=("dq", "dk", "dv", "dbias", "dsinks"),
    describe=describe_attention("attention_vjp", reference.attention_vjp),
    kernels={
        "triton": "tilesmith.ops.attn.triton.launch_backward",
        "hopper": "tilesmith.ops.attn.hopper.launch_backward",
    },
)

attention_op = Op(
    reference.attention,
    fake=_fake,
    vjp=attention_vjp,
    outputs=("out", "lse"),
    check=checks.check_attention,
    draw=draws_seed(reference.attention, "dropout_p"),
    describe=describe_attention("attention", reference.attention),
    autocast=("q", "k", "v"),
    sharding=sharding.attention,
    # The policies of selective checkpointing in TRL and Axolotl keep the results of ops with this in their name.
    dispatched_as="flash_attn",
    together=(("k", "v"),),
    kernels={
        "triton": "tilesmith.ops.attn.triton.launch_forward",
        "triton_split": "tilesmith.ops.attn.triton.launch_decode",
        "hopper": "tilesmith.ops.attn.hopper.launch_forward",
        "hopper_split": "tilesmith.ops.attn.hopper.launch_decode",
        "hopper_cluster": "tilesmith.ops.attn.hopper.launch_cluster",
        "hopper_latent": "tilesmith.ops.attn.hopper.launch_latent",
        "hopper_fp8": "tilesmith.ops.attn.hopper.launch_fp8",
        portable.NAME: "tilesmith.ops.attn.portable",
        "dequantised": "tilesmith.ops.attn.dequantised",
    },
)

merge_attention_vjp = Op(
    reference.merge_attention_vjp,
    fake=_fake_merge_vjp,
    outputs=("dout_a", "dlse_a", "dout_b", "dlse_b"),
    kernels={"triton": "tilesmith.ops.attn.triton.merge"},
)

merge_attention = Op(
    reference.merge_attention,
    fake=_fake_merge,
    vjp=merge_attention_vjp,
    outputs=("out", "lse"),
    check=checks.check_merge,
    sharding="bhtD bht bhtD bht -> bhtD bht",
    kernels={"triton": "tilesmith.ops.attn.triton.merge"},
)


EVERYTHING, SCALED = Mask(), Score()
PADDED = (torch.float16, torch.bfloat16, torch.float32)


@attention_op.door
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    score: Score = SCALED,
    *,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    kv_lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    deterministic: bool | None = None,
    **misplaced: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Softmax attention: (out [B, H, T, Dv], lse [B, H, T]), both differentiable.

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv]; query head h reads kv head h // (H // G). fp64, fp32, fp16 or bf16,
    any strides ([B, T, H, D] memory seen through `transpose(1, 2)` is served in place). D and Dv may differ.

    mask: which keys a query sees. score: how scores are made. sinks [H]: one more logit in the softmax's denominator.
    dropout_p: probability to drop a probability, rounded to a multiple of 2^-16; seed int64 [2] fixes which (else drawn
    from the device's generator).
    cu_seqlens_q, cu_seqlens_k int32 [N + 1]: B = 1 and N documents lie one after another on the token axes.
    kv_lengths int32 [B]: how many keys of a cache are valid. page_table int32 [B, pages]: k and v are pages
    [num_pages, G, page_size, D | Dv] of a cache. q_scale, k_scale, v_scale: factors of quantised values, shaped like
    the tensor without its last dim, or with one for each block of 128 tokens. deterministic: the same bits in every
    run, also of gradients; None follows `torch.are_deterministic_algorithms_enabled()`.

    out has q's dtype and memory order, lse is fp32 (fp64 for fp64), the natural logarithm of the softmax's denominator.
    GPUs compute head dims below 16 or not divisible by 8 on copies with columns of zeros; out is then a view of one.
    A query that sees no key gets out 0, lse -inf (with sinks its head's sink) and no gradients; NaN in keys that no
    query sees affects nothing.
    Raises ValueError or TypeError, naming the argument, for shapes, dtypes, devices and numbers that do not fit, and
    TypeError with the right spelling for names that other libraries use (misplaced), such as causal=True.
    The meaning in full: `tilesmith.ops.attn.reference.attention`. Source: Dao, "FlashAttention-2", 2023.
    """
    if misplaced:
        raise TypeError(_spelled(misplaced))
    if not isinstance(mask, Mask):
        instead = "give it as score=" if isinstance(mask, Score) else "a tensor goes in Mask(dense=...)"
        raise TypeError(f"attention: mask must be a Mask, got {type(mask).__name__}; {instead}")
    if not isinstance(score, Score):
        raise TypeError(f"attention: score must be a Score, got {type(score).__name__}; a bias goes in Score(bias=...)")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    given = {
        "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "kv_lengths": kv_lengths,
        "page_table": page_table, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "deterministic": deterministic,
        **mask.lower(), **score.lower(),
    }  # fmt: skip
    dropout_p = probability("attention", "dropout_p", dropout_p)
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    if not _between_kernels(q, k, v, given):
        return attention_op(q, k, v, seed=seed, dropout_p=dropout_p, **given)
    given["scale"] = reference.scale_of(q, score.scale)
    padded = (F.pad(x, (0, _columns(x) - x.shape[3])) for x in (q, k, v))
    out, lse = attention_op(*padded, seed=seed, dropout_p=dropout_p, **given)
    return out[..., : v.shape[3]], lse


def _columns(x: Tensor) -> int:
    """The least head dim that kernels for GPUs serve and that is not below that of x."""
    return max(16, -(-x.shape[3] // 8) * 8)


def _between_kernels(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> bool:
    """Whether a GPU has kernels for these tensors with a few more columns, and none for their own. Columns of zeros in
    q and k add nothing to scores, and those of v make columns of out that are cut off."""
    try:
        dims = q.shape[3], v.shape[3]
    except (AttributeError, IndexError, RuntimeError):  # for the op's check; some nested tensors have no shape
        return False
    if not any(dim % 8 or dim < 16 for dim in dims):  # the usual case, on the way of every call
        return False
    if any(given[name] is not None for name in ("page_table", "q_scale", "k_scale", "v_scale")):
        return False
    for x in (q, k, v):
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 4 or x.dtype not in PADDED:
            return False
        if not 0 < x.shape[3] <= 512:
            return False
    if q.shape[3] != k.shape[3]:
        return False
    kind = q.device.type if torch.compiler.is_compiling() else arch_of(q.device).kind
    return kind in ("cuda", "xpu") and not distributed((q, k, v))


_SPELLINGS = {
    **dict.fromkeys(("causal", "is_causal"), "mask=Mask(causal=True)"),
    **dict.fromkeys(
        ("window", "window_size", "sliding_window", "window_left", "window_right"), "mask=Mask(window=(left, right))"
    ),
    **dict.fromkeys(("attn_mask", "attention_mask"), "mask=Mask(dense=...) for bool, score=Score(bias=...) for floats"),
    **dict.fromkeys(("block_mask", "blocks"), "mask=Mask(blocks=...)"),
    **dict.fromkeys(("documents", "prefix", "dense"), "a field of Mask"),
    **dict.fromkeys(("scale", "softmax_scale", "scaling"), "score=Score(scale=...)"),
    **dict.fromkeys(("softcap", "logits_soft_cap"), "score=Score(softcap=...)"),
    **dict.fromkeys(("alibi", "alibi_slopes"), "score=Score(alibi=...)"),
    **dict.fromkeys(("bias", "attn_bias"), "score=Score(bias=...)"),
    "dropout": "dropout_p=...",
    "score_mod": "torch.nn.attention.flex_attention: functions of scores are not served here",
}


def _spelled(misplaced: dict[str, Any]) -> str:
    """What to write in place of keywords that `attention` does not have."""
    instead = {name: f"write {spelling}" for name, spelling in _SPELLINGS.items()}
    instead["enable_gqa"] = "leave it out: heads of q that share one of k and v need no expanding"
    return no_argument("attention", misplaced, inspect.signature(attention).parameters, instead)


def with_unit_stride(x: Tensor) -> Tensor:
    """x itself if the elements of its last dim lie beside one another, else a copy; what has no strides, as it is, and
    so 8-bit x, which kernels read by columns."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.ndim == 0 or x.stride(-1) == 1:
        return x
    if x.dtype.itemsize == 1 and x.ndim == 4 and x.stride(2) == 1:
        return x
    # an empty tensor counts as contiguous whatever its strides are
    return x.contiguous() if x.numel() else x.clone(memory_format=torch.contiguous_format)
