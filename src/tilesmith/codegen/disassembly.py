"""SPIR-V modules of our printer as text, in the syntax of SPIR-V's own assembler. Needs no tool."""

from __future__ import annotations

import re
import struct

from tilesmith.codegen.spirv_module import MAGIC, text

_HEADER = 5  # words
_ENUMS = {
    "capability": {
        1: "Shader",
        9: "Float16",
        61: "GroupNonUniform",
        63: "GroupNonUniformArithmetic",
        65: "GroupNonUniformShuffle",
        4433: "StorageBuffer16BitAccess",
        5345: "VulkanMemoryModel",
        5430: "CooperativeMatrixReductionsNV",
        5431: "CooperativeMatrixConversionsNV",
        6022: "CooperativeMatrixKHR",
    },
    "addressing": {0: "Logical"},
    "memory_model": {1: "GLSL450", 3: "Vulkan"},
    "model": {5: "GLCompute"},
    "mode": {17: "LocalSize"},
    "storage": {1: "Input", 2: "Uniform", 4: "Workgroup", 7: "Function", 12: "StorageBuffer"},
    "decoration": {
        2: "Block",
        6: "ArrayStride",
        11: "BuiltIn",
        24: "NonWritable",
        25: "NonReadable",
        33: "Binding",
        34: "DescriptorSet",
        35: "Offset",
    },
    "builtin": {
        24: "NumWorkgroups",
        26: "WorkgroupId",
        27: "LocalInvocationId",
        36: "SubgroupSize",
        40: "SubgroupId",
        41: "SubgroupLocalInvocationId",
    },
    "control": {0: "None"},
    "access": {0x20: "NonPrivatePointer"},
    "group": {0: "Reduce"},
    "part": {1: "Row"},
    "glsl": {
        4: "FAbs",
        5: "SAbs",
        8: "Floor",
        9: "Ceil",
        13: "Sin",
        14: "Cos",
        21: "Tanh",
        27: "Exp",
        28: "Log",
        29: "Exp2",
        30: "Log2",
        31: "Sqrt",
        32: "InverseSqrt",
        37: "FMin",
        38: "UMin",
        39: "SMin",
        40: "FMax",
        41: "UMax",
        42: "SMax",
        50: "Fma",
        58: "PackHalf2x16",
        62: "UnpackHalf2x16",
    },
}
_UNARY = {109: "ConvertFToU", 110: "ConvertFToS", 111: "ConvertSToF", 112: "ConvertUToF", 115: "FConvert"}
_UNARY |= {124: "Bitcast", 126: "SNegate", 127: "FNegate", 168: "LogicalNot", 200: "Not"}
_BINARY = {128: "IAdd", 129: "FAdd", 130: "ISub", 131: "FSub", 132: "IMul", 133: "FMul", 134: "UDiv", 136: "FDiv"}
_BINARY |= {137: "UMod", 148: "Dot", 151: "UMulExtended", 164: "LogicalEqual", 165: "LogicalNotEqual"}
_BINARY |= {166: "LogicalOr", 167: "LogicalAnd", 170: "IEqual", 171: "INotEqual", 172: "UGreaterThan"}
_BINARY |= {173: "SGreaterThan", 174: "UGreaterThanEqual", 175: "SGreaterThanEqual", 176: "ULessThan"}
_BINARY |= {177: "SLessThan", 178: "ULessThanEqual", 179: "SLessThanEqual", 180: "FOrdEqual"}
_BINARY |= {183: "FUnordNotEqual", 184: "FOrdLessThan", 186: "FOrdGreaterThan", 188: "FOrdLessThanEqual"}
_BINARY |= {190: "FOrdGreaterThanEqual", 194: "ShiftRightLogical", 195: "ShiftRightArithmetic"}
_BINARY |= {196: "ShiftLeftLogical", 197: "BitwiseOr", 198: "BitwiseXor", 199: "BitwiseAnd"}
_GROUP = {349: "IAdd", 350: "FAdd", 353: "SMin", 354: "UMin", 355: "FMin", 356: "SMax", 357: "UMax", 358: "FMax"}
_GRAMMAR = {
    5: "Name id string",
    10: "Extension string",
    11: "ExtInstImport = string",
    12: "ExtInst type = id glsl *id",
    14: "MemoryModel addressing memory_model",
    15: "EntryPoint model id string *id",
    16: "ExecutionMode id mode *number",
    17: "Capability capability",
    19: "TypeVoid =",
    20: "TypeBool =",
    21: "TypeInt = number number",
    22: "TypeFloat = number",
    23: "TypeVector = id number",
    28: "TypeArray = id id",
    29: "TypeRuntimeArray = id",
    30: "TypeStruct = *id",
    32: "TypePointer = storage id",
    33: "TypeFunction = *id",
    41: "ConstantTrue type =",
    42: "ConstantFalse type =",
    43: "Constant type = literal",
    44: "ConstantComposite type = *id",
    54: "Function type = control id",
    55: "FunctionParameter type =",
    56: "FunctionEnd",
    59: "Variable type = storage",
    61: "Load type = id *access",
    62: "Store id id *access",
    65: "AccessChain type = *id",
    71: "Decorate id decoration *number",
    72: "MemberDecorate id number decoration *number",
    80: "CompositeConstruct type = *id",
    81: "CompositeExtract type = id *number",
    169: "Select type = id id id",
    224: "ControlBarrier id id id",
    246: "LoopMerge id id control",
    247: "SelectionMerge id control",
    248: "Label =",
    249: "Branch id",
    250: "BranchConditional id id id",
    253: "Return",
    254: "ReturnValue id",
    345: "GroupNonUniformShuffle type = id id id",
    346: "GroupNonUniformShuffleXor type = id id id",
    4456: "TypeCooperativeMatrixKHR = id id id id id",
    4457: "CooperativeMatrixLoadKHR type = id id id *access",
    4458: "CooperativeMatrixStoreKHR id id id id *access",
    4459: "CooperativeMatrixMulAddKHR type = id id id",
    5366: "CooperativeMatrixReduceNV type = id part id",
}
_GRAMMAR |= {opcode: f"{name} type = id" for opcode, name in _UNARY.items()}
_GRAMMAR |= {opcode: f"{name} type = id id" for opcode, name in _BINARY.items()}
_GRAMMAR |= {opcode: f"GroupNonUniform{name} type = id group id" for opcode, name in _GROUP.items()}
_NAME, _VECTOR, _CONSTANT = 5, 23, 43
_SCALARS = {
    19: {(): ("void", "")},
    20: {(): ("bool", "")},
    21: {(32, 0): ("u32", "<I"), (32, 1): ("i32", "<i")},
    22: {(32,): ("f32", "<f"), (16,): ("f16", "<e")},
}


