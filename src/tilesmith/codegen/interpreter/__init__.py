"""Runs any KernelIR on a CPU with NumPy, and reports what a GPU would get wrong in silence."""

from tilesmith.codegen.interpreter.faults import DivergentFlow, Fault, OutOfBounds, Race, Undefined
from tilesmith.codegen.interpreter.run import interpret

__all__ = ["interpret", "Fault", "Race", "OutOfBounds", "DivergentFlow", "Undefined"]
