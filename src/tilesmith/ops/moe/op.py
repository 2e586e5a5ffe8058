"""The experts of a mixture-of-experts layer as one op: what it is, what it accepts and which kernels it has."""

import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilesmith.engine import Op
from tilesmith.engine.metadata import describer
from tilesmith.ops.moe import checks, reference
from tilesmith.ops.moe.plan import HOPPER_LEAST

KERNELS = {"triton": "tilesmith.ops.moe.triton.launch", "hopper": "tilesmith.ops.moe.hopper.launch"}


def _fake(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((indices.numel(), gate_up.shape[1]))


def _fake_vjp(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_lora_a: Tensor | None,
    gate_up_lora_b: Tensor | None,
    down_lora_a: Tensor | None,
    down_lora_b: Tensor | None,
    *rest: object,
) -> tuple[Tensor, ...]:
    wants: Sequence[bool] = rest[-1]
    small = (gate_up_bias, down_bias, gate_up_lora_a, gate_up_lora_b, down_lora_a, down_lora_b)
    return (
        x.new_empty(x.shape if wants[0] else 0),
        torch.empty_like(gate_up) if wants[1] else x.new_empty(0),
        torch.empty_like(down) if wants[2] else x.new_empty(0),
        weights.new_empty(weights.shape) if wants[3] else x.new_empty(0),
        *(t.new_empty(t.shape) if wanted else x.new_empty(0) for t, wanted in zip(small, wants[4:])),
    )


def _describer() -> Callable[..., Any]:
    """Metadata of a call: a field per parameter, and few: whether an expert gets HOPPER_LEAST pairs or fewer, if they
    are spread evenly."""
    parameters = tuple(inspect.signature(reference.experts).parameters)
    plain, kind = describer("experts", parameters), namedtuple("experts_call", [*parameters, "arch", "few"])

    def describe(*args: Any) -> Any:
        return kind(*plain(*args), args[3].numel() <= HOPPER_LEAST * args[1].shape[0])

    return describe


experts_vjp = Op(
    reference.experts_vjp,
    fake=_fake_vjp,
    outputs=(
        "dx", "dgate_up", "ddown", "dweights", "dgate_up_bias", "ddown_bias",
        "dgate_up_lora_a", "dgate_up_lora_b", "ddown_lora_a", "ddown_lora_b",
    ),
    kernels=KERNELS,
)  # fmt: skip

experts = Op(
    reference.experts,
    fake=_fake,
    vjp=experts_vjp,
    outputs=("y", "pre"),
    public=1,
    check=checks.experts,
    describe=_describer(),
    kernels=KERNELS,
    autocast=("x", "gate_up", "down", "gate_up_bias", "down_bias"),
)
