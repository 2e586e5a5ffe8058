"""The error that is allowed: twice that of the same-dtype reference, plus rounding at the size of the values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 2**26  # elements judged at a time: fp64 copies of a tensor of 2^31 would not fit beside it


@dataclass(frozen=True)
class Budget:
    """Error of a result and what is allowed: 2 · (error of the same-dtype reference + eps · max|oracle|).

    error, allowed: largest absolute difference from the oracle over the finite elements. message: what is wrong
    besides size: a NaN or infinity where the oracle has none, or another one.
    """

    error: float
    allowed: float
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message and self.error <= self.allowed

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else (0.0 if self.error == 0 else float("inf"))


def compare(
    got: Tensor,
    reference: Tensor,
    oracle: Tensor,
    computed: torch.dtype | None = None,
    more: float = 0.0,
    eps: float = 0.0,
) -> Budget:
    """Judge `got` by the fp64 `oracle`, allowing what `reference`, computed in the same dtypes, needs.

    computed: the dtype whose eps counts, where it is not that of `got`. more: error that is allowed besides. eps: what
    counts in place of a dtype's that is smaller.
    """
    if got.shape != oracle.shape:
        return Budget(float("inf"), 0.0, f"shape {tuple(got.shape)}, not {tuple(oracle.shape)}")
    if got.dtype != reference.dtype:
        return Budget(float("inf"), 0.0, f"dtype {got.dtype}, not {reference.dtype}")
    if not got.is_floating_point():
        same = torch.equal(got, reference)
        return Budget(0.0 if same else float("inf"), 0.0, "" if same else "integers differ")
    if got.numel() == 0:
        return Budget(0.0, 0.0)
    limit = torch.finfo(got.dtype).max
    pieces = zip(*(t.reshape(-1).split(_PIECE) for t in (got, reference, oracle)))
    errors, bases, sizes, messages = zip(*(_judge(*(t.double() for t in piece), limit) for piece in pieces))
    eps = max(eps, torch.finfo(computed or got.dtype).eps)
    allowed = 2 * (max(bases) + eps * max(sizes)) + more
    return Budget(max(errors), allowed, next((m for m in messages if m), ""))


def _judge(got: Tensor, reference: Tensor, exact: Tensor, limit: float) -> tuple[float, float, float, str]:
    """Largest error of `got` and of `reference`, largest finite element of `exact`, and what is wrong besides size.

    All [n] fp64; limit: the largest number of got's own dtype.
    """
    finite = exact.isfinite()
    overflow = finite & (exact.abs() > limit)  # the dtype cannot hold it: any infinity of that sign will do
    odd, kept = ~finite, finite & ~overflow
    message = ""
    if not torch.equal(*(t[odd].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0) for t in (got, exact))):
        message = "another NaN or infinity than the oracle"
    bad = int((~got[kept].isfinite()).sum())
    if bad and not message:
        message = f"{bad} of {got.numel()} elements are NaN or infinite, the oracle's are finite"
    if not kept.any():
        return 0.0, 0.0, 0.0, message
    error = (got - exact)[kept].abs().nan_to_num(nan=float("inf")).max().item()
    base = (reference - exact)[kept].abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    return error, base, exact[kept].abs().max().item(), message
