"""analyze_precision_opportunities: what a model could save, and which of its layers notice it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.precision.adaptive.allocation import allocate
from tilesmith.precision.adaptive.calibration import Calibration, call, check_fit, moved, output_of
from tilesmith.precision.adaptive.choice import layer_bytes, tile_shape
from tilesmith.precision.adaptive.config import WIDTHS, PrecisionConfig, PrecisionFormat
from tilesmith.precision.adaptive.layer import code_bytes, overhead_bytes
from tilesmith.precision.adaptive.layers import (
    base_bytes,
    bytes_of,
    check_model,
    device_of,
    eligible,
    structure_of,
    unchanged,
)
from tilesmith.precision.adaptive.sensitivity import observe, tile_losses

OP = "analyze_precision_opportunities"
PROBES = 4  # draws of labels or signs
ALLOWED = 0.01  # of the output's mean square, or nats of KL divergence


@torch.inference_mode(False)  # the analysis takes gradients
def analyze_precision_opportunities(
    model: nn.Module, sample_input: Tensor, device: torch.device | None = None
) -> dict[str, Any]:
    """How many of a model's bytes packing could save, and how sensitive its output is to each layer.

    Args:
        model: any module; it is not changed. sample_input: what it is called with; also a tuple or a dict of arguments.
        device: where the analysis runs; None: where the model is.

    What an error in the weights does to the output is estimated to second order by the Fisher information, from this
    one input: a hint, where `create_ultra_precision_module` measures.

    Returns:
        potential_savings: the share of the bytes that is saved by the smallest packing whose predicted distance is at
          most 0.01: of the squared output over its square, or, of a model with logits, in nats of KL divergence.
          Against the parameters in float16, or as they are where that is less.
        sensitivity: layer -> predicted distance with this layer alone at 4 bits.
        bits: layer -> average width of its codes in that packing.
        predicted_distance: bits -> predicted distance with all layers at that width.
        skipped: layer -> why it cannot be packed.
        recommendations: sentences.

    Raises:
        TypeError, ValueError: as `create_ultra_precision_module` for the model; the sample does not fit it.
    """
    check_model(OP, model)
    if not isinstance(sample_input, Tensor | tuple | list | dict):
        raise TypeError(f"{OP}: sample_input must be a tensor, a tuple or a dict, got {type(sample_input).__name__}")
    device = device_of(OP, device)
    chosen, skipped = eligible(model)
    work = structure_of(model, device).eval()
    batch = moved(sample_input, device)
    samples = Calibration((batch,) * PROBES, (batch,), None, f"{OP}: sample_input")
    layers = {name: work.get_submodule(name) for name in chosen}
    with unchanged(work):
        check_fit(samples, work)
        if not chosen:
            return _result(0.0, {}, {}, {}, skipped, ["No linear layer can be packed; skipped says why."])
        power = _power(work, batch)
        seen = observe(work, layers, samples, hessians=False)
    losses = {
        name: tile_losses(layer.weight.detach(), seen[name].information(PrecisionConfig()), WIDTHS) / power
        for name, layer in layers.items()
    }
    flat = torch.cat([x.flatten(0, 1) for x in losses.values()])
    widths = _smallest(flat)
    before = min(bytes_of(model), base_bytes(model, PrecisionFormat.FP16))
    after = bytes_of(model) - sum(layer.weight.nbytes for layer in layers.values())
    bits, first = {}, 0
    for name, layer in layers.items():
        strips, groups = tile_shape(layer)
        own = widths[first : first + strips * groups]
        bits[name], first = float(own.double().mean()), first + strips * groups
        after += overhead_bytes(layer.out_features, layer.in_features) + code_bytes(1) * int(own.sum())
    sensitivity = {name: float(x[..., WIDTHS.index(4)].sum()) for name, x in losses.items()}
    predicted = {w: float(flat[:, i].sum()) for i, w in enumerate(WIDTHS)}
    savings = max(0.0, 1 - after / before)
    return _result(
        savings, sensitivity, bits, predicted, skipped, _sentences(model, chosen, sensitivity, bits, skipped, savings)
    )


def _power(model: nn.Module, batch: Any) -> float:
    """What the predicted losses of a row are divided by: 1 for logits, half the squared output of a row for others."""
    with torch.no_grad():
        kind, out = output_of(call(model, batch))
    return 1.0 if kind == "logits" else max(1e-30, float(out.float().square().sum(-1).mean()) / 2)


def _smallest(losses: Tensor) -> Tensor:
    """The widths of the tiles in the smallest packing that is predicted to stay within `ALLOWED`, or the widest."""
    sizes = torch.tensor([code_bytes(w) for w in WIDTHS]).expand(len(losses), -1)
    low, high = len(losses) * code_bytes(WIDTHS[0]), len(losses) * code_bytes(WIDTHS[-1])
    best = torch.full((len(losses),), len(WIDTHS) - 1)
    for _ in range(12):
        budget = (low + high) // 2
        found = allocate(losses, sizes, budget)
        if float(losses.gather(1, found[:, None]).sum()) <= ALLOWED:
            best, high = found, budget
        else:
            low = budget
    return torch.tensor(WIDTHS)[best]


def _sentences(model, layers, sensitivity, bits, skipped, savings) -> list[str]:
    found = []
    packed = {id(layer.weight) for layer in layers.values()}
    wide = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float32 and id(p) not in packed)
    if wide > bytes_of(model) // 50:  # else it makes less than a hundredth of difference
        found.append(
            f"Cast the model to 16 bits first: {wide / 2**20:.2f} MiB of float32 parameters are not packed, and bytes "
            "are compared with those of float16."
        )
    if savings > 0:
        found.append(
            f"Set target_memory_reduction up to {savings:.2f} with calibration data: the predicted distance of the "
            f"outputs stays within {ALLOWED:g}."
        )
    total = sum(sensitivity.values())
    for name in sorted(sensitivity, key=sensitivity.get, reverse=True)[:3]:
        if total > 0 and len(layers) > 1:
            found.append(
                f"{name} makes {sensitivity[name] / total:.0%} of the predicted distance; it gets {bits[name]:.1f} "
                "bits."
            )
    cheap = [name for name in bits if bits[name] <= 3]
    if cheap:
        size = sum(layer_bytes(layers[name], 3) for name in cheap)
        found.append(f"{len(cheap)} layers do with 3 bits or less on average, {size / 2**20:.2f} MiB at 3 bits.")
    for name, reason in list(skipped.items())[:3]:
        found.append(f"{name or 'The model'} stays as it is: {reason}.")
    return found


def _result(savings, sensitivity, bits, predicted, skipped, sentences) -> dict[str, Any]:
    return {
        "potential_savings": savings,
        "recommendations": sentences,
        "sensitivity": sensitivity,
        "bits": bits,
        "predicted_distance": predicted,
        "skipped": skipped,
    }
