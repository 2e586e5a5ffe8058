"""What the interpreter raises."""

from __future__ import annotations


class Fault(RuntimeError):
    """A kernel did something that is undefined on GPUs. The message begins with file:line."""


class Race(Fault):
    """Two threads touched one element, at least one writing, with nothing between that orders them."""


class OutOfBounds(Fault):
    """An index beyond a buffer or an array, or a misaligned fragment."""


class DivergentFlow(Fault):
    """A barrier that not all threads of the workgroup reach, or a subgroup operation not all of the subgroup."""


class Undefined(Fault):
    """A value that languages leave undefined: never written, division by zero, integer overflow, a wide shift."""
