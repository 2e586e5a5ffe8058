"""The ops by name. A family is imported when one of its names is first used; its kernels when they are first needed."""

from __future__ import annotations

from tilesmith._lazy import imported, lazy_names
from tilesmith.settings import PREFIX, settings

_FAMILIES = {
    "tilesmith.ops.attn.fp8_op": ("attention_fp8", "attention_quantize"),
    "tilesmith.ops.attn.blocks_op": (
        "block_lists",
        "block_mass",
        "block_max_scores",
        "block_max_scores_vjp",
        "block_pattern",
        "block_scores",
        "block_scores_vjp",
        "block_select",
        "block_shares",
    ),
    "tilesmith.ops.attn.op": ("attention", "attention_vjp", "merge_attention", "Mask", "Score"),
    "tilesmith.ops.attn.mask": ("Blocks",),
    "tilesmith.ops.attn.dequantize_op": ("attention_dequantize", "attention_fp8_gradients"),
    "tilesmith.ops.attn.expand_op": ("expand_kv", "expand_kv_vjp"),
    "tilesmith.ops.attn.cache_op": ("kv_cache_append",),
    "tilesmith.ops.attn.partial_op": ("accumulate_attention", "attention_partial"),
    "tilesmith.ops.attn.runs_op": ("add_runs", "copy_runs"),
    "tilesmith.ops.loss.distill_op": (
        "jsd",
        "jsd_vjp",
        "kl_div",
        "kl_div_vjp",
        "linear_distillation",
        "linear_distillation_vjp",
        "tvd",
        "tvd_vjp",
    ),
    "tilesmith.ops.elementwise.dropout_op": (
        "bias_dropout",
        "bias_dropout_residual",
        "bias_dropout_residual_vjp",
        "bias_dropout_vjp",
    ),
    "tilesmith.ops.elementwise.op": (
        "add_relu",
        "add_relu_vjp",
        "bias_gelu",
        "bias_gelu_vjp",
        "geglu",
        "geglu_vjp",
        "gelu",
        "gelu_vjp",
        "relu_squared",
        "relu_squared_vjp",
        "sigmoid",
        "sigmoid_vjp",
        "silu",
        "silu_vjp",
        "swiglu",
        "swiglu_vjp",
    ),
    "tilesmith.ops.elementwise.xielu_op": ("xielu", "xielu_vjp"),
    "tilesmith.ops.gemm.lora_op": ("lora_linear", "lora_linear_vjp"),
    "tilesmith.ops.gemm.op": (
        "linear",
        "linear_act",
        "linear_act_vjp",
        "linear_vjp",
        "matmul",
        "matmul_vjp",
        "memory_efficient_linear",
        "memory_efficient_linear_vjp",
        "norm_linear",
        "norm_linear_vjp",
    ),
    "tilesmith.ops.gemm.sums_op": ("column_sums",),
    "tilesmith.ops.loss.op": (
        "cross_entropy",
        "cross_entropy_vjp",
        "linear_cross_entropy",
        "linear_cross_entropy_vjp",
    ),
    "tilesmith.ops.loss.preference_op": ("linear_log_probs", "linear_preference", "linear_preference_vjp"),
    "tilesmith.ops.loss.token_stats_op": (
        "linear_token_stats",
        "linear_token_stats_vjp",
        "token_stats",
        "token_stats_vjp",
    ),
    "tilesmith.ops.aliases": (
        "flash_attention_backward",
        "flash_attention_forward",
        "fused_add_relu",
        "fused_bias_dropout",
        "fused_bias_gelu",
        "fused_linear_forward",
        "memory_efficient_attention",
        "rmsnorm",
    ),
    "tilesmith.ops.moe.fp8_op": ("experts_fp8", "experts_vjp_fp8"),
    "tilesmith.ops.moe.op": ("experts", "experts_vjp"),
    "tilesmith.ops.moe.route_op": ("route", "route_vjp", "router_losses", "router_losses_vjp"),
    "tilesmith.ops.norm.dropout_op": ("dropout_add_norm", "dropout_add_norm_vjp"),
    "tilesmith.ops.norm.gated_op": ("rms_norm_gated", "rms_norm_gated_vjp"),
    "tilesmith.ops.norm.op": (
        "add_layer_norm",
        "add_layer_norm_vjp",
        "add_rms_norm",
        "add_rms_norm_vjp",
        "layer_norm",
        "layer_norm_vjp",
        "rms_norm",
        "rms_norm_vjp",
    ),
    "tilesmith.ops.norm.softmax_op": ("softmax", "softmax_dropout", "softmax_dropout_vjp", "softmax_vjp"),
    "tilesmith.ops.quant.op": (
        "add_rms_norm_fp8",
        "fp8_amax",
        "fp8_cast",
        "fp8_cast_beside",
        "fp8_cast_blocks",
        "fp8_cast_experts",
        "fp8_cast_rows",
        "fp8_cast_stack",
        "fp8_transpose",
        "rms_norm_fp8",
        "scaled_matmul",
        "swiglu_fp8",
        "swiglu_vjp_fp8",
    ),
    "tilesmith.ops.quant.packed_op": ("dequant_linear", "dequant_linear_vjp", "dequantize_packed", "quantize_packed"),
    "tilesmith.ops.rotary.norm_op": ("rms_norm_rope", "rms_norm_rope_vjp"),
    "tilesmith.ops.rotary.op": ("rope", "rope_vjp"),
    "tilesmith.ops.attn.scores_op": ("attention_stats", "attention_weights", "attention_weights_vjp"),
}
_OVER_RANKS = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
_HOMES = {name: home for home, names in _FAMILIES.items() for name in names}
_HOMES |= dict.fromkeys(_OVER_RANKS, "tilesmith.distributed.losses")

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)


def load() -> None:
    """Declare the ops of every family."""
    for home in _FAMILIES:
        imported(home)


def _check_pins() -> None:
    """Raise ValueError where the environment pins an op or a kernel that there is not: it would be ignored."""
    from tilesmith.engine.pins import check_pin
    from tilesmith.engine.registry import DECLARED

    load()
    for name, backend in settings().pins:
        check_pin(f"{PREFIX}USE", DECLARED, name, backend)


if settings().pins:
    _check_pins()
