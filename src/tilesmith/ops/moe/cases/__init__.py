"""Example inputs of the moe family, and what they must move and compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, BF16, COMPILE, GPU, SMALL, TEST
from tilesmith.engine.inits import unit_outputs
from tilesmith.engine.memory import held
from tilesmith.ops.moe.cases import fp8
from tilesmith.ops.moe.cases.draws import (
    Init,
    always,
    half_to_first,
    quarters,
    shares,
    uniform,
    with_sentinels,
    zipf,
)
from tilesmith.ops.moe.reference import GATED, UNGATED

INTERPRETED = ("geglu", "relu_squared")  # the elementwise family has the others in Triton's interpreter
GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def experts_args(
    lead: tuple[int, ...] | int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    *,
    activation: str = "swiglu",
    bias: bool = False,
    indices: Init | None = None,
    integers: torch.dtype = torch.int64,
    scales: torch.dtype | None = None,
    layout: str = "contiguous",
    weight_layout: str = "contiguous",
    grad: bool = True,
    ranks: tuple[int, int] = (0, 0),
    adapters: torch.dtype | None = None,
    **options: object,
) -> dict:
    """Arguments of experts. scales: dtype of the routing weights; grad: whether the experts' weights ask for one.
    ranks: of the adapters of gate_up and down, 0 for none; adapters: their dtype."""
    shape = (lead,) if isinstance(lead, int) else lead
    wide = 2 * inner if activation in GATED else inner
    weight = {"init": unit_outputs, "layout": weight_layout, "grad": grad}
    args: dict = {
        "x": T(*shape, hidden, layout=layout),
        "gate_up": T(experts, wide, hidden, **weight),
        "down": T(experts, hidden, inner, **weight),
        "indices": T(*shape, top_k, dtype=integers, init=indices or uniform(experts)),
        "weights": T(*shape, top_k, dtype=scales, init=shares),
        "activation": activation,
    }
    if bias:
        args |= {"gate_up_bias": T(experts, wide), "down_bias": T(experts, hidden)}
    for which, rank, outputs, features in (("gate_up", ranks[0], wide, hidden), ("down", ranks[1], hidden, inner)):
        if rank:
            how = {"init": unit_outputs, "layout": weight_layout, "dtype": adapters}
            args |= {
                f"{which}_lora_a": T(experts, rank, features, **how),
                f"{which}_lora_b": T(experts, outputs, rank, **how),
                f"{which}_lora_scale": 0.75,
            }
    return {**args, **options}


def _clamped(args: dict, limit: float) -> dict:
    """The same call with a clamp, of exact pre-activations between which the limit lies."""
    exact = {
        n: T(*a.shape, init=quarters, layout=a.layout, grad=a.grad)
        for n, a in args.items()
        if n in ("x", "gate_up", "gate_up_bias")
    }
    return {**args, **exact, "limit": limit}


def _bench(tokens: int, hidden: int, inner: int, experts: int, top_k: int, **how: object) -> Case:
    name = f"{tokens}x{hidden}_e{experts}_i{inner}_k{top_k}"
    return Case(name, experts_args(tokens, hidden, inner, experts, top_k, **how), BENCH, BF16)


def _logits(lead: tuple[int, ...] | int, experts: int, top_k: int, *, bias: bool = False, **options: object) -> dict:
    shape = (lead,) if isinstance(lead, int) else lead
    args: dict = {"logits": T(*shape, experts), "top_k": top_k}
    if bias:
        args["bias"] = T(experts, dtype=torch.float32, grad=False)
    return {**args, **options}


CASES: dict[str, list[Case]] = {
    "experts": [
        Case("small", experts_args((2, 5), 24, 16, 4, 2), SMALL),
        Case("several_tiles", experts_args(66, 40, 40, 2, 2), SMALL),
        Case("one_token", experts_args(1, 24, 16, 8, 3), SMALL),
        Case("no_tokens", experts_args((2, 0), 16, 8, 4, 2), SMALL),
        Case("vector", experts_args((), 16, 8, 4, 2), SMALL),
        Case("empty_experts", experts_args(3, 24, 16, 12, 1), SMALL),
        Case("one_expert_has_all", experts_args(37, 24, 16, 4, 1, indices=always(2)), SMALL),
        Case("no_width", experts_args(5, 16, 0, 3, 2, bias=True), TEST),
        Case("even_steps", experts_args(20, 32, 32, 3, 2), SMALL),
        Case("twice_the_same", experts_args(9, 24, 16, 4, 2, indices=always(3)), TEST),
        Case("sentinels", experts_args(20, 24, 16, 3, 4, indices=with_sentinels(3), bias=True), SMALL),
        Case("only_sentinels", experts_args(5, 16, 8, 3, 2, indices=always(3)), SMALL),
        Case("few_sentinels", experts_args(7, 40, 24, 3, 4, indices=with_sentinels(3), bias=True), SMALL),
        Case("few_of_one_expert", experts_args(29, 24, 16, 4, 1, indices=always(2), weight_layout="transposed"), SMALL),
        Case("few_interleaved", experts_args(8, 24, 20, 4, 3, bias=True, **GPT_OSS), SMALL),
        Case("many_choices", experts_args(2, 16, 8, 17, 16), TEST),
        Case("int32_fp32_scales", experts_args(12, 24, 16, 4, 2, integers=torch.int32, scales=torch.float32), SMALL),
        Case("bias", experts_args(12, 24, 16, 4, 2, bias=True), TEST),
        Case(
            "gpt_oss",
            _clamped(experts_args(24, 24, 16, 4, 2, bias=True, weight_layout="transposed", **GPT_OSS), 0.6),
            SMALL,
        ),
        Case("interleaved", experts_args(24, 24, 20, 4, 2, interleaved=True), SMALL),
        Case("clamped", _clamped(experts_args(24, 24, 20, 4, 2), 0.6), SMALL),
        Case("odd", experts_args(19, 21, 11, 5, 3), SMALL),
        Case("strided", experts_args((2, 6), 16, 8, 3, 2, layout="strided", weight_layout="strided"), SMALL),
        Case("transposed", experts_args(12, 16, 8, 3, 2, layout="transposed", weight_layout="transposed"), SMALL),
        Case("frozen", experts_args(12, 24, 16, 4, 2, grad=False), SMALL),
        *(
            Case(name, experts_args(11, 16, 12, 3, 2, activation=name), SMALL if name in INTERPRETED else TEST)
            for name in (*GATED, *UNGATED)
            if name != "swiglu"
        ),
        Case("lora", experts_args(20, 24, 16, 3, 2, ranks=(4, 6)), SMALL),
        Case("lora_no_tokens", experts_args((2, 0), 16, 8, 4, 2, ranks=(2, 2)), TEST),
        Case(
            "lora_sentinels",
            experts_args(20, 24, 16, 3, 4, indices=with_sentinels(3), bias=True, grad=False, ranks=(16, 3)),
            SMALL,
        ),
        Case("lora_of_down", experts_args((2, 6), 21, 11, 5, 3, ranks=(0, 5), adapters=torch.float32), SMALL),
        Case(
            "lora_gpt_oss",
            _clamped(
                experts_args(24, 24, 16, 4, 2, bias=True, weight_layout="transposed", ranks=(0, 40), **GPT_OSS), 0.6
            ),
            TEST,
        ),
        Case("whole_tiles", experts_args(256, 256, 128, 2, 2), COMPILE, BF16),
        Case("few_tokens", experts_args(4, 256, 128, 16, 4), COMPILE, BF16),
        Case(
            "whole_tiles_gpt_oss",
            experts_args(256, 256, 128, 2, 2, bias=True, weight_layout="transposed", **GPT_OSS),
            COMPILE,
            BF16,
        ),
        Case("whole_tiles_lora", experts_args(256, 256, 128, 2, 2, grad=False, ranks=(16, 16)), COMPILE, BF16),
        Case("many_experts", experts_args(64, 64, 32, 512, 10), GPU),
        Case("odd_large", experts_args((3, 331), 200, 120, 33, 5, bias=True), GPU),
        Case("qwen3", experts_args(1024, 2048, 768, 128, 8), GPU, BF16),
        Case("decode", experts_args(4, 2048, 768, 128, 8), GPU, BF16),
        Case("decode_one", experts_args(1, 2048, 768, 128, 8, indices=with_sentinels(64)), GPU, BF16),
        Case("decode_gpt_oss", experts_args(16, 2880, 2880, 32, 4, bias=True, **GPT_OSS), GPU, BF16),
        Case("one_tile_an_expert", experts_args(1024, 256, 136, 64, 10), GPU, BF16),
        Case(
            "gpt_oss_large", experts_args(512, 2880, 2880, 32, 4, bias=True, weight_layout="transposed", **GPT_OSS), GPU
        ),
        Case(
            "qwen3_lora",
            experts_args(1024, 2048, 768, 128, 8, grad=False, ranks=(16, 64), adapters=torch.float32),
            GPU,
            BF16,
        ),
        Case("sentinels_large", experts_args(1024, 512, 256, 16, 8, indices=with_sentinels(16)), GPU, BF16),
        _bench(8192, 2048, 768, 128, 8),
        _bench(32768, 2048, 768, 128, 8),
        _bench(8192, 2048, 512, 512, 10),
        _bench(8192, 2880, 2880, 32, 4, bias=True, weight_layout="transposed", **GPT_OSS),
        _bench(8192, 2048, 1408, 64, 6),
        *(_bench(tokens, 2048, 768, 128, 8) for tokens in (1, 4, 16)),
        Case(
            "lora16_8192x2048_e128_i768_k8",
            experts_args(8192, 2048, 768, 128, 8, grad=False, ranks=(16, 16), adapters=torch.float32),
            BENCH,
            BF16,
        ),
        Case("zipf_8192x2048_e128_i768_k8", experts_args(8192, 2048, 768, 128, 8, indices=zipf(128)), BENCH, BF16),
        Case(
            "half_8192x2048_e128_i768_k8",
            experts_args(8192, 2048, 768, 128, 8, indices=half_to_first(128)),
            BENCH,
            BF16,
        ),
    ],
    **fp8.CASES,
    "route": [
        Case("small", _logits((2, 5), 8, 2), SMALL),
        Case("softmax_of_all", _logits(9, 8, 3, normalise=False), SMALL),
        Case("sigmoid", _logits(9, 8, 3, scores="sigmoid", scale=2.5), SMALL),
        Case("all_chosen", _logits(4, 3, 3), SMALL),
        Case("one_chosen", _logits(7, 12, 1, normalise=False), SMALL),
        Case("one_token", _logits((), 16, 4), SMALL),
        Case("no_tokens", _logits((2, 0), 8, 2), SMALL),
        Case("odd", _logits(21, 100, 16), SMALL),
        Case("strided", _logits((2, 3), 8, 2) | {"logits": T(2, 3, 8, layout="strided")}, SMALL),
        Case("transposed", _logits(6, 8, 2) | {"logits": T(6, 8, layout="transposed")}, SMALL),
        Case("bias", _logits(9, 8, 3, bias=True, scores="sigmoid", scale=2.5), SMALL),
        Case("deepseek", _logits(9, 16, 4, bias=True, scores="sigmoid", groups=4, kept_groups=2), SMALL),
        Case("best_groups", _logits(9, 16, 4, groups=4, kept_groups=2, group_score="max", normalise=False), SMALL),
        *(
            Case(f"{tokens}_of_{experts}", _logits(tokens, experts, top_k), BENCH, BF16)
            for tokens, experts, top_k in ((8192, 128, 8), (8192, 512, 10), (8192, 32, 4))
        ),
    ],
    "router_losses": [
        Case("small", {"logits": T(2, 5, 8), "indices": T(2, 5, 2, dtype=torch.int64, init=uniform(8))}, SMALL),
        Case("one_token", {"logits": T(8), "indices": T(2, dtype=torch.int64, init=uniform(8))}, TEST),
        Case("no_tokens", {"logits": T(0, 8), "indices": T(0, 2, dtype=torch.int64, init=uniform(8))}, TEST),
        Case(
            "sigmoid",
            {"logits": T(33, 8), "indices": T(33, 3, dtype=torch.int64, init=uniform(8)), "scores": "sigmoid"},
            SMALL,
        ),
        Case("sentinels", {"logits": T(9, 8), "indices": T(9, 3, dtype=torch.int32, init=with_sentinels(8))}, TEST),
    ],
}


def _read(gate_up: Tensor, indices: Tensor) -> float:
    """The share of the experts whose weights are read at least: as many as pairs, where those are fewer."""
    return min(1.0, indices.numel() / gate_up.shape[0])


def _adapter_flops(*adapted: tuple[Tensor, Tensor | None]) -> int:
    """Of adapters' products, of each pair: weights, each with its factor a."""
    return sum(2 * a.shape[1] * (weight.shape[1] + weight.shape[2]) for weight, a in adapted if a is not None)


