"""The types of the portable kernels: six scalars, and vectors of two or four of them."""

from __future__ import annotations

from dataclasses import dataclass


class KernelError(ValueError):
    """A kernel that cannot be built, verified or printed. The message starts with file:line where there is one."""


@dataclass(frozen=True, eq=False)
class Type:
    """A scalar, or a vector of `lanes` scalars. Equal types are the same object.

    Inside a kernel, calling a type converts: `f32(x)`, `f32x4(h)`; a vector type of a scalar repeats it, of `lanes`
    scalars collects them.
    """

    dtype: str
    lanes: int

    @property
    def name(self) -> str:
        """`f32`, `f32x4`."""
        return self.dtype if self.lanes == 1 else f"{self.dtype}x{self.lanes}"

    @property
    def scalar(self) -> Type:
        """The type of one lane."""
        return TYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes in memory, which is also the alignment."""
        return (2 if self.dtype in ("f16", "bf16") else 4) * self.lanes

    @property
    def is_float(self) -> bool:
        """f32, f16 and bf16, and their vectors."""
        return self.dtype in ("f32", "f16", "bf16")

    @property
    def is_int(self) -> bool:
        """u32 and i32, and their vectors."""
        return self.dtype in ("u32", "i32")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return type_named, (self.name,)

    def __call__(self, *parts):
        raise KernelError(f"{self.name}(...) converts inside a kernel; outside one there is nothing to convert")


TYPES: dict[str, Type] = {
    t.name: t
    for t in [Type("bool", 1)]
    + [Type(dtype, lanes) for dtype in ("f32", "f16", "bf16", "u32", "i32") for lanes in (1, 2, 4)]
}

f32, f32x2, f32x4 = TYPES["f32"], TYPES["f32x2"], TYPES["f32x4"]
f16, f16x2, f16x4 = TYPES["f16"], TYPES["f16x2"], TYPES["f16x4"]
bf16, bf16x2, bf16x4 = TYPES["bf16"], TYPES["bf16x2"], TYPES["bf16x4"]
u32, u32x2, u32x4 = TYPES["u32"], TYPES["u32x2"], TYPES["u32x4"]
i32, i32x2, i32x4 = TYPES["i32"], TYPES["i32x2"], TYPES["i32x4"]
bool_ = TYPES["bool"]


RANGES = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1), "f32": (-(2.0**128 - 2.0**104), 2.0**128 - 2.0**104)}
"""The least and the largest number of each type of a scalar."""

SUBGROUPS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Threads that a device's subgroup may have."""

LONGEST = 2**20
"""Elements of an array: of a thread's own or of a workgroup's no device has as many."""


def type_named(name: str) -> Type:
    """The type called `name`. Raises KernelError for any other name."""
    if name not in TYPES:
        raise KernelError(f"{name!r} is not a type of a portable kernel; allowed: {', '.join(TYPES)}")
    return TYPES[name]


def vector(scalar: Type, lanes: int) -> Type:
    """The type of `lanes` (1, 2 or 4) values of `scalar`; one lane is the scalar itself."""
    return type_named(scalar.dtype if lanes == 1 else f"{scalar.dtype}x{lanes}")
