"""Errors with budgets: every kernel against the fp64 oracle, on every case of its op."""

from tilesmith.validate.budget import Budget
from tilesmith.validate.cases import Result, check, run_cases

__all__ = ["Budget", "Result", "check", "run_cases"]
