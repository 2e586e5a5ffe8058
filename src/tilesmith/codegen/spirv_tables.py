"""Numbers of the SPIR-V specification and of GLSL.std.450: instructions and functions by what they do."""

from __future__ import annotations

_FLOAT = {"+": 129, "-": 131, "*": 133, "/": 136, "==": 180, "!=": 183, "<": 184, ">": 186, "<=": 188, ">=": 190}
_INT = {"+": 128, "-": 130, "*": 132, "==": 170, "!=": 171, "<<": 196, "|": 197, "^": 198, "&": 199}
BINARY = {
    "f32": _FLOAT,
    "f16": _FLOAT,
    "u32": {**_INT, "//": 134, "%": 137, ">": 172, ">=": 174, "<": 176, "<=": 178, ">>": 194},
    "i32": {**_INT, ">": 173, ">=": 175, "<": 177, "<=": 179, ">>": 195},
    "bool": {"==": 164, "!=": 165, "or": 166, "and": 167},
}
GLSL = {
    "floor": 8,
    "ceil": 9,
    "sin": 13,
    "cos": 14,
    "tanh": 21,
    "exp": 27,
    "log": 28,
    "exp2": 29,
    "log2": 30,
    "sqrt": 31,
    "rsqrt": 32,
    "fma": 50,
    "pack_f16": 58,
    "unpack_f16": 62,
}
BY_TYPE = {"abs": (4, 4, 5), "min": (37, 38, 39), "max": (40, 41, 42)}  # of floats, u32, i32
CASTS = {"fu": 109, "fi": 110, "if": 111, "uf": 112, "ff": 115, "ui": 124, "iu": 124}
REDUCE = {"add": (350, 349, 349), "min": (355, 354, 353), "max": (358, 357, 356)}
BUILTINS = {"tid": 27, "gid": 26, "groups": 24, "lane": 41, "subgroup": 40, "subgroup_size": 36}
