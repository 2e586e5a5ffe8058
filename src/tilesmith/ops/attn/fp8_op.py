"""Attention in e4m3: attention_quantize, and the door to a forward in 8 bits with a backward in 16 or more.

Legend: see op.py.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilesmith.engine import Op
from tilesmith.engine.argument_checks import attributed_to, tensor
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.choice import pinned
from tilesmith.ops.attn import checks, quantize_reference
from tilesmith.ops.attn.dequantize_op import attention_dequantize, attention_fp8_gradients
from tilesmith.ops.attn.mask import Mask, Score
from tilesmith.ops.attn.op import EVERYTHING, SCALED, attention_op, attention_vjp, with_unit_stride
from tilesmith.ops.attn.reference import FACTOR_BLOCK, is_tokens_first, scale_of

GRANULARITIES = ("block", "head", "tensor")


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, granularity: str, smooth: bool,
    rotate: bool, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    scales = []
    for x in (q, k, v):
        tokens = (x.shape[2] + FACTOR_BLOCK - 1) // FACTOR_BLOCK if granularity == "block" else 1
        rows = (1, 1) if granularity == "tensor" else x.shape[:2]
        scales.append(x.new_empty(*rows, tokens, dtype=torch.float32))
    shift = q.new_empty(q.shape[:3] if smooth else 0, dtype=torch.float32)
    mean = k.new_empty((*k.shape[:2], k.shape[3]) if smooth else 0, dtype=torch.float32)
    return *quantize_reference.outputs_like(q, k, v), *scales, shift, mean


def _check(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, granularity: str, smooth: bool,
    rotate: bool, interleaved: bool,
) -> None:  # fmt: skip
    name = "attention_quantize"
    for x_name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in checks.FLOATS or x.dtype != q.dtype:
            raise TypeError(
                f"{name}: {x_name} has dtype {x.dtype}; float64, float32, float16 or bfloat16 is supported, one for all"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {x_name} requires a gradient, but rounding has none; call it under torch.no_grad(), or "
                "attention_fp8, which has one"
            )
    checks.check_shapes(name, q, k, v)
    checks.check_angles(name, q, k.shape[2], cos, sin)
    if cos is not None and q.shape[2] > k.shape[2]:
        raise ValueError(f"{name}: with cos and sin q may have k's {k.shape[2]} tokens at most, got {q.shape[2]}")
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"{name}: granularity is {granularity!r}; it must be one of {', '.join(map(repr, GRANULARITIES))}"
        )
    checks.check_rotate(name, rotate, q.shape[3])


attention_quantize = Op(
    quantize_reference.attention_quantize,
    fake=_fake,
    outputs=("q8", "k8", "v8", "q_scale", "k_scale", "v_scale", "shift", "mean"),
    check=_check,
    kernels={"triton": "tilesmith.ops.attn.triton.quantize"},
)


@attributed_to("attention_quantize", "attention")
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    score: Score = SCALED,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    granularity: str = "block",
    smooth: bool | None = None,
    rotate: bool | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` with products in float8_e4m3fn: (out [B, H, T, Dv], lse [B, H, T]), both differentiable.

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv], mask and score: as `attention` takes them, except packed documents
    and a score with a bias. cos, sin, interleaved: q and k are rotated first, as `attention_quantize` does it; the
    gradients are those of the q and k passed in. granularity, smooth, rotate: as `attention_quantize` takes them;
    smooth: None means True without a softcap; rotate: None means True where D is a power of two. Under autocast q, k
    and v are cast.

    Forward: q, k and v are quantised (`attention_quantize`), and `attention` takes them so. out has q's dtype, by way
    of bf16. On Hopper e4m3 numbers are multiplied (backend `hopper_fp8`: head dims from 64 to 128 that are multiples of
    16, causal or no mask), and p is rounded to e4m3, for lse too. Elsewhere, and with other masks or scores, kernels
    for bf16 get the numbers in bf16, which takes longer than `attention` does. Inputs must not contain NaN or infinity,
    not even in keys that no query sees: they spread to whatever shares their factor or mean.
    Backward: that of `attention` at the values that the forward multiplied, as if they had not been rounded; e4m3
    values and factors are all that is kept of q, k and v. It multiplies in bf16, which has those values exactly, or in
    fp32 and fp64 for such inputs. Gradients have larger errors than out: at head dim 128, for scores with a standard
    deviation of 1, 5 % (out 5 %), of 4 11 % (9 %), of 8 21 % (11 %), of 16 35 % (15 %).
    Raises ValueError or TypeError as `attention` and `attention_quantize` do.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor("attention_fp8", name, x)
    if not isinstance(mask, Mask):
        raise TypeError(f"attention_fp8: mask must be a Mask, got {type(mask).__name__}")
    if not isinstance(score, Score):
        raise TypeError(f"attention_fp8: score must be a Score, got {type(score).__name__}")
    if score.bias is not None:
        raise ValueError("attention_fp8: score has a bias, which has no gradient here; use attention")
    if score.softcap and smooth:
        raise ValueError("attention_fp8: smooth shifts the scores, which a softcap does not allow; pass smooth=False")
    checks.check_shapes("attention_fp8", q, k, v)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    smooth = not score.softcap if smooth is None else smooth
    rotate = q.shape[3] & (q.shape[3] - 1) == 0 if rotate is None else rotate
    given = dict(mask.lower(), **score.lower(), deterministic=deterministic)
    q, k, v = (with_unit_stride(x) for x in attention_op._autocast((q, k, v)))
    return _AttentionFp8.apply(q, k, v, cos, sin, given, (granularity, smooth, rotate, interleaved))


class _AttentionFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cos, sin, given, how):
        ctx.set_materialize_grads(False)
        ctx.given, ctx.how, ctx.pin = given, how, pinned("attention_vjp")
        ctx.dtype, ctx.tokens_first = q.dtype, tuple(map(is_tokens_first, (q, k, v)))
        *values, q_scale, k_scale, v_scale, shift, mean = attention_quantize(q, k, v, cos, sin, *how)
        out, lse = attention_op(*values, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, **given)
        if out.dtype != q.dtype:  # `to` would pass it on: compiled by torch 2.11, such an output lost its gradient
            out = out.to(q.dtype)
        ctx.save_for_backward(*values, q_scale, k_scale, v_scale, mean, cos, sin, out, lse)
        if how[1]:
            lse = torch.add(lse, shift, alpha=scale_of(q, given.get("scale")))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        *kept, mean, cos, sin, out, lse = ctx.saved_tensors
        _, smooth, rotate, interleaved = ctx.how
        q8, k8, *_ = kept
        dq, dk, dv = _gradients_at_values(ctx, kept, dout, dlse, out, lse)
        moved = (dlse, lse, mean) if smooth and dq is not None and dlse is not None else (None, None, None)
        given = next((x for x in (dq, dk) if x is not None), None)
        if given is not None and (rotate or cos is not None or moved[0] is not None or given.dtype != ctx.dtype):
            found = attention_fp8_gradients(
                dq, dk, *moved, cos, sin, dtype_name(ctx.dtype), scale_of(q8, ctx.given.get("scale")),
                k8.shape[2] - q8.shape[2], rotate, interleaved,
            )  # fmt: skip
            dq, dk = (None if x is None else dx for x, dx in zip((dq, dk), found))
        return dq, dk, None if dv is None else dv.to(ctx.dtype), None, None, None, None


def _gradients_at_values(ctx, kept, dout, dlse, out, lse) -> tuple[Tensor | None, ...]:
    """Gradients of the values that the forward multiplied, from e4m3 values and factors; None where none is wanted."""
    # 16-bit inputs in bf16: what was multiplied is exact in it, and beyond fp16 where a rotation added up a row
    dtype = torch.bfloat16 if ctx.dtype.itemsize == 2 else ctx.dtype
    values = attention_dequantize(*kept, ctx.tokens_first, dtype_name(dtype))
    named = dict(zip(attention_op.parameters, attention_op.bind(values, ctx.given)))
    named.update(dout=None if dout is None else dout.to(dtype), dlse=dlse, out=out.to(dtype), lse=lse)
    named.update(output_mask=(*ctx.needs_input_grad[:3], False, False))
    gradients = attention_vjp.handle(*attention_vjp.bind((), named), pin=ctx.pin)
    return tuple(dx if wanted else None for dx, wanted in zip(gradients, ctx.needs_input_grad[:3]))
