"""Every causal language model of transformers at a tiny size: built, trained a step plain, optimised and undone.

python tests/all_families.py             # all of them, one line each
python tests/all_families.py bloom mpt   # these
"""

from __future__ import annotations

import copy
import gc
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from optimize_models import OPS, Calls, assert_within_budget, train
from tilesmith.engine import use
from tilesmith.models import optimize, undo

LARGEST = 8_000_000  # parameters of a model that counts as tiny
LENGTH = 12
SLOW = ("kimi_linear",)  # more than 30 s a run, plain

# What configurations call their sizes. A name that a configuration does not have is left out.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size",), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "shared_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "attention_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("pad_token_id",), 0), **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
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
}  # fmt: skip


# What some families need beside that: sizes that have to fit one another.
MORE = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
LATENT = {"num_key_value_heads": 4, "head_dim": None}  # where keys are made from a latent, each head has its own


@dataclass
class Result:
    """What came of a family: "right", "wrong" or "not built", with numbers of calls or the reason; (rule, class,
    reason) of what was replaced and of what was left."""

    family: str
    outcome: str
    told: str = ""
    rows: frozenset[tuple[str, str, str]] = frozenset()
    left: frozenset[tuple[str, str, str]] = frozenset()


def families() -> dict[str, type]:
    """model_type -> class of its causal language model, in alphabetical order."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return dict(sorted(names.items()))


def build(family: str):
    """A tiny model of a family in training mode, or ValueError with the reason there is none."""
    import transformers

    transformers.logging.set_verbosity_error()
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    plain = config_class()
    text = plain.get_text_config()
    if text is not plain:
        raise ValueError("its configuration holds another one")
    known = {**plain.to_dict(), **getattr(plain, "attribute_map", {})}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:
        sizes = {name: size for name, size in {**sizes, **LATENT}.items() if name in sizes and size is not None}
    config = config_class(**{**sizes, **MORE.get(family, {})})
    for name in config.to_dict():
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others take no float64
    model_class = getattr(transformers, families()[family])
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
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def batch() -> dict[str, torch.Tensor]:
    """Two rows, the second one padded."""
    ids = torch.randint(3, 120, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, -3:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(family: str) -> Result:
    """Plain, optimised with the references pinned, undone."""
    try:
        model, inputs = build(family), batch()
        torch.manual_seed(0)
        plain = train(model, inputs, use_cache=False)
        again = [train(model, inputs, use_cache=False) for _ in range(3)]
        if not all(torch.equal(plain[1], one[1]) for one in again) or not _finite(plain):
            return Result(family, "not built", "the plain model draws numbers, or gives NaN or infinities")
        oracle = train(copy.deepcopy(model).double(), inputs, use_cache=False)
        if not _finite(oracle):
            return Result(family, "not built", "in float64 the plain model gives NaN or infinities")
    except Exception as problem:
        told = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return Result(family, "not built", told[:160])
    with use(**dict.fromkeys((*OPS, "relu_squared"), "reference")):
        report = optimize(model).tilesmith_report
        with Calls() as calls:
            found = train(model, inputs, use_cache=False)
    rows, left = (
        frozenset((row.rule, row.cls, row.reason) for row in kind if row.rule)
        for kind in (report.replaced, report.skipped)
    )
    try:
        _within_budget(found, plain, oracle)
        back = train(undo(model), inputs, use_cache=False)
        assert torch.equal(back[0], plain[0]) and torch.equal(back[1], plain[1]), "undo: other logits"
        assert all(torch.equal(back[2][name], g) for name, g in plain[2].items()), "undo: other gradients"
    except AssertionError as problem:
        return Result(family, "wrong", str(problem).splitlines()[0], rows, left)
    told = ", ".join(f"{op} {n}" for op, n in sorted(calls.items()) if not op.endswith("_vjp"))
    return Result(family, "right", told, rows, left)


def _finite(step: tuple) -> bool:
    return all(bool(t.isfinite().all()) for t in step[:2])


def _within_budget(found: tuple, plain: tuple, oracle: tuple) -> None:
    """`assert_within_budget`, where the loss may have the error of the plain model's logits, of which it is made: its
    own is 0 now and then."""
    loss = plain[0].double() - oracle[0]
    logits = (plain[1].double() - oracle[1]).abs().max()
    allowed = oracle[0] + torch.maximum(loss.abs(), logits)
    assert_within_budget(found, (allowed.to(plain[0].dtype), *plain[1:]), oracle)


def main(names: list[str]) -> int:
    """Run families and print a line for each; the exit status says whether one was wrong."""
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()
    for family in names or families():
        start = time.perf_counter()
        result = run(family)
        outcomes[result.outcome] += 1
        print(f"{result.outcome:<10}{family:<24}{time.perf_counter() - start:5.1f} s  {result.told}", flush=True)
        if names:
            for rule, cls, reason in sorted(result.left):
                print(f"    {rule}: {cls}: {reason}")
        gc.collect()
    print(", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
    return outcomes["wrong"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
