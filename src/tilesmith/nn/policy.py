"""Policy-gradient losses of completions from hidden states and the output layer's weight: GRPO and its relatives.

Legend: B completions, T tokens, K features, V classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, flag, number, positive, shaped, size, tensor
from tilesmith.ops.loss.formulas import PolicyOptions, policy_terms

# loss type -> its formula in ops.loss.formulas; they differ besides in what divides the sum over tokens
POLICIES = {
    "grpo": "clip", "bnpo": "clip", "dr_grpo": "clip", "dapo": "clip", "luspo": "clip",
    "cispo": "cispo", "sapo": "sapo", "vespo": "vespo",
}  # fmt: skip
IGNORED = -100


class PolicyMetrics(NamedTuple):
    """Detached means over the mask: the KL estimate to the reference, and the share of clipped tokens."""

    kl: Tensor
    clip_ratio: Tensor


def grpo_loss(
    x: Tensor,
    weight: Tensor,
    selected_token_ids: Tensor,
    attention_mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    ref_per_token_logps: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_input: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    vllm_is_ratio: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    chunk_size: int = 0,
    accumulate_fp32: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, PolicyMetrics]:
    """A clipped policy-gradient loss of completions, plus beta times the k3 estimate of the KL to a reference.

    With p the log-probabilities at `temperature`, ratio = exp(p − old) (without old_per_token_logps exp(0), through
    which the gradient still flows) and A the advantages [B], a token costs −min(min(ratio, delta) · A, clip(ratio) · A)
    + beta · kl; "cispo", "sapo" and "vespo" have terms of their own (papers: `ops.loss.formulas.FORMULAS`). With
    importance_sampling_level "sequence" there is one ratio a completion, of mean log-ratio (GSPO). vllm_is_ratio ([B],
    [B, 1] or [B, T]) multiplies the first term ("vespo" weighs by it). use_bias_correction_kl: kl times ratio. "cispo"
    caps the ratio at epsilon_high itself, not at 1 + epsilon_high: the default would cap it at 0.2. Without a reference
    there is no kl, whatever beta is.

    What divides the sum over the mask: "grpo", "sapo" each completion's tokens, then B; "bnpo" the tokens of the batch;
    "dr_grpo" B · max_completion_length; "dapo", "cispo", "vespo" num_items_in_batch, or the tokens of all ranks, over
    the number of ranks; "luspo" B alone, so that a completion of one ratio weighs as many times as it has tokens. Ids,
    log-probabilities and ratios of tokens outside the mask are not read.

    x: [B, T, K]. weight: [V, K]. selected_token_ids, attention_mask: [B, T]. The reference's log-probabilities come as
    ref_per_token_logps [B, T] or are computed from ref_input, ref_weight, ref_bias. chunk_size: completions whose
    logits are in memory at a time; 0: the library chooses. The rest: see `ops.linear_preference`.

    Returns the loss, fp32, and `PolicyMetrics`.
    """
    kind = check_policy(
        "grpo_loss", loss_type=loss_type, importance_sampling_level=importance_sampling_level,
        max_completion_length=max_completion_length, delta=delta, temperature=temperature, beta=beta,
        epsilon_low=epsilon_low, epsilon_high=epsilon_high, use_bias_correction_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
    )  # fmt: skip
    tensor("grpo_loss", "x", x)
    tensor("grpo_loss", "selected_token_ids", selected_token_ids, ("B", "T"))
    tensor("grpo_loss", "attention_mask", attention_mask)
    size("grpo_loss", "chunk_size", chunk_size, 0)
    for name, value in {"accumulate_fp32": accumulate_fp32, "recompute": recompute}.items():
        flag("grpo_loss", name, value)
    plane, device = tuple(selected_token_ids.shape), x.device
    shaped("grpo_loss", "attention_mask", attention_mask, plane, device=device)
    tensor("grpo_loss", "advantages", advantages)
    shaped("grpo_loss", "advantages", advantages, plane[:1], device=device)
    shaped("grpo_loss", "ref_per_token_logps", ref_per_token_logps, plane, device=device)
    shaped("grpo_loss", "old_per_token_logps", old_per_token_logps, plane, device=device)
    shaped("grpo_loss", "vllm_is_ratio", vllm_is_ratio, plane[:1], (plane[0], 1), plane, device=device)
    _check_reference(ref_per_token_logps, ref_input, ref_weight, ref_bias)
    _check_items(num_items_in_batch)
    acc = torch.promote_types(x.dtype, torch.float32)
    mask = attention_mask.to(acc)
    weights, divisor = _weights(loss_type, mask, max_completion_length, num_items_in_batch)
    target = selected_token_ids.masked_fill(mask == 0, IGNORED)
    if ref_input is not None:
        with torch.no_grad():
            ref_per_token_logps = ops.linear_log_probs(
                ref_input, ref_weight, target, ref_bias, IGNORED, 1 / temperature
            )
    use_reference = ref_per_token_logps is not None and beta != 0
    importance = (
        None if vllm_is_ratio is None else vllm_is_ratio.view(-1, 1) if vllm_is_ratio.ndim == 1 else vllm_is_ratio
    )
    rows = [weights, mask, old_per_token_logps, ref_per_token_logps if use_reference else None, importance]
    tokens = torch.stack([r.detach().to(acc).expand(mask.shape) for r in rows if r is not None])
    options = PolicyOptions(
        beta, epsilon_low, epsilon_high, float("inf") if delta is None else delta,
        float(importance_sampling_level == "sequence"), float(use_bias_correction_kl),
        float(old_per_token_logps is not None), float(use_reference), float(importance is not None),
        sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
    )  # fmt: skip
    sequences = advantages.detach().to(acc)[None]
    if kind == "vespo":
        logs = torch.zeros_like(sequences[0])
        if importance is not None:
            logs = importance.to(acc).log().clamp(-18.42068, 20)
            logs = (logs if vllm_is_ratio.shape != plane else torch.where(mask != 0, logs, 0.0)).sum(-1)
        sequences = torch.stack((sequences[0], logs))
    total, log_probs = ops.linear_preference(
        x, weight, target, sequences, kind, options, bias, tokens,
        IGNORED, 1 / temperature, 0.0, chunk_size * mask.shape[1], accumulate_fp32, recompute,
    )  # fmt: skip
    with torch.no_grad():
        terms = policy_terms(kind, log_probs.detach(), sequences, tokens, options)
        kl = terms.kl * terms.ratio if use_bias_correction_kl else terms.kl
        counted = mask.sum().clamp(min=1)
        metrics = PolicyMetrics((kl * mask).sum() / counted, (terms.clipped * mask).sum() / counted)
    return total / divisor, metrics


def check_policy(of: str, **options: Any) -> str:
    """The formula's name; TypeError or ValueError, in the name of `of`, for options that have no meaning or do not go
    together. options: those of `grpo_loss` by name."""
    loss_type, level, delta = (options[name] for name in ("loss_type", "importance_sampling_level", "delta"))
    kind = POLICIES[choice(of, "loss_type", loss_type, tuple(POLICIES))]
    choice(of, "importance_sampling_level", level, ("token", "sequence"))
    flag(of, "use_bias_correction_kl", options["use_bias_correction_kl"])
    for name in ("beta", "epsilon_low", "epsilon_high"):
        number(of, name, options[name], 0.0)
    positive(of, "temperature", options["temperature"])
    for name in (n for n in options if n.startswith(("sapo_", "vespo_"))):
        positive(of, name, options[name])
    if level == "sequence" and kind != "clip":
        raise ValueError(
            f"{of}: importance_sampling_level is 'sequence', which {loss_type!r} does not have; use 'token'"
        )
    if options["max_completion_length"] is not None:
        size(of, "max_completion_length", options["max_completion_length"])
    elif loss_type == "dr_grpo":
        raise ValueError(f"{of}: max_completion_length is None; 'dr_grpo' divides by it, so give the longest length")
    if delta is not None:
        positive(of, "delta", delta)
        if kind != "clip":
            raise ValueError(f"{of}: delta is {delta}; {loss_type!r} does not clip, so leave it None")
    return kind


def _check_reference(
    log_probs: Tensor | None, ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None
) -> None:
    """Raise ValueError for parts of a reference model that do not go together: one of them would be ignored."""
    if ref_input is None:
        given = [n for n, t in (("ref_weight", ref_weight), ("ref_bias", ref_bias)) if t is not None]
        if given:
            raise ValueError(
                f"grpo_loss: {given[0]} is given without ref_input; give the hidden states, or leave it out"
            )
    elif log_probs is not None:
        raise ValueError("grpo_loss: both ref_per_token_logps and ref_input are given; give one of the two")
    elif ref_weight is None:
        raise ValueError("grpo_loss: ref_weight is None; ref_input needs the reference model's output layer beside it")


def _check_items(count: Tensor | int | None) -> None:
    """Raise TypeError or ValueError unless num_items_in_batch is a number, 0 or more, or a tensor of one."""
    if isinstance(count, Tensor):
        shaped("grpo_loss", "num_items_in_batch", count, (), (1,))
    elif count is not None:
        number("grpo_loss", "num_items_in_batch", count, 0.0)


def _weights(
    loss_type: str, mask: Tensor, max_completion_length: int | None, num_items_in_batch: Tensor | int | None
) -> tuple[Tensor, Tensor | float]:
    """Each token's weight in the sum, and what divides the sum."""
    lengths, batch = mask.sum(-1, keepdim=True), max(1, mask.shape[0])
    if loss_type in ("grpo", "sapo"):
        return mask / lengths.clamp(min=1), batch
    if loss_type == "bnpo":
        return mask, mask.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return mask, batch * max_completion_length
    if loss_type == "luspo":
        return mask, batch
    return mask, _tokens_of_a_rank(mask, num_items_in_batch)


def _tokens_of_a_rank(mask: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | float:
    """The tokens of the whole batch over the number of ranks, whose gradients data parallelism averages; 1 at least."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if num_items_in_batch is None:
        count = mask.sum()
        if distributed:
            torch.distributed.all_reduce(count)
    elif isinstance(num_items_in_batch, Tensor):
        count = num_items_in_batch.to(mask).reshape(())
    else:
        return max(1.0, num_items_in_batch / ranks)
    return (count / ranks).clamp(min=1)
