"""What mixture-of-experts layers compute, in plain PyTorch: the oracle of every kernel.

Legend: T tokens (all leading dims of x), C hidden size, E experts, K experts of a token, S = T K pairs of a token and
an expert, I width inside an expert, N = 2 I where experts have a gate, else I, R rank of an adapter.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tilesmith.device.accumulation import sum_dtype

GATED = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_erf": "gelu"}
UNGATED = ("relu_squared", "relu", "silu", "gelu", "gelu_tanh")
ACTIVATIONS = (*GATED, *UNGATED)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    interleaved: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    gate_up_lora_scale: float = 1.0,
    down_lora_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """y[t] = Σ_k weights[t, k] (down[e] · act(gate_up[e] · x[t] + gate_up_bias[e]) + down_bias[e]), e = indices[t, k].

    x: [..., C]. gate_up: [E, N, C], the rows of gate first, then those of up, or with `interleaved` a row of gate and a
    row of up in turn. down: [E, C, I]. Weights in any strides: those that a model keeps as [E, C, N] and [E, I, C] are
    passed as `.transpose(1, 2)`, and their gradients come in the same strides. gate_up_bias: [E, N]; down_bias: [E, C].
    x, gate_up, down and the biases have one floating dtype. indices: [..., K], int64 or int32. A pair whose index is
    negative or at least E contributes nothing, and its weight's gradient is 0: expert parallelism marks the experts of
    other ranks this way. A token may have an expert more than once, so K may exceed E. weights: [..., K], floating.
    activation: "swiglu", "geglu" (the tanh form of GELU) or "geglu_erf", which have a gate (N = 2 I):
    act(gate) (up + up_offset), where swiglu's act is gate · sigmoid(alpha gate); or without a gate (N = I)
    "relu_squared", "relu", "silu", "gelu" (through erf) or "gelu_tanh". limit: above 0, gate is clamped to at most
    `limit` and up to [-limit, limit] before that, with the gradient of torch.clamp. gpt-oss has alpha 1.702, limit 7
    and up_offset 1.

    gate_up_lora_a: [E, R, C] and gate_up_lora_b: [E, N, R], given together, add
    gate_up_lora_scale · gate_up_lora_b[e] · (gate_up_lora_a[e] · x[t]) to gate_up[e] · x[t]; down_lora_a: [E, R, I],
    down_lora_b: [E, C, R] and down_lora_scale likewise to the product of down. Their ranks may differ. They have any
    strides and any floating dtype: they are rounded to x's, and so is scale · a · x, and their gradients come in their
    own dtype. They are never expanded to a matrix of a weight's size.

    Sums are fp32 (fp64 for fp64). The pre-activation, the activation, and the output of each expert before its weight
    are rounded to x's dtype; the sum over k is rounded once. The order of every sum is fixed, so results are the same
    bit for bit in each run. Saved for the backward: the inputs and the pre-activation [S, N]. Under autocast x, the
    weights of experts and the biases are cast; adapters follow x in any case.

    Returns y [..., C] in x's dtype, contiguous.

    Raises TypeError for dtypes, ValueError for shapes, devices, an unknown activation and options that it lacks.

    Source: Shazeer et al., arXiv:1701.06538; Shazeer, arXiv:2002.05202 (gated activations); gpt-oss model card,
    arXiv:2508.10925 (clamped SwiGLU); Hu et al., arXiv:2106.09685 (LoRA).
    """
    acc = sum_dtype(x)
    tokens, order, sizes = grouped(x, indices, gate_up.shape[0])
    pairs = flat(x).to(acc)[tokens[order]]
    z = grouped_linear(pairs, gate_up, gate_up_bias, sizes)
    if gate_up_lora_a is not None and gate_up_lora_b is not None:
        low = _low_rank(pairs, gate_up_lora_a, gate_up_lora_scale, sizes, x.dtype)
        z = z + grouped_linear(low, gate_up_lora_b.to(x.dtype), None, sizes)
    z = z.to(x.dtype)
    hidden = activate(z.to(acc), activation, interleaved, limit, alpha, up_offset).to(x.dtype)
    rows = grouped_linear(hidden.to(acc), down, down_bias, sizes)
    if down_lora_a is not None and down_lora_b is not None:
        low = _low_rank(hidden.to(acc), down_lora_a, down_lora_scale, sizes, x.dtype)
        rows = rows + grouped_linear(low, down_lora_b.to(x.dtype), None, sizes)
    rows = rows.to(x.dtype).to(acc)
    y = combined(rows, order, indices.numel(), weights)
    missing = indices.numel() - z.shape[0]
    return y.to(x.dtype).reshape(x.shape), F.pad(z.detach(), (0, 0, 0, missing)).contiguous()


def experts_vjp(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_lora_a: Tensor | None,
    gate_up_lora_b: Tensor | None,
    down_lora_a: Tensor | None,
    down_lora_b: Tensor | None,
    pre: Tensor,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    up_offset: float,
    gate_up_lora_scale: float,
    down_lora_scale: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias, dgate_up_lora_a, dgate_up_lora_b,
    ddown_lora_a, ddown_lora_b) of `experts`; an empty tensor where `output_mask` is False.

    dy: [..., C]. pre: [S, N], the pre-activations in the order of experts, pairs of one expert in the order of tokens;
    rows of pairs without an expert come last and are 0. The activation is computed again from it. The gradient of the
    pre-activation, the weighted activation and the gradient of each pair's x are rounded to x's dtype, and so are
    tensors of an adapter's rank. dgate_up and ddown have the strides of torch.empty_like(gate_up) and of
    torch.empty_like(down), the others are contiguous.
    """
    acc, dtype = sum_dtype(x), x.dtype
    tokens, order, sizes = grouped(x, indices, gate_up.shape[0])
    found, count = tokens[order], order.numel()
    pairs, dys, z = flat(x).to(acc)[found], flat(dy).to(acc)[found], pre[:count].to(acc)
    scales = weights.reshape(-1)[order].to(acc)[:, None]
    (dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias), made = (
        [x.new_empty(0) for _ in range(n)] for n in (6, 4)
    )
    slope = grouped_linear(dys, down.transpose(1, 2), None, sizes)
    if down_lora_a is not None and down_lora_b is not None:
        dlow = _low_rank(dys, down_lora_b.transpose(1, 2), down_lora_scale, sizes, dtype)
        slope = slope + grouped_linear(dlow, down_lora_a.transpose(1, 2).to(dtype), None, sizes)
    hidden, dz = activation_vjp(slope * scales, z, activation, interleaved, limit, alpha, up_offset)
    dz, scaled = dz.to(dtype).to(acc), (hidden * scales).to(dtype).to(acc)
    if down_lora_a is not None and down_lora_b is not None:
        low = _low_rank(scaled, down_lora_a, down_lora_scale, sizes, dtype)
        made[2:] = _factor_gradients(dlow, scaled, dys, low, (down_lora_a, down_lora_b), sizes)
    rows = grouped_linear(dz, gate_up.transpose(1, 2), None, sizes) if output_mask[0] else dz.new_zeros(())
    if gate_up_lora_a is not None and gate_up_lora_b is not None:
        dlow = _low_rank(dz, gate_up_lora_b.transpose(1, 2), gate_up_lora_scale, sizes, dtype)
        rows = rows + grouped_linear(dlow, gate_up_lora_a.transpose(1, 2).to(dtype), None, sizes)
        low = _low_rank(pairs, gate_up_lora_a, gate_up_lora_scale, sizes, dtype)
        made[:2] = _factor_gradients(dlow, pairs, dz, low, (gate_up_lora_a, gate_up_lora_b), sizes)
    if output_mask[0]:
        ones = weights.detach().new_ones(weights.shape)
        dx = combined(rows.to(dtype).to(acc), order, indices.numel(), ones).to(dtype).reshape(x.shape)
    if output_mask[1]:
        dgate_up = weight_gradient(dz, pairs, torch.empty_like(gate_up), sizes)
    if output_mask[2]:
        ddown = weight_gradient(dys, scaled, torch.empty_like(down), sizes)
    if output_mask[3]:
        each = (slope * hidden).sum(1)
        if down_bias is not None:
            each = each + (dys * _repeated(down_bias.to(acc), sizes)).sum(1)
        dweights = each.new_zeros(indices.numel()).index_copy(0, order, each).reshape(weights.shape).to(weights.dtype)
    if output_mask[4]:
        dgate_up_bias = torch.stack([part.sum(0) for part in dz.split(sizes)]).to(dtype)
    if output_mask[5]:
        ddown_bias = torch.stack([part.sum(0) for part in (dys * scales).split(sizes)]).to(dtype)
    factors = (d if wanted else x.new_empty(0) for d, wanted in zip(made, output_mask[6:]))
    return dx, dgate_up, ddown, dweights, dgate_up_bias, ddown_bias, *factors