def disassemble(module: bytes, names: bool = True) -> str:
    """One instruction a line, as `spirv-as` reads it.

    names: call buffers, arrays, types and constants by what they are, such as %f32_1; else every result by its number.
    Raises ValueError for what `spirv.generate` does not write.
    """
    words = struct.unpack(f"<{len(module) // 4}I", module[: len(module) // 4 * 4])
    if len(words) < _HEADER or words[0] != MAGIC or len(module) % 4:
        raise ValueError("this is not a SPIR-V module")
    reader, found, at = _Reader(names), [], _HEADER
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode not in _GRAMMAR or not 0 < length <= len(words) - at:
            raise ValueError(f"word {at}: no instruction of ours, opcode {opcode} with {length} words")
        found.append((opcode, list(words[at + 1 : at + length])))
        at += length
    for opcode, operands in found:
        if opcode == _NAME:  # an entry point may list what is named after it
            reader.call(operands[0], _string(operands[1:]))
    return "\n".join(["; SPIR-V", *(reader.line(opcode, operands) for opcode, operands in found)]) + "\n"


class _Reader:
    """Turns instructions into lines, in order: a type or a constant has its name from where it is declared."""

    def __init__(self, names: bool) -> None:
        self.names = names
        self.called: dict[int, str] = {}
        self.scalars: dict[int, tuple[str, int]] = {}  # type -> struct's code, bytes

    def line(self, opcode: int, words: list[int]) -> str:
        name, *grammar = _GRAMMAR[opcode].split()
        left = ""
        if "=" in grammar:
            at = grammar.index("=")
            result = words.pop(at)
            del grammar[at]
            self.declare(opcode, result, words)
            left = f"{self.id(result)} ="
        return f"{left:>16} {' '.join([f'Op{name}', *self.operands(grammar, words)])}"

    def operands(self, grammar: list[str], words: list[int]) -> list[str]:
        shown, left, type_of = [], list(words), 0
        for kind in grammar:
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            while left:
                if kind == "string":
                    shown.append(f'"{_string(left)}"')
                    del left[: len(text(_string(left)))]
                elif kind == "literal":
                    shown.append(self.literal(type_of, left.pop(0)))
                elif kind in ("id", "type"):
                    type_of = left.pop(0)
                    shown.append(self.id(type_of))
                elif kind == "number" and shown[-1:] == ["BuiltIn"]:
                    shown.append(_ENUMS["builtin"][left.pop(0)])
                else:
                    shown.append(str(left.pop(0)) if kind == "number" else _ENUMS[kind][left.pop(0)])
                if not repeated:
                    break
        return shown

    def literal(self, type_id: int, word: int) -> str:
        code, size = self.scalars[type_id]
        return repr(struct.unpack(code, struct.pack("<I", word)[:size])[0])

    def id(self, number: int) -> str:
        return "%" + self.called.get(number, str(number))

    def call(self, number: int, name: str) -> None:
        """Name a result, unless another has that name."""
        if self.names and name not in self.called.values():
            self.called[number] = name

    def declare(self, opcode: int, result: int, words: list[int]) -> None:
        """Name a type, or a constant of a scalar type."""
        if opcode in _SCALARS:
            name, code = _SCALARS[opcode][tuple(words)]
            self.scalars[result] = (code, words[0] // 8 if words else 0)
            self.call(result, name)
        elif opcode == _VECTOR:
            self.call(result, f"{self.id(words[0])[1:]}x{words[1]}")
        elif opcode == _CONSTANT:
            value = self.literal(*words)
            self.call(result, f"{self.id(words[0])[1:]}_{re.sub('[^0-9a-z]', '_', value.replace('-', 'minus'))}")


def _string(words: list[int]) -> str:
    return struct.pack(f"<{len(words)}I", *words).partition(b"\0")[0].decode()
