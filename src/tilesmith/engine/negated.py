"""Views that negate what lies in memory: the imaginary part of a conjugate, `z.conj().imag`.

PyTorch marks such a view by a bit, and a kernel that reads memory does not see it. Asking each tensor for the bit at
each call would cost as much as one more fact of the key; but only few keys allow for such a view at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilesmith.engine.replay import Ready


def may_negate(x: Tensor) -> bool:
    """Whether a view with the negative bit may have the key that x has.

    PyTorch sets the bit on imaginary parts alone. These begin at an odd element of complex memory and take every second
    one, and so does each view of them.
    """
    size = x.element_size()
    odd = x.data_ptr() & (2 * size - 1) == size
    return odd and x.is_floating_point() and not any(s % 2 for n, s in zip(x.shape, x.stride()) if n > 1)


class Asking(Ready):
    """A kernel for a key under which the tensors at `places` may have the negative bit: each call asks them, and makes
    of those that have it tensors of their own, which are another call of `op`.

    Raises ValueError for one that the op writes to.
    """

    def __init__(self, op: Any, kernel: Ready, places: Sequence[int], pin: str):
        super().__init__(self._asked)
        self.op, self.kernel, self.places, self.pin = op, kernel, places, pin
        self.told = kernel.told
        if kernel.alone is not None:
            self.alone = Asking(op, kernel.alone, places, pin)

    def _asked(self, *args: Any) -> Any:
        negated = [i for i in self.places if args[i].is_neg()]
        if not negated:
            return self.kernel.run(*args)
        for name in (self.op.parameters[i] for i in negated if i in self.op.written):
            raise ValueError(
                f"{self.op.name}: {name} is a view that negates what lies in memory, and the op writes to it; pass "
                f"{name}.resolve_neg()"
            )
        return self.op.run(tuple(a.resolve_neg() if i in negated else a for i, a in enumerate(args)), self.pin)


def asking(op: Any, kernel: Ready, args: Sequence[Any], pin: str) -> Ready:
    """`kernel`, chosen for a call with these arguments; where one of them may have the bit, what asks for it first."""
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and may_negate(a)]
    return Asking(op, kernel, places, pin) if places else kernel
