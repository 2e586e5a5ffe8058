"""The error that is allowed: twice that of the same-dtype reference, plus rounding at the size of the values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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


def compare(got: Tensor, reference: Tensor, oracle: Tensor, computed: torch.dtype | None = None) -> Budget:
    """Judge `got` by the fp64 `oracle`, allowing what `reference`, computed in the same dtypes, needs.

    computed: the dtype whose eps counts, where it is not that of `got`.
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
    wide, seen, exact = got.double(), reference.double(), oracle.double()
    finite = exact.isfinite()
    limit = torch.finfo(got.dtype).max
    overflow = finite & (exact.abs() > limit)  # the dtype cannot hold it: any infinity of that sign will do
    odd = ~finite & ~overflow
    message = ""
    if not torch.equal(
        wide[odd].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0), exact[odd].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0)
    ):
        message = "another NaN or infinity than the oracle"
    kept = finite & ~overflow
    if not wide[kept].isfinite().all():
        bad = int((~wide[kept].isfinite()).sum())
        message = message or f"{bad} of {got.numel()} elements are NaN or infinite, the oracle's are finite"
    error = (wide - exact)[kept].abs().nan_to_num(nan=float("inf")).max().item() if kept.any() else 0.0
    base = (seen - exact)[kept].abs().nan_to_num(nan=0.0, posinf=0.0).max().item() if kept.any() else 0.0
    size = exact[kept].abs().max().item() if kept.any() else 0.0
    return Budget(error, 2 * (base + torch.finfo(computed or got.dtype).eps * size), message)
