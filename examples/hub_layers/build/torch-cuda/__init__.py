"""Tilesmith's layers for the `kernels` package, which looks for them in `layers`; needs tilesmith beside it."""

from tilesmith.integrations import hub_layers as layers

__all__ = ["layers"]
