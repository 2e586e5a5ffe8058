"""create_ultra_precision_module: a model whose linear layers are packed, with the widths that a strategy chose."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision.adaptive.calibration import Calibration, Loss, calibration_of, check_fit
from tilesmith.precision.adaptive.choice import (
    Widths,
    by_layer,
    by_tile,
    dealt,
    informations,
    layer_bytes,
    uniform,
    widest,
)
from tilesmith.precision.adaptive.config import AllocationStrategy, PrecisionConfig, QuantizationMode
from tilesmith.precision.adaptive.layer import PackedLinear, pack_layer
from tilesmith.precision.adaptive.layers import (
    base_bytes,
    bytes_of,
    check_model,
    device_of,
    eligible,
    place,
    structure_of,
    unchanged,
)
from tilesmith.precision.adaptive.packed_file import write
from tilesmith.precision.adaptive.sensitivity import Seen, observe
from tilesmith.precision.adaptive.stats import LayerPrecision, Made, PrecisionStats

log = logging.getLogger(__name__)

OP = "create_ultra_precision_module"


class UltraPrecisionModule(nn.Module):
    """A model whose linear layers are `PackedLinear`s. Made by `create_ultra_precision_module` or
    `load_ultra_precision_module`; called as the model is.

    model: the packed model. config: what it was made for.
    """

    def __init__(self, model: nn.Module, config: PrecisionConfig, made: Made):
        super().__init__()
        self.model, self.config, self._made = model, config, made
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def get_precision_stats(self) -> PrecisionStats:
        """What the model takes now, from its tensors, and how the widths were chosen."""
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, PackedLinear)}
        rows = {
            name: LayerPrecision(
                (m.out_features, m.in_features),
                8 * m.packed_bytes() / (m.out_features * m.in_features),
                m.packed_bytes(),
                m.tile_counts(),
                self._made.shares.get(name),
            )
            for name, m in layers.items()
        }
        total, packed = bytes_of(self.model), sum(row.bytes for row in rows.values())
        weights = sum(m.out_features * m.in_features for m in layers.values())
        return PrecisionStats(
            1 - total / self._made.base_bytes,
            total,
            self._made.base_bytes,
            self._made.original_bytes,
            packed,
            8 * packed / weights,
            rows,
            dict(self._made.skipped),
            self._made.strategy,
            self._made.fallback,
            dict(self._made.held_out),
        )

    def save_packed(self, path: str) -> None:
        """Write the model to one safetensors file; see `load_ultra_precision_module`."""
        write(path, self.model, self.config, self._made)


@torch.inference_mode(False)  # what is made in it could not be differentiated later
def create_ultra_precision_module(
    model: nn.Module,
    config: PrecisionConfig | None = None,
    device: torch.device | None = None,
    *,
    calibration: Any = None,
    loss_fn: Loss | None = None,
) -> UltraPrecisionModule:
    """Pack the linear layers of `model` in 2 to 8 bits a weight, so that its size falls by `target_memory_reduction`.

    Args:
        model: any module; it is not changed. The packed model shares its other tensors with it, unless it moves to
        another device.
        config: see `PrecisionConfig`; None: its defaults.
        device: where the packed model is made and stays; None: where the model is.
        calibration: inputs as the model will get them: a tensor whose rows are samples, or a sequence of batches
            (tensors, tuples, dicts). Three quarters measure how sensitive the loss is to each weight. On the rest the
            chosen widths must give a lower loss than one width for all tiles, and than two widths assigned regardless
            of the weights in the same number of bytes; otherwise the better of these two is used. None: one width for
            all tiles, since choosing by the entropy of weights alone was measured to be worse.
        loss_fn: (model, batch) -> mean loss; None: how far outputs are from the original's.

    Without calibration, or where the check fails, `get_precision_stats().fallback` says so.

    Returns:
        The packed model, each module in the mode (train or eval) that it is in within `model`. Its weights are frozen.

    Raises:
        TypeError: an argument of another type. ValueError: no layer is eligible, a parameter is on meta, the target
        cannot be reached, calibration is missing where the config needs it, does not fit the model or gets no gradients
        through it. `model` is then as it was.
    """
    check_model(OP, model)
    if config is not None and not isinstance(config, PrecisionConfig):
        raise TypeError(f"{OP}: config must be a PrecisionConfig, got {type(config).__name__}")
    config = config or PrecisionConfig()
    device = device_of(OP, device)
    if any(isinstance(m, PackedLinear) for m in model.modules()):
        raise ValueError(f"{OP}: the model is packed already")
    if calibration is None and config.quantization_mode is QuantizationMode.STATIC:
        raise ValueError(f"{OP}: QuantizationMode.STATIC rounds by the layers' inputs; pass calibration=")
    if calibration is None and config.weighted:
        raise ValueError(f"{OP}: gradient_weight and activation_weight weigh calibration data; pass calibration=")
    given = None if calibration is None else calibration_of(calibration, loss_fn, device)
    if given is None and loss_fn is not None:
        raise ValueError(f"{OP}: loss_fn needs calibration= as well")
    chosen, skipped = eligible(model)
    if not chosen:
        raise ValueError(f"{OP}: no linear layer is eligible ({_reasons(skipped) or 'it has none'})")
    base, original = base_bytes(model, config.base_precision), bytes_of(model)
    budget = _budget(model, chosen, skipped, config, base)
    work = structure_of(model, device)
    layers = {name: work.get_submodule(name) for name in chosen}
    modes = {name: module.training for name, module in work.named_modules()}
    with unchanged(work.eval()):
        if given is not None:
            check_fit(given, work)
        packer = _Packer(work, layers, config, given)
        widths, made = packer.choose(budget)
    work = place(work, packer.packed(widths))
    for name, training in modes.items():
        work.get_submodule(name).training = training
    made = Made(base, original, skipped, **made)
    if made.fallback:
        log.warning("%s", made.fallback)
    packed = UltraPrecisionModule(work, config, made)
    return packed.to(device) if device is not None else packed


def _reasons(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(skipped.items())[:5])


def _budget(
    model: nn.Module, chosen: Mapping[str, nn.Linear], skipped: Mapping[str, str], config: PrecisionConfig, base: int
) -> int:
    """Bytes for the packed weights. ValueError where the target leaves less than the narrowest width takes."""
    rest = bytes_of(model) - sum(layer.weight.nbytes for layer in chosen.values())
    budget = int((1 - config.target_memory_reduction) * base) - rest
    least = sum(layer_bytes(layer, config.widths[0]) for layer in chosen.values())
    if budget < least:
        most = 1 - (rest + least) / base
        raise ValueError(
            f"{OP}: target_memory_reduction is {config.target_memory_reduction}, but at most {most:.3f} can be had: "
            f"what is not packed takes {rest} bytes, the packed layers at {config.widths[0]} bits {least}, and the "
            f"model in {config.base_precision.name} {base}. Lower the target or entropy_threshold, or cast the model "
            "to 16 bits first" + (f". Of linear layers these stay: {_reasons(skipped)}" if skipped else "")
        )
    return budget


class _Packer:
    """Makes packed layers of a working copy, whose own layers stay."""

    def __init__(
        self, work: nn.Module, layers: Mapping[str, nn.Linear], config: PrecisionConfig, given: Calibration | None
    ):
        self.work, self.layers, self.config, self.given = work, layers, config, given
        self.seen: Mapping[str, Seen] = {}
        self.information: Mapping[str, Tensor] = {}
        if given is not None:
            static = config.quantization_mode is QuantizationMode.STATIC
            self.seen = observe(work, layers, given, hessians=static)
            self.information = informations(self.seen, config)
            unseen = [name for name, one in self.seen.items() if not one.rows]
            if unseen:
                log.warning(
                    "%s: no calibration row reached %s (%d layers in all), which are taken for average; pass more data",
                    OP, ", ".join(unseen[:3]), len(unseen),
                )  # fmt: skip

    def packed(self, widths: Widths) -> dict[str, PackedLinear]:
        return {name: self.one(name, w) for name, w in widths.items()}

    def one(self, name: str, widths: Tensor) -> PackedLinear:
        seen = self.seen.get(name)
        hessian = None if seen is None or seen.hessian is None else seen.hessian / max(1, seen.rows)
        return pack_layer(self.layers[name], widths, self.information.get(name), hessian)

    def choose(self, budget: int) -> tuple[Widths, dict[str, Any]]:
        """Widths for so many bytes, and how they came about."""
        plain = uniform(self.layers, widest(self.layers, self.config.widths, budget))
        strategy = self.config.allocation_strategy
        if strategy is AllocationStrategy.UNIFORM:
            return plain, {"strategy": strategy.value}
        if self.given is None:
            reason = (
                f"{strategy.value} widths need calibration data, and none was given; the widths are uniform. Pass "
                "calibration= to have them chosen"
            )
            return plain, {"strategy": AllocationStrategy.UNIFORM.value, "fallback": reason}
        references = self.given.references(self.work)
        original = self.given.loss(self.work, references)
        if strategy is AllocationStrategy.MEASURED:
            widths, shares = by_layer(self.layers, self._measured(), self.config, budget)
        else:
            widths, shares = by_tile(self.layers, self.information, self.config, budget)
        if all(torch.equal(widths[name], one) for name, one in plain.items()):
            return plain, self._without_a_choice(plain, original, references)
        arms = {"uniform": plain, "dealt": dealt(self.layers, self.config.widths, widths), "adaptive": widths}
        losses = {"original": original} | {name: self._loss_of(arm, references) for name, arm in arms.items()}
        best = "dealt" if losses["dealt"] < losses["uniform"] else "uniform"
        if not losses["adaptive"] < losses[best]:
            used = {"dealt": "the two widths are used", "uniform": "the one width is used"}[best]
            reason = (
                f"{strategy.value} widths did not win: their loss on held-out batches is {losses['adaptive']:.6g}, "
                f"that of one width for all tiles {losses['uniform']:.6g}, and that of two widths dealt over the tiles "
                f"regardless of the weights, in as many bytes, {losses['dealt']:.6g}; {used}"
            )
            return arms[best], {"strategy": AllocationStrategy.UNIFORM.value, "fallback": reason, "held_out": losses}
        total = sum(shares.values())
        shares = {name: share / total if total > 0 else 0.0 for name, share in shares.items()}
        return widths, {"strategy": strategy.value, "held_out": losses, "shares": shares}

    def _without_a_choice(self, plain: Widths, original: float, references: list[Tensor] | None) -> dict[str, Any]:
        """How widths came about that are one width for all tiles, which a strategy chose as well."""
        width = int(next(iter(plain.values())).flatten()[0])
        strategy, loss = self.config.allocation_strategy.value, self._loss_of(plain, references)
        reason = (
            f"{strategy} widths are {width} bits for all tiles, as uniform ones are: target_memory_reduction, "
            f"{self.config.target_memory_reduction}, leaves nothing to choose"
            + ("; a higher one does" if width == self.config.widths[-1] else "")
        )
        losses = {"original": original, "uniform": loss, "dealt": loss, "adaptive": loss}
        return {"strategy": AllocationStrategy.UNIFORM.value, "fallback": reason, "held_out": losses}

    def _loss_of(self, widths: Widths, references: list[Tensor] | None) -> float:
        """The held-out loss with these widths."""
        packed = place(self.work, self.packed(widths))
        try:
            return self.given.loss(packed, references)
        finally:
            place(self.work, self.layers)

    def _measured(self):
        """(name, width) -> the loss on the calibration batches with one layer packed, above the original's."""
        same = Calibration(self.given.batches, self.given.batches, self.given.loss_fn)
        references = same.references(self.work)
        original = same.loss(self.work, references)

        def measured(name: str, width: int) -> float:
            packed = place(self.work, {name: self.one(name, uniform({name: self.layers[name]}, width)[name])})
            try:
                return max(0.0, same.loss(packed, references) - original)
            finally:
                place(self.work, {name: self.layers[name]})

        return measured
