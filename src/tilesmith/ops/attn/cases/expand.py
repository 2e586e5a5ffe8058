"""Example inputs of expand_kv."""

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.case import BENCH, GPU, SMALL, Init
from tilesmith.engine.inits import far_heads, tokens_first


def _expand(
    batch: int, heads: int, tokens: int, own: int, shared: int, values: int, *,
    init: str | Init = tokens_first, layout: str = "contiguous", grads: tuple[bool, bool] = (True, True),
) -> dict:  # fmt: skip
    """grads: whether kv and shared ask for gradients."""
    return {
        "kv": T(batch, heads, tokens, own + values, init=init, layout=layout, grad=grads[0]),
        "shared": T(batch, 1, tokens, shared, init=tokens_first, layout=layout, grad=grads[1]),
        "own": own,
    }


CASES = {
    "expand_kv": [
        Case("plain", _expand(2, 4, 5, 16, 8, 16), SMALL),
        Case("odd_sizes", _expand(2, 3, 5, 13, 6, 7), SMALL),
        Case("many_heads", _expand(1, 37, 3, 64, 16, 20), SMALL),
        Case("wide", _expand(1, 2, 3, 192, 64, 256), SMALL),
        Case("heads_first", _expand(2, 3, 4, 16, 8, 16, init="normal"), SMALL),
        Case("strided", _expand(2, 3, 4, 16, 8, 16, init="normal", layout="strided"), SMALL),
        Case("transposed", _expand(2, 3, 4, 16, 8, 16, init="normal", layout="transposed"), SMALL),
        Case("kv_alone", _expand(2, 3, 4, 16, 8, 16, grads=(True, False)), SMALL),
        Case("shared_alone", _expand(2, 3, 4, 16, 8, 16, grads=(False, True)), SMALL),
        Case("nothing_shared", _expand(1, 2, 3, 16, 0, 8), SMALL),
        Case("nothing_own", _expand(1, 2, 3, 0, 8, 16), SMALL),
        Case("no_values", _expand(1, 2, 3, 16, 8, 0), SMALL),
        Case("one_token", _expand(4, 8, 1, 16, 8, 16), SMALL),
        Case("no_tokens", _expand(2, 2, 0, 16, 8, 16), SMALL),
        Case("no_rows", _expand(0, 2, 4, 16, 8, 16), SMALL),
        Case("no_heads", _expand(2, 0, 4, 16, 8, 16), SMALL),
        Case("far", _expand(1, 2, 64, 64, 32, 64, init=far_heads), GPU, (torch.bfloat16,)),
        Case("many_tokens", _expand(2, 5, 1030, 96, 32, 64), GPU),
        Case("deepseek_v3_2x4096", _expand(2, 16, 4096, 128, 64, 128), BENCH),
        Case("glm47_flash_1x8192", _expand(1, 20, 8192, 192, 64, 256), BENCH),
    ]
}


def _moved(kv: Tensor, shared: Tensor, own: int) -> int:
    """kv read, k and v written; shared is read once."""
    copies = kv.shape[1] * shared.numel()
    return (2 * kv.numel() + copies + shared.numel()) * kv.element_size()


bytes_moved = {"expand_kv": _moved, "expand_kv_vjp": _moved}
