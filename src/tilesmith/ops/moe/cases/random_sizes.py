"""Cases of experts with tokens and their choices drawn at random. What compiles into a kernel is the same for all cases
of a kind."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilesmith.engine import Case
from tilesmith.ops.moe.cases import GPT_OSS, experts_args
from tilesmith.ops.moe.cases.draws import Init, always, uniform, with_sentinels, zipf

BF16, FP16, FP32 = (torch.bfloat16,), (torch.float16,), (torch.float32,)


@dataclass(frozen=True)
class Kind:
    """What cases of a kind have in common.

    sizes: hidden size, inner size, experts, experts of a token. choices: (a random source, experts) -> how experts are
    chosen. tokens: how many at most. options: arguments of the case.
    """

    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, int, int, int]
    choices: Callable[[random.Random, int], Init]
    tokens: int = 600
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def sample(self, name: str, number: int, longest: int | None = None) -> Case:
        """Case `number` of this kind. longest: fewer tokens than the kind has."""
        chance = random.Random(f"{name} {number}")
        tokens = 2 * chance.randint(0, (min(longest or self.tokens, self.tokens) - 1) // 2) + 1
        indices = self.choices(chance, self.sizes[2])
        return Case(
            f"{name}_{number}", experts_args(tokens, *self.sizes, indices=indices, **self.options), (), self.dtypes
        )


def _of_some(chance: random.Random, experts: int) -> Init:
    """Of a few experts only, also the same one twice for a token."""
    some = torch.tensor(chance.sample(range(experts), chance.randint(1, min(3, experts))))

    def draw(generator, shape, device):
        chosen = torch.randint(len(some), tuple(shape), generator=generator, device=device)
        return some.to(device)[chosen]

    return draw


SAMPLES: Mapping[str, Mapping[str, Kind]] = {
    "experts": {
        "routed_evenly": Kind(BF16, (128, 72, 8, 2), lambda chance, experts: uniform(experts)),
        "routed_by_zipf": Kind(BF16, (72, 40, 33, 5), lambda chance, experts: zipf(experts)),
        "routed_to_one": Kind(FP16, (64, 48, 5, 1), lambda chance, experts: always(chance.randrange(experts))),
        "routed_to_some": Kind(BF16, (40, 136, 9, 3), _of_some),
        "routed_elsewhere": Kind(
            FP16, (48, 24, 6, 3), lambda chance, experts: with_sentinels(experts), options={"bias": True}
        ),
        "routed_few": Kind(BF16, (64, 64, 96, 7), lambda chance, experts: uniform(experts), tokens=30),
        "routed_gpt_oss": Kind(
            BF16, (72, 56, 7, 4), lambda chance, experts: uniform(experts),
            options={"bias": True, "weight_layout": "transposed", **GPT_OSS},
        ),
        "routed_adapted": Kind(
            BF16, (72, 40, 6, 3), lambda chance, experts: with_sentinels(experts),
            options={"grad": False, "ranks": (16, 5), "adapters": torch.float32},
        ),
        "routed_fp32": Kind(FP32, (21, 11, 5, 3), lambda chance, experts: with_sentinels(experts), tokens=300),
    }
}  # fmt: skip
