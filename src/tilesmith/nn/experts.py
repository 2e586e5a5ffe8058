"""Mixture of experts: a router, the experts, and the feed-forward layer that they make."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilesmith import ops
from tilesmith.engine.argument_checks import choice, divides, flag, number, size
from tilesmith.nn.mlp import GATED, GatedMLP
from tilesmith.nn.norm import casting_child

ACTIVATIONS = ("swiglu", "geglu", "geglu_erf", "relu_squared")


class Router(nn.Module):
    """Chooses the experts of each token: `ops.route` of a linear layer without bias.

    The options are those of `ops.route`. corrected: whether a buffer `e_score_correction_bias` [E], 0 at first, is
    added to the scores for the choice (DeepSeek-V3); nothing here changes it. Raises ValueError for sizes below 1 and
    for what `ops.route` refuses.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        kept_groups: int = 1,
        group_score: str = "top2",
        corrected: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts), ("top_k", top_k)):
            size("Router", name, value)
        choice("Router", "scores", scores, ("softmax", "sigmoid"))
        choice("Router", "group_score", group_score, ("top2", "max"))
        flag("Router", "normalise", normalise)
        flag("Router", "corrected", corrected)
        number("Router", "scale", scale)
        divides("Router", "groups", size("Router", "groups", groups), "num_experts", num_experts)
        if size("Router", "kept_groups", kept_groups) > groups:
            raise ValueError(
                f"Router: kept_groups is {kept_groups}; it must be from 1 to groups, {groups}: keep fewer, or give more"
            )
        most = num_experts // groups * kept_groups
        if top_k > most:
            raise ValueError(
                f"Router: top_k is {top_k}; there are {most} experts to choose from: give top_k that many at most"
            )
        self.top_k, self.scores, self.normalise, self.scale = top_k, scores, normalise, scale
        self.groups, self.kept_groups, self.group_score = groups, kept_groups, group_score
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if corrected else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02, corrections of 0."""
        nn.init.normal_(self.weight, std=0.02)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(weights and indices [..., K] of `ops.route`, logits [..., E]) of tokens x [..., C]; logits have x's dtype or
        autocast's."""
        logits = ops.linear(x, self.weight)
        weights, indices = ops.route(
            logits,
            self.top_k,
            self.e_score_correction_bias,
            self.scores,
            self.groups,
            self.kept_groups,
            self.group_score,
            self.normalise,
            self.scale,
        )
        return weights, indices, logits

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"{hidden}, experts={experts}, top_k={self.top_k}, scores={self.scores!r}"


class Experts(nn.Module):
    """Experts as gated MLPs: `ops.experts` on stacked weights, with the names and layout of transformers' experts.

    gate_up_proj: [E, 2 I, C] (relu_squared, which has no gate: [E, I, C]); down_proj: [E, C, I].
    activation: "swiglu", "geglu", "geglu_erf" or "relu_squared". Raises ValueError for another and for sizes below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        activation: str = "swiglu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        for name, value in sizes.items():
            size("Experts", name, value)
        self.activation = choice("Experts", "activation", activation, ACTIVATIONS)
        wide = intermediate_size if activation == "relu_squared" else 2 * intermediate_size
        how = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, wide, hidden_size, **how))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **how))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02."""
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=0.02)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Σ_k weights[..., k] · expert indices[..., k] of x [..., C]."""
        child = casting_child(self, x)
        if child is not None:
            return child(x, indices, weights)
        return ops.experts(x, self.gate_up_proj, self.down_proj, indices, weights, activation=self.activation)

    def extra_repr(self) -> str:
        experts, hidden, inner = self.down_proj.shape
        return f"{hidden}, {inner}, experts={experts}, activation={self.activation!r}"


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of routed experts, with shared experts beside them where `shared_size` is above 0.

    shared_size: inner width of a `GatedMLP` that every token goes through, 0 for none; it needs an activation with a
    gate. scores: as in `Router`, whose other options keep their defaults. The other arguments: as in `Experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str = "swiglu",
        *,
        shared_size: int = 0,
        scores: str = "softmax",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        size("MixtureOfExperts", "shared_size", shared_size, 0)
        if shared_size and activation in ACTIVATIONS and activation not in GATED:
            raise ValueError(
                f"MixtureOfExperts: shared_size is {shared_size} with activation {activation!r}, which has no gate; "
                f"shared experts have one: leave shared_size out, or take one of {', '.join(map(repr, GATED))}"
            )
        how = {"device": device, "dtype": dtype}
        self.gate = Router(hidden_size, num_experts, top_k, scores=scores, **how)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation, **how)
        self.shared_experts = GatedMLP(hidden_size, shared_size, activation, **how) if shared_size else None

    def forward(self, x: Tensor, losses: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """x [..., C] to [..., C]. losses: where `ops.router_losses` of this call are appended."""
        weights, indices, logits = self.gate(x)
        if losses is not None:
            losses.append(ops.router_losses(logits, indices, self.gate.scores))
        y = self.experts(x, indices, weights)
        return y if self.shared_experts is None else y + self.shared_experts(x)
