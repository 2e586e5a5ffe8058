"""Fragments in the interpreter: an array of matrices, one for each subgroup of 32."""

from __future__ import annotations

import numpy as np

from tilesmith.codegen.interpreter import arithmetic
from tilesmith.codegen.interpreter.faults import DivergentFlow, OutOfBounds
from tilesmith.codegen.interpreter.memory import Memory
from tilesmith.codegen.ir import packed
from tilesmith.codegen.layout import position
from tilesmith.codegen.nodes import Convert, Fill, LoadFragment, Mma, RowReduce, SetElement, StoreFragment


class Matrices:
    """The fragment operations of a batch of workgroups; `mask` says which threads are active."""

    def agreed(self, x: np.ndarray, groups: np.ndarray, what: str) -> np.ndarray:
        """One value a subgroup of 32."""
        each = self.whole(x).reshape(-1, 32)[groups]
        if (each != each[:, :1]).any():
            raise DivergentFlow(f"the {what} of a fragment operation differs within a subgroup")
        return each[:, 0]

    def fill(self, s: Fill, mask) -> None:
        groups = self.subgroups(mask, 32)
        self.fragments[s.fragment][groups] = self.agreed(self.value(s.value, mask), groups, "value")[:, None, None]

    def places(self, s: LoadFragment | StoreFragment, groups: np.ndarray, mask) -> tuple[Memory, tuple, np.ndarray]:
        """Where a fragment's elements lie: memory, place of the element, lane within a vector element."""
        memory, fragment = self.memory[s.array], self.ir.fragment_named[s.fragment]
        offset = self.agreed(self.value(s.offset, mask), groups, "offset").astype(np.int64)
        unit = 4 if fragment.type.dtype == "f32" else 8
        if (offset % unit).any():
            raise OutOfBounds(f"the offset {offset[offset % unit != 0][0]} into {s.array} is not a multiple of {unit}")
        r, c = np.indices((fragment.tile, fragment.tile))
        if getattr(s, "transposed", False):
            r, c = c, r
        scalar = offset[:, None, None] + r * s.stride + c
        leaders = np.broadcast_to((groups * 32)[:, None, None], scalar.shape)
        held = packed(memory.declared, fragment)
        return memory, memory.at(leaders, scalar // held), scalar % held

    def load_fragment(self, s: LoadFragment, mask) -> None:
        groups = self.subgroups(mask, 32)
        memory, at, lane = self.places(s, groups, mask)
        values = memory.load(at, self.subgroup_ids(memory, groups))
        scalar = self.ir.fragment_named[s.fragment].type
        if memory.type.dtype != scalar.dtype:
            words = values if values.ndim == lane.ndim + 1 else values[..., None]
            values = arithmetic.from_memory(scalar, words.view(arithmetic.MEMORY[scalar.dtype]))
        if values.ndim > lane.ndim:
            values = np.take_along_axis(values, lane[..., None], -1)[..., 0]
        self.fragments[s.fragment][groups] = values

    def store_fragment(self, s: StoreFragment, mask) -> None:
        groups = self.subgroups(mask, 32)
        memory, at, lane = self.places(s, groups, mask)
        values = self.fragments[s.fragment][groups]
        if memory.record is not None:
            memory.record.write(at, self.subgroup_ids(memory, groups))
        if memory.written is not None:
            memory.written[at] = True
        memory.data[at if memory.type.lanes == 1 else (*at, lane)] = arithmetic.to_memory(memory.type.scalar, values)

    def mma(self, s: Mma, mask) -> None:
        groups = self.subgroups(mask, 32)
        self.fragments[s.c][groups] += self.fragments[s.a][groups] @ self.fragments[s.b][groups]

    def element_places(self, fragment: str, element: int) -> tuple:
        """Subgroup, row and column of each thread's element; of a fragment not placed, those of its transpose."""
        f = self.ir.fragment_named[fragment]
        row, column = position(f.tile, self.threads % 32, element)
        return (self.threads // 32, row, column) if f.placed else (self.threads // 32, column, row)

    def set_element(self, s: SetElement, mask) -> None:
        places = tuple(p[mask.threads] for p in self.element_places(s.fragment, s.index))
        self.fragments[s.fragment][places] = self.whole(self.value(s.value, mask))[mask.threads]

    def row_reduce(self, s: RowReduce, mask) -> None:
        groups = self.subgroups(mask, 32)
        rows = self.fragments[s.source][groups]
        self.fragments[s.target][groups] = arithmetic.REDUCTIONS[s.op](rows, axis=2, keepdims=True)

    def convert(self, s: Convert, mask) -> None:
        groups = self.subgroups(mask, 32)
        a, c = (self.ir.fragment_named[name].type for name in (s.a, s.c))
        self.fragments[s.a][groups] = arithmetic.cast(c, a, self.fragments[s.c][groups], lambda bad: bad)
