"""The preference losses as modules, with the names, defaults and argument orders of Liger's classes.

`loss(...)` returns (loss, metrics). Shapes: see `tilesmith.nn.preference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import choice, flag, integer, number, size
from tilesmith.nn.distillation import Options
from tilesmith.nn.policy import check_policy, grpo_loss
from tilesmith.nn.preference import (
    OddsMetrics,
    PairMetrics,
    SingleMetrics,
    check_options,
    kto_loss,
    preference_loss,
    sequence_log_probs,
)

DPO_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
)  # fmt: skip


class _FusedLinearLoss(Options):
    """What the losses share. chunk_size: how many pairs (KTO, GRPO: sequences) have their logits in memory at a time;
    0: the library chooses. compiled: accepted for callers of Liger's classes, without effect: nothing is compiled."""

    def __init__(self, ignore_index: int, compiled: bool, chunk_size: int, use_ref_model: bool):
        super().__init__()
        name = type(self).__name__
        integer(name, "ignore_index", ignore_index)
        size(name, "chunk_size", chunk_size, 0)
        flag(name, "compiled", compiled)
        flag(name, "use_ref_model", use_ref_model)
        self.ignore_index, self.compiled, self.chunk_size = ignore_index, compiled, chunk_size
        self.use_ref_model = use_ref_model

    def _flags(self, **options: bool) -> None:
        """Raise TypeError for an option that is neither True nor False."""
        for name, value in options.items():
            flag(type(self).__name__, name, value)

    def _reference(
        self, target: Tensor, ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None,
        average: bool, ref_logps: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        given = [n for n, t in (("ref_input", ref_input), ("ref_logps", ref_logps)) if t is not None]
        if len(given) != self.use_ref_model:
            raise ValueError(
                f"use_ref_model is {self.use_ref_model}, but given are {given or 'neither ref_input nor ref_logps'}; "
                "it takes one of them when true, none when false"
            )
        if ref_input is None:
            beside = [n for n, t in (("ref_weight", ref_weight), ("ref_bias", ref_bias)) if t is not None]
            if beside:
                raise ValueError(f"{beside[0]} is given without ref_input; pass both, or leave it out")
            return ref_logps
        if ref_weight is None:
            raise ValueError("ref_weight is None; the reference model's output layer is needed beside ref_input")
        with torch.no_grad():
            return sequence_log_probs(
                ref_input, ref_weight, target, ref_bias, average=average, ignore_index=self.ignore_index
            )


class FusedLinearDPOLoss(_FusedLinearLoss):
    """Direct preference optimisation (arXiv:2305.18290) and its variants, `loss_type` one of `DPO_TYPES`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 0,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ):
        super().__init__(ignore_index, compiled, chunk_size, use_ref_model)
        name = type(self).__name__
        choice(name, "loss_type", loss_type, DPO_TYPES)
        check_options(name, loss_type, beta, label_smoothing, 0.0, alpha, discopop_tau)
        self._flags(compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob)
        self.beta, self.alpha, self.compute_nll_loss = beta, alpha, compute_nll_loss
        self.average_log_prob, self.loss_type = average_log_prob, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
    ) -> tuple[Tensor, PairMetrics]:
        """ref_logps: the reference's log-probabilities [B] of the sequences, in place of its hidden states."""
        average = self.average_log_prob or self.loss_type == "ipo"
        return preference_loss(
            _input, lin_weight, target, bias, loss_type=self.loss_type, beta=self.beta,
            label_smoothing=self.label_smoothing, discopop_tau=self.discopop_tau,
            alpha=self.alpha if self.compute_nll_loss else 0.0, average_log_prob=average,
            ref_logps=self._reference(target, ref_input, ref_weight, ref_bias, average, ref_logps),
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip


class FusedLinearCPOLoss(_FusedLinearLoss):
    """Contrastive preference optimisation (arXiv:2401.08417): no reference model, and the likelihood of the chosen."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 0,
    ):
        super().__init__(ignore_index, compiled, chunk_size, False)
        check_options(type(self).__name__, "sigmoid", beta, label_smoothing, 0.0, alpha)
        self._flags(compute_nll_loss=compute_nll_loss, average_log_prob=average_log_prob)
        self.beta, self.alpha, self.label_smoothing = beta, alpha, label_smoothing
        self.compute_nll_loss, self.average_log_prob = compute_nll_loss, average_log_prob

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PairMetrics]:
        """See `preference_loss`."""
        return preference_loss(
            _input, lin_weight, target, bias, beta=self.beta, label_smoothing=self.label_smoothing,
            alpha=self.alpha if self.compute_nll_loss else 0.0, average_log_prob=self.average_log_prob,
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip


class FusedLinearSimPOLoss(_FusedLinearLoss):
    """Simple preference optimisation (arXiv:2405.14734): averaged log-probabilities, a margin gamma, no reference."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 0,
    ):
        super().__init__(ignore_index, compiled, chunk_size, False)
        check_options(type(self).__name__, "sigmoid", beta, label_smoothing, gamma, alpha)
        self._flags(compute_nll_loss=compute_nll_loss)
        self.beta, self.alpha, self.label_smoothing = beta, alpha, label_smoothing
        self.compute_nll_loss, self.gamma = compute_nll_loss, gamma

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, PairMetrics]:
        """See `preference_loss`."""
        return preference_loss(
            _input, lin_weight, target, bias, beta=self.beta, label_smoothing=self.label_smoothing, gamma=self.gamma,
            alpha=self.alpha if self.compute_nll_loss else 0.0, average_log_prob=True,
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip


class FusedLinearORPOLoss(_FusedLinearLoss):
    """Odds-ratio preference optimisation (arXiv:2403.07691): the chosen's likelihood and beta times the odds loss."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 0,
    ):
        super().__init__(ignore_index, compiled, chunk_size, False)
        number(type(self).__name__, "beta", beta, 0.0)
        self._flags(compute_nll_loss=compute_nll_loss)
        self.beta, self.compute_nll_loss = beta, compute_nll_loss

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, OddsMetrics]:
        """nll_target: labels of the likelihood term where they are not target; see `preference_loss`."""
        return preference_loss(
            _input, lin_weight, target, bias, loss_type="odds_ratio", beta=self.beta,
            alpha=1.0 if self.compute_nll_loss else 0.0, nll_target=nll_target, average_log_prob=True,
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip


class FusedLinearKTOLoss(_FusedLinearLoss):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), of single sequences that are desirable or not."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 0,
    ):
        super().__init__(ignore_index, compiled, chunk_size, use_ref_model)
        number(type(self).__name__, "beta", beta, 0.0)
        self._flags(average_log_prob=average_log_prob)
        self.beta, self.average_log_prob = beta, average_log_prob

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        *,
        ref_logps: Tensor | None = None,
    ) -> tuple[Tensor, SingleMetrics]:
        """preference_labels: bool [B]. kl: [B] or a scalar. ref_logps: as in `FusedLinearDPOLoss`."""
        return kto_loss(
            _input, lin_weight, target, preference_labels, bias, beta=self.beta, kl=kl,
            average_log_prob=self.average_log_prob,
            ref_logps=self._reference(target, ref_input, ref_weight, ref_bias, self.average_log_prob, ref_logps),
            ignore_index=self.ignore_index, chunk_size=self.chunk_size,
        )  # fmt: skip


class FusedLinearGRPOLoss(_FusedLinearLoss):
    """Group-relative policy optimisation and its relatives, `loss_type` one of `tilesmith.nn.policy.POLICIES`."""

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 0,
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
    ):
        super().__init__(-100, compiled, chunk_size, use_ref_model)
        self.options = {
            "beta": beta, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "loss_type": loss_type,
            "max_completion_length": max_completion_length, "importance_sampling_level": importance_sampling_level,
            "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
            "temperature": temperature, "delta": delta, "use_bias_correction_kl": use_bias_correction_kl,
            "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg,
            "vespo_lambda_neg": vespo_lambda_neg,
        }  # fmt: skip
        check_policy(type(self).__name__, **self.options)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """See `tilesmith.nn.policy.grpo_loss`."""
        reference = (ref_per_token_logps, ref_input)
        if sum(t is not None for t in reference) != self.use_ref_model:
            raise ValueError(
                f"use_ref_model is {self.use_ref_model}; it takes one of ref_per_token_logps and ref_input when true, "
                "none when false"
            )
        return grpo_loss(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias,
            ref_per_token_logps=ref_per_token_logps, old_per_token_logps=old_per_token_logps,
            ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch, chunk_size=self.chunk_size, **self.options,
        )  # fmt: skip
