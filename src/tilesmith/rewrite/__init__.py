"""The mechanism of model rewrites: probe what a module computes, swap the instance, report, undo.

Knows no model library. The rules, which say what to look for and what to put there, live in `tilesmith.models`.
"""

from tilesmith.rewrite import flow
from tilesmith.rewrite.apply import RewriteError, rewrite, undo
from tilesmith.rewrite.hooks import observed
from tilesmith.rewrite.probe import Unlike
from tilesmith.rewrite.report import CALLS, OURS, Report, Row
from tilesmith.rewrite.rule import Replace, Rule, Site, Skip
from tilesmith.rewrite.source import CannotRespell, parse, respell, respelled_forward
from tilesmith.rewrite.variants import Form, forms, given, original_class, swap, unswap, variant

__all__ = [
    "Rule", "Site", "Replace", "Skip", "Form",
    "rewrite", "undo", "Report", "Row", "RewriteError", "CALLS", "OURS",
    "variant", "swap", "unswap", "forms", "original_class", "given",
    "observed", "parse", "respell", "respelled_forward", "CannotRespell", "Unlike", "flow",
]  # fmt: skip