def _flops(
    gate_up: Tensor, down: Tensor, indices: Tensor, gate_up_lora_a: Tensor | None, down_lora_a: Tensor | None
) -> int:
    low = _adapter_flops((gate_up, gate_up_lora_a), (down, down_lora_a))
    return indices.numel() * (2 * (gate_up[0].numel() + down[0].numel()) + low)


def _bytes(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> int:
    return 2 * held(x) + held(indices, weights) + int(_read(gate_up, indices) * held(gate_up, down))


def _bytes_vjp(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, output_mask: Sequence[bool]
) -> int:
    written = output_mask[0] * held(x) + output_mask[1] * held(gate_up) + output_mask[2] * held(down)
    pre = indices.numel() * gate_up.shape[1] * x.element_size()
    return pre + held(dy, x, indices) + int(_read(gate_up, indices) * held(gate_up, down)) + written


def _flops_vjp(
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    gate_up_lora_a: Tensor | None,
    down_lora_a: Tensor | None,
    output_mask: Sequence[bool],
) -> int:
    first, second = (2 * indices.numel() * t[0].numel() for t in (gate_up, down))
    low = 2 * indices.numel() * _adapter_flops((gate_up, gate_up_lora_a), (down, down_lora_a))
    return second + first * (output_mask[0] + output_mask[1]) + second * output_mask[2] + low


flops = {"experts": _flops, "experts_vjp": _flops_vjp, **fp8.flops}

bytes_moved = {
    "experts": _bytes,
    "experts_vjp": _bytes_vjp,
    **fp8.bytes_moved,
    "route": lambda logits, top_k: held(logits) + logits.numel() // logits.shape[-1] * top_k * 12,
    "route_vjp": lambda logits, dweights: 2 * held(logits) + 3 * held(dweights),
    "router_losses": lambda logits, indices: held(logits, indices),
    "router_losses_vjp": lambda logits, indices: 2 * held(logits) + held(indices),
}