def grouped(x: Tensor, indices: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """(token of each pair [S], the pairs that have an expert in the order of experts, pairs of each expert)."""
    chosen = indices.reshape(-1).long()
    there = (chosen >= 0) & (chosen < experts)
    chosen = torch.where(there, chosen, experts)
    order = chosen.sort(stable=True).indices
    sizes = torch.bincount(chosen, minlength=experts + 1).tolist()
    tokens = torch.arange(chosen.numel(), device=chosen.device) // max(1, indices.shape[-1])
    return tokens, order[: chosen.numel() - sizes[experts]], sizes[:experts]


def activate(z: Tensor, activation: str, interleaved: bool, limit: float, alpha: float, up_offset: float) -> Tensor:
    """The activation [S, I] of pre-activations z [S, N]."""
    if activation in UNGATED:
        return _function(z, activation)
    gate, up = gate_and_up(z, interleaved)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu":
        return gate * torch.sigmoid(alpha * gate) * (up + up_offset)
    return _function(gate, GATED[activation]) * (up + up_offset)


def gate_and_up(z: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, each [..., I], of z [..., N]."""
    if interleaved:
        return z[..., ::2], z[..., 1::2]
    gate, up = z.chunk(2, -1)
    return gate, up


def combined(rows: Tensor, order: Tensor, pairs: int, weights: Tensor) -> Tensor:
    """Σ_k weights[t, k] rows of (t, k), [T, C]: rows are in the order `order` of pairs; pairs without a row add 0."""
    there = torch.zeros(pairs, dtype=torch.bool, device=order.device).index_fill(0, order, True)
    scales = torch.where(there, weights.reshape(-1), 0).to(rows.dtype)
    placed = rows.new_zeros(pairs, rows.shape[1]).index_copy(0, order, rows)
    top_k = weights.shape[-1]
    tokens = weights.numel() // top_k if top_k else weights.shape[:-1].numel()
    return (placed * scales[:, None]).reshape(tokens, top_k, rows.shape[1]).sum(1)


def flat(x: Tensor) -> Tensor:
    """[..., C] as [T, C]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _function(z: Tensor, name: str) -> Tensor:
    if name == "relu_squared":
        return F.relu(z).square()
    if name in ("relu", "silu"):
        return getattr(F, name)(z)
    return F.gelu(z, approximate="tanh" if name == "gelu_tanh" else "none")


def activation_vjp(
    dhidden: Tensor, z: Tensor, activation: str, interleaved: bool, limit: float, alpha: float, up_offset: float
) -> tuple[Tensor, Tensor]:
    """The activation at z and the gradient of z."""
    if activation in UNGATED:
        return _function(z, activation), dhidden * _slope(z, activation)
    gate, up = gate_and_up(z, interleaved)
    passes_gate = passes_up = None
    if limit > 0:
        passes_gate, passes_up = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu":
        sigmoid = torch.sigmoid(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid + alpha * value * (1 - sigmoid)
    else:
        value, slope = _function(gate, GATED[activation]), _slope(gate, GATED[activation])
    dz = torch.empty_like(z)
    dgate, dup = gate_and_up(dz, interleaved)
    dgate.copy_(_where(passes_gate, dhidden * slope * (up + up_offset)))
    dup.copy_(_where(passes_up, dhidden * value))
    return value * (up + up_offset), dz


def _where(passes: Tensor | None, gradient: Tensor) -> Tensor:
    """The gradient before a clamp; a product with a mask would keep a NaN, as torch.clamp does not."""
    return gradient if passes is None else torch.where(passes, gradient, 0)


def _slope(z: Tensor, name: str) -> Tensor:
    """The derivative of `_function`."""
    if name == "relu_squared":
        return 2 * F.relu(z)
    if name == "relu":
        return (z > 0).to(z.dtype)
    if name == "silu":
        sigmoid = torch.sigmoid(z)
        return sigmoid * (1 + z * (1 - sigmoid))
    if name == "gelu":
        return 0.5 * (1 + torch.erf(z * 0.5**0.5)) + z * torch.exp(-0.5 * z * z) * (2 * math.pi) ** -0.5
    bend = (2 / math.pi) ** 0.5
    tanh = torch.tanh(bend * (z + 0.044715 * z**3))
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * bend * (1 + 3 * 0.044715 * z * z)


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
    """rows · weight[e]ᵀ + bias[e] for the rows of each expert, in rows' dtype."""
    parts = [
        F.linear(part, weight[e].to(part.dtype), None if bias is None else bias[e].to(part.dtype))
        for e, part in enumerate(rows.split(sizes))
        if part.shape[0]
    ]
    return torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[1]) + 0 * rows.sum()


def _low_rank(rows: Tensor, factor: Tensor, scale: float, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """scale · rows · factor[e]ᵀ [S, R] for the rows of each expert, rounded to dtype, in rows' dtype."""
    return (grouped_linear(rows, factor.to(dtype), None, sizes) * scale).to(dtype).to(rows.dtype)


def _factor_gradients(
    dlow: Tensor, rows: Tensor, drows: Tensor, low: Tensor, factors: tuple[Tensor, Tensor], sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of an adapter's factors a and b; low, dlow [S, R]: scale · rows · aᵀ and scale · drows · b."""
    (a, b), contiguous = factors, torch.contiguous_format
    return (
        weight_gradient(dlow, rows, torch.empty_like(a, memory_format=contiguous), sizes),
        weight_gradient(drows, low, torch.empty_like(b, memory_format=contiguous), sizes),
    )


def weight_gradient(left: Tensor, right: Tensor, made: Tensor, sizes: list[int]) -> Tensor:
    """made [E, ., .], filled with Σ left[r] ⊗ right[r] over the rows of each expert."""
    for e, (a, b) in enumerate(zip(left.split(sizes), right.split(sizes))):
        made[e] = (a.t() @ b).to(made.dtype)
    return made


def _repeated(vectors: Tensor, sizes: list[int]) -> Tensor:
    return vectors.repeat_interleave(torch.tensor(sizes, device=vectors.device), 0)
