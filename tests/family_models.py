"""Tiny models of the families of transformers, one for each task that a family has a model for, and their inputs."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

LARGEST = 10_000_000  # parameters of a model that counts as tiny
LENGTH = 12
SLOW = (  # more than 30 s a run, plain, or several times what others take
    "causal_lm/kimi_linear",
    "image_classification/mobilevit",
    "image_classification/mobilevitv2",
    "image_classification/perceiver",
    "masked_lm/funnel",
    "seq2seq_lm/pegasus_x",
)

# What configurations call their sizes. A name that a configuration does not have is left out.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "emb_dim", "output_hidden_size", "classifier_proj_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "shared_intermediate_size", "intermediate_size_mlp", "hidden_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "num_encoder_attention_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "attention_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "tgt_vocab_size", "src_vocab_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "chunk_size"), 4),
    "attention_window": 4,
    **dict.fromkeys(("entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), 128),
    **dict.fromkeys(("d_latents", "num_latents"), 32),
    **dict.fromkeys(("pad_token_id", "blank_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "decoder_bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "decoder_eos_token_id"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_dim", "mamba_dt_rank"), 16),
    **dict.fromkeys(("time_step_rank",), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_expand", "expand"), 1),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    **dict.fromkeys(("hidden_size_per_layer_input", "lru_width", "num_mem_blocks"), 64),
    **dict.fromkeys(("query_pre_attn_scalar",), 16),
    # of images and of sound
    "image_size": 32,
    "embed_dim": 32,
    "max_source_positions": LENGTH,
    "max_target_positions": 64,
    **dict.fromkeys(("num_mel_bins", "num_conv_pos_embeddings"), 16),
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
LISTS = {
    **dict.fromkeys(("depths", "depth", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("embed_dim", "hidden_sizes", "embed_dims", "conv_dim"), 32),
    **dict.fromkeys(("stage_mid_channels",), 16),
}

_INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 8,
    "unpadded_vocab_size": 120, "loop_gate_rank": 8, "n_layers_per_attn_res_block": 1,
}  # fmt: skip
# What some families need beside that: sizes that have to fit one another, draws that are left out.
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "bit": {"num_groups": 4},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "cvt": {"depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
    "swin": {"window_size": 2, "image_size": 64},
    "donut-swin": {"window_size": 2, "image_size": 64},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 8}, "context_size": 8},
    "reformer": {"axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 48], "hash_seed": 1},
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {**_INKLING, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2},
    "xmod": {"default_language": "en_XX"},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
LATENT = {"num_key_value_heads": 4, "head_dim": None}  # where keys are made from a latent, each head has its own

TASKS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech_seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}


def families() -> dict[str, str]:
    """ "task/model_type" -> name of the class of the model, by task and alphabet; each class in one task."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task, mapping in TASKS.items():
        earlier = set(found.values())
        for family, names in sorted(getattr(modeling_auto, mapping).items()):
            name = names if isinstance(names, str) else names[0]
            if name not in earlier:
                found[f"{task}/{family}"] = name
    return found


def build(name: str) -> torch.nn.Module:
    """A tiny model of "task/model_type" in training mode, or ValueError with the reason there is none."""
    import transformers

    transformers.logging.set_verbosity_error()
    _, family = name.split("/")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    config = _sized(config_class, MORE.get(name, MORE.get(family, {})))
    for one in _with_inner(config):
        _without_draws(one)
    if "seq2seq" in name and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if hasattr(config, "is_decoder") and name.startswith("causal_lm/"):
        config.is_decoder = True
    model_class = getattr(transformers, families()[name])
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"it has {count / 1e6:.0f} million parameters at these sizes")
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    if getattr(model, "loss_type", "") is None and name.startswith("causal_lm/"):
        model.loss_type = "ForCausalLM"
    return model


