"""A SPIR-V module under construction: sections, and types and constants declared once.

Numbers are those of the SPIR-V specification, "Unified1": instructions by opcode, enumerants by value.
"""

from __future__ import annotations

import struct
from typing import Any

from tilesmith.codegen.types import Type, bool_

MAGIC = 0x07230203
UNIFORM, INPUT, WORKGROUP, FUNCTION, STORAGE = 2, 1, 4, 7, 12  # storage classes
_CONSTANT_FORMATS = {"f32": "<f", "u32": "<I", "i32": "<i"}


def text(value: str) -> list[int]:
    """A literal string: UTF-8, ended by at least one zero byte, in words."""
    data = value.encode() + b"\0"
    data += bytes(-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


class Module:
    """Words by section, of SPIR-V 1.3 unless `version` says otherwise. `op` with a result type returns the new id."""

    def __init__(self) -> None:
        self.bound = 1
        self.version = 0x103
        self.capabilities: list[int] = []
        self.extensions: list[int] = []
        self.names: list[int] = []
        self.decorations: list[int] = []
        self.declarations: list[int] = []
        self.variables: list[int] = []
        self.code: list[int] = []
        self.known: dict[tuple, int] = {}
        self.types: dict[Type, int] = {}

    def id(self) -> int:
        """A new id."""
        self.bound += 1
        return self.bound - 1

    @staticmethod
    def words(opcode: int, *operands: int) -> list[int]:
        """One instruction."""
        return [(len(operands) + 1) << 16 | opcode, *operands]

    def capability(self, number: int) -> None:
        """OpCapability."""
        self.capabilities += self.words(17, number)

    def extension(self, name: str) -> None:
        """OpExtension."""
        self.extensions += self.words(10, *text(name))

    def name(self, target: int, name: str) -> None:
        """OpName."""
        self.names += self.words(5, target, *text(name))

    def decorate(self, target: int, *decoration: int) -> None:
        """OpDecorate."""
        self.decorations += self.words(71, target, *decoration)

    def decorate_member(self, target: int, member: int, *decoration: int) -> None:
        """OpMemberDecorate."""
        self.decorations += self.words(72, target, member, *decoration)

    def do(self, opcode: int, *operands: int) -> None:
        """An instruction of the function without a result."""
        self.code += self.words(opcode, *operands)

    def op(self, opcode: int, type_id: int, *operands: int) -> int:
        """An instruction of the function; returns its result."""
        result = self.bound
        self.bound += 1
        self.code += ((len(operands) + 3) << 16 | opcode, type_id, result, *operands)
        return result

    def declare(self, key: tuple, opcode: int, *operands: int) -> int:
        """A type, once for each key: the result comes first."""
        if key not in self.known:
            self.known[key] = self.id()
            self.declarations += self.words(opcode, self.known[key], *operands)
        return self.known[key]

    def constant_op(self, key: tuple, opcode: int, type_id: int, *operands: int) -> int:
        """A constant, once for each key: the type comes first."""
        if key not in self.known:
            self.known[key] = self.id()
            self.declarations += self.words(opcode, type_id, self.known[key], *operands)
        return self.known[key]

    def void(self) -> int:
        """OpTypeVoid."""
        return self.declare(("void",), 19)

    def type(self, t: Type) -> int:
        """A scalar or vector type."""
        if t not in self.types:
            self.types[t] = self._type(t)
        return self.types[t]

    def _type(self, t: Type) -> int:
        if t.lanes > 1:
            return self.declare(("type", t.name), 23, self.type(t.scalar), t.lanes)
        opcode, *rest = {"bool": (20,), "f32": (22, 32), "f16": (22, 16), "u32": (21, 32, 0), "i32": (21, 32, 1)}[
            t.dtype
        ]
        return self.declare(("type", t.name), opcode, *rest)

    def bools(self, lanes: int) -> int:
        """A vector of bool."""
        return self.declare(("bools", lanes), 23, self.type(bool_), lanes)

    def pointer(self, storage: int, pointee: int) -> int:
        """OpTypePointer."""
        return self.declare(("pointer", storage, pointee), 32, storage, pointee)

    def constant(self, t: Type, value: Any) -> int:
        """A literal; in a vector type, of every lane."""
        key = (t, value or str(value))  # 0.0 and -0.0 are equal, and two constants
        if key in self.known:
            return self.known[key]
        if t.lanes > 1:
            lane = self.constant(t.scalar, value)
            return self.constant_op(key, 44, self.type(t), *[lane] * t.lanes)
        if t.dtype == "bool":
            return self.constant_op(key, 41 if value else 42, self.type(t))
        if t.dtype == "f16":
            (bits,) = struct.unpack("<H", struct.pack("<e", value))
        else:
            (bits,) = struct.unpack("<I", struct.pack(_CONSTANT_FORMATS[t.dtype], value))
        return self.constant_op(key, 43, self.type(t), bits)

    def variable(self, storage: int, pointee: int) -> int:
        """A module-level variable."""
        pointer, result = self.pointer(storage, pointee), self.id()
        self.variables += self.words(59, pointer, result, storage)
        return result

    def assemble(self, head: list[int]) -> bytes:
        """The module; `head` holds import, memory model, entry point and execution mode."""
        body = self.capabilities + self.extensions + head + self.names + self.decorations
        body += self.declarations + self.variables + self.code
        words = [MAGIC, self.version << 8, 0, self.bound, 0, *body]
        return struct.pack(f"<{len(words)}I", *words)
