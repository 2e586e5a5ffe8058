"""Example inputs of merge_attention and accumulate_attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import HALF, SMALL, UNCHECKED, Init
from tilesmith.engine.inits import tokens_first


def _lse(*dead: int) -> Init:
    """Logarithms of sums, of which some are of nothing."""

    def init(generator: torch.Generator, shape: Sequence[int], device: torch.device) -> Tensor:
        lse = 3.0 * torch.randn(shape, generator=generator, device=device)
        for place in dead:
            lse.view(-1)[place] = float("-inf")
        return lse

    return init


def _merge(*shape: int, init: str | Init = "normal", dead_a: tuple = (), dead_b: tuple = (), grad: bool = True) -> dict:
    return {
        "out_a": T(*shape, init=init, grad=grad),
        "lse_a": T(*shape[:-1], dtype=torch.float32, init=_lse(*dead_a), grad=grad),
        "out_b": T(*shape, init=init, grad=grad),
        "lse_b": T(*shape[:-1], dtype=torch.float32, init=_lse(*dead_b), grad=grad),
    }


MERGE = [
    Case("small", _merge(2, 3, 5, 24), SMALL),
    Case("tokens_first", _merge(2, 3, 5, 16, init=tokens_first), SMALL),
    Case("nothing_seen", _merge(1, 2, 7, 40, dead_a=(0, 3, 4), dead_b=(3, 5)), SMALL),
    Case("rows_only", _merge(9, 64), SMALL),
    Case("no_rows", _merge(2, 0, 5, 16), SMALL),
    Case("train", _merge(2, 32, 8192, 128, init=tokens_first), UNCHECKED, HALF),
]

ACCUMULATE = [
    Case("tokens_first", _merge(2, 3, 5, 16, init=tokens_first, grad=False), SMALL),
    Case("nothing_seen", _merge(1, 2, 7, 40, dead_a=(0, 3, 4), dead_b=(3, 5), grad=False), SMALL),
    Case("rows_only", _merge(9, 64, grad=False), SMALL),
    Case("no_rows", _merge(2, 0, 5, 16, grad=False), SMALL),
    Case("ring", _merge(1, 16, 16384, 128, init=tokens_first, grad=False), UNCHECKED, (torch.float32,)),
]

CASES = {"accumulate_attention": ACCUMULATE, "merge_attention": MERGE}