def _sized(config_class: type, more: dict[str, Any]) -> Any:
    """A configuration at tiny sizes, and those that it holds, too."""
    plain = config_class()
    known = {**plain.to_dict(), **getattr(plain, "attribute_map", {})}
    target = {name: known.get(value, value) for name, value in getattr(plain, "attribute_map", {}).items()}
    lists = {name for name, value in {**known, **target}.items() if isinstance(value, (list, tuple))}
    sizes = {name: size for name, size in SIZES.items() if name in known and name not in lists}
    for name, size in LISTS.items():
        if isinstance(known.get(name), (list, tuple)):
            sizes[name] = [size] * len(known[name])
    if "kv_lora_rank" in sizes:
        sizes = {name: size for name, size in {**sizes, **LATENT}.items() if name in sizes and size is not None}
    inner = {name: value for name, value in vars(plain).items() if _is_config(value)}
    held = {name: _sized(type(value), more.get(name, {})) for name, value in inner.items()}
    return config_class(**{**sizes, **held, **{name: v for name, v in more.items() if name not in held}})


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _with_inner(config: Any) -> list[Any]:
    inner = [value for value in vars(config).values() if _is_config(value)]
    return [config, *(one for value in inner for one in _with_inner(value))]


def _without_draws(config: Any) -> None:
    """No dropout, no masks over time or features, and experts that take float64."""
    for name in config.to_dict():
        # some attributes cannot be read: in that they differ from layer to layer
        if ("drop" in name or name.endswith("_mask_prob")) and isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
        if name in ("mask_time_prob", "mask_feature_prob"):
            setattr(config, name, 0.0)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    if hasattr(config, "ctc_zero_infinity"):
        config.ctc_zero_infinity = True


def inputs_of(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Two rows with labels; of text the second one is padded."""
    generator = torch.Generator().manual_seed(1)
    first = next(iter(inspect.signature(model.forward).parameters))
    task = name.split("/")[0]
    ids = torch.randint(3, 120, (2, LENGTH), generator=generator)
    if name == "image_classification/imagegpt":
        return {"input_ids": ids, "labels": torch.tensor([0, 1])}
    if name == "image_classification/siglip2":  # patches
        patches, whole = torch.randn(2, 16, 768, generator=generator), torch.ones(2, 16, dtype=torch.long)
        more = {"pixel_attention_mask": whole, "spatial_shapes": torch.full((2, 2), 4)}
        return {"pixel_values": patches, **more, "labels": torch.tensor([0, 1])}
    if task == "image_classification":
        return {"pixel_values": _image(model.config, generator), "labels": torch.tensor([0, 1])}
    if first in ("input_features", "input_values"):
        labels = ids[:, :3] if task == "ctc" else ids
        sound = _sound(first, model, generator)
        whole = torch.ones(sound.shape[:2], dtype=torch.long)
        more = {"attention_mask": whole} if task == "ctc" and first == "input_features" else {}
        if name == "ctc/omniasr_ctc":  # its loss counts the frames by it
            more = {"padding_mask": torch.ones_like(sound[:, 0])}
        return {first: sound, **more, "labels": labels}
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, -3:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _image(config: Any, generator: torch.Generator) -> torch.Tensor:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 64)
    size = size if isinstance(size, int) else size[0]
    return torch.randn(2, getattr(config, "num_channels", 3), size, size, generator=generator)


_BINS = ("num_mel_bins", "feature_projection_input_dim")


def _sound(kind: str, model: torch.nn.Module, generator: torch.Generator) -> torch.Tensor:
    """A wave, or a spectrogram: frames in rows, or (Whisper) in columns."""
    if kind == "input_values":
        channels = (1,) if model.config.model_type.startswith("omniasr") else ()
        return torch.randn(2, *channels, 4000, generator=generator)
    known = _with_inner(model.config)
    bins = next((getattr(c, name) for c in known for name in _BINS if hasattr(c, name)), 80)
    if model.config.model_type == "whisper":
        return torch.randn(2, bins, 2 * model.config.max_source_positions, generator=generator)
    return torch.randn(2, 2 * LENGTH, bins, generator=generator)
