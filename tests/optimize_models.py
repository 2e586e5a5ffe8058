"""Small models of transformers and of one's own for the tests of `optimize`: how they are built, trained, compared."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilesmith.engine import ops, use

OPS = (
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rope", "swiglu", "geglu", "silu", "gelu", "attention",
    "experts", "rms_norm_gated", "rms_norm_rope", "expand_kv", "route", "xielu", "column_sums", "lora_linear",
    "bias_gelu_vjp",
)  # fmt: skip


@pytest.fixture(autouse=True)
def ops_everywhere():
    """Run the ops by their reference also where a module's own forward would run, for want of a kernel."""
    with use(**dict.fromkeys(OPS, "reference")):
        yield


def checkpoint_layers(model, on=True, **how):
    """Switch checkpointing of a transformers model on or off, as trainers do. how: of torch.utils.checkpoint."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not on:
        return getattr(model, f"{kind}_checkpointing_disable")()
    return getattr(model, f"{kind}_checkpointing_enable")(how or None)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADED = {**GROUPED, "head_dim": 16}
SEQ2SEQ = {
    "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 128, "decoder_start_token_id": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
}  # fmt: skip
OTHERS = {
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**HEADED, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADED, "num_local_experts": 4, "sliding_window": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**HEADED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "q_lora_rank": 32,
         "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
    "deepseek_v32": (  # its attention selects keys by editing the mask
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse"], "q_lora_rank": 32,
         "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 2,
         "index_head_dim": 16, "index_topk": 4},
    ),
    "doge": ("DogeForCausalLM", "DogeConfig", GROUPED),  # so does this one
    "bigbird_pegasus": (  # half of its attention adds the masks that transformers makes to its scores
        "BigBirdPegasusForCausalLM",
        "BigBirdPegasusConfig",
        {**SEQ2SEQ, "max_position_embeddings": 64},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", HEADED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**GROUPED, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, "max_position_embeddings": 80}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**SIZES, "pad_token_id": 0, "local_attention": 8}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 64},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**{k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")},
         "image_size": 32, "patch_size": 8},
    ),
}  # fmt: skip
CAUSAL = ("llama", "qwen3", "gemma2", "gpt2")
NO_DROPOUT = (
    "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "dropout_rate", "activation_dropout",
)  # fmt: skip


def build(family, layers=2, attention="eager"):
    """A small model of a family in training mode, with weights that are not those of its initialisation."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model_name, config_name, sizes = {**FAMILIES, **OTHERS}[family]
    sizes = {k: layers if k in ("num_hidden_layers", "n_layer") else v for k, v in sizes.items()}
    config = getattr(transformers, config_name)(**sizes)
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others take no float64
    model = getattr(transformers, model_name)._from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # otherwise transformers warns in the middle of a traced forward (GPT-2)
    return model


def batch(family, padded="right", length=12):
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 120, (2, length), generator=generator)
    if family == "whisper":  # two frames of the spectrogram become one token of the encoder
        return {"input_features": torch.randn(2, 16, 24, generator=generator), "labels": ids}
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded == "right":
        mask[1, -3:] = 0
    if padded == "left":  # rows that see nothing
        mask[1, :4] = 0
    # No loss of a token that was not seen, nor by one: the last hidden row would predict the first visible label.
    labels[(mask == 0) | (mask.roll(1) == 0)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model, inputs, **more):
    """Loss, logits of tokens that count, and every gradient."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    out = model(**inputs, **more)
    out.loss.backward()
    logits = out.logits.detach()
    if "attention_mask" in inputs and logits.shape[:2] == inputs["attention_mask"].shape:
        logits = logits[inputs["attention_mask"].bool()]
    return out.loss.detach(), logits, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_within_budget(found, same_dtype, oracle):
    """Error at most 2 * (error of the original in this dtype + eps * the largest value of its kind)."""
    eps = torch.finfo(next(iter(same_dtype[2].values())).dtype).eps

    def check(name, f, s, o, largest):
        assert f.dtype is s.dtype and f.shape == s.shape
        error, own = ((t.double() - o.double()).abs().max().item() for t in (f, s))
        assert error <= 2 * (own + eps * largest), f"{name}: error {error:.2e}, the original's {own:.2e}"

    for name, f, s, o in zip(("loss", "logits"), found, same_dtype, oracle):
        check(name, f, s, o, o.abs().max().item())
    assert list(found[2]) == list(same_dtype[2])
    largest = max(g.abs().max().item() for g in oracle[2].values())
    for name, gradient in found[2].items():
        check(name, gradient, same_dtype[2][name], oracle[2][name], largest)


class Calls(TorchDispatchMode):
    """Counts the library's ops that run inside the `with`."""

    def __enter__(self):
        super().__enter__()
        self.counts = {}
        return self.counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilesmith":
            name = next(name for name, op in ops().items() if op.handle is function)
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def rows_of(model):
    return {(row.fqn, row.rule): row for row in model.tilesmith_report.rows}
