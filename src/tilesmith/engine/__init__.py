"""The engine: declare an op once, register kernels for it, choose one with reasons, tune it, time it."""

from tilesmith.engine.case import Case, T, cases
from tilesmith.engine.choice import Choice, use
from tilesmith.engine.explanation import explain
from tilesmith.engine.families import ops
from tilesmith.engine.kernel import Kernel, Space, optimize_kernel
from tilesmith.engine.launcher import cdiv, launch, next_power_of_2
from tilesmith.engine.op import Op
from tilesmith.engine.register import register_kernel
from tilesmith.engine.rehearsal import rehearsed
from tilesmith.engine.table import Table

__all__ = [
    "Case",
    "Choice",
    "Kernel",
    "Op",
    "Space",
    "T",
    "Table",
    "cases",
    "cdiv",
    "explain",
    "launch",
    "next_power_of_2",
    "ops",
    "optimize_kernel",
    "register_kernel",
    "rehearsed",
    "use",
]
