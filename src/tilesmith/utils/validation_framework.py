"""Validation of layers under the module path of `kernel_pytorch.utils`. Its home is `tilesmith.validate.components`."""

from tilesmith.validate.components import Check, ComponentValidator, ValidationResults

__all__ = ["Check", "ComponentValidator", "ValidationResults"]
