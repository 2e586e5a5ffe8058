"""What machine code (SASS) shows of a compiler's fault: uniform registers that are read where nobody has written them.

Where both ways of a branch need the same address, ptxas 12.8 may write some of its uniform registers in one way alone.
The other way then reads what was there before: often the right address of an earlier round, so that a test seldom sees
it. Here each path from a kernel's entry counts, also those that no call takes.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?PT?\d*)\s+)?([A-Z][\w.]*)\s*(.*?);")
_UNIFORM = re.compile(r"(g?desc)?\[?UR(\d+)\b")
_SPILL = re.compile(r"(STL|LDL)\b")
_SIZED, _REGCOUNT = 0x04, 0x2F  # in .nv.info
_NOBITS = 8  # a section without content
_CONSTANT = re.compile(r"c\[0x\w+\]\[UR(\d+)")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
# whose first operand is a uniform register that they write
_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
_NO_WRITERS = ("UTMA", "UBLKCP", "USETMAXREG", "UISETP", "UPLOP3", "UFSETP", "UCGABAR")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP", "CALL", "BSYNC", "BREAK", "BPT")


class _Instruction(NamedTuple):
    place: str
    guarded: bool
    name: str
    operands: list[str]

    def writes(self) -> set[int]:
        """Uniform registers that it writes, perhaps under a predicate."""
        if not self.name.startswith(_WRITERS) or self.name.startswith(_NO_WRITERS):
            return set()
        found = re.match(r"UR(\d+)", self.operands[self._predicates()]) if self.operands else None
        if found is None:
            return set()
        first = int(found[1])
        return {first, first + 1} if ".64" in self.name or "WIDE" in self.name else {first}

    def reads(self) -> set[int]:
        """Uniform registers that it reads. A descriptor is two registers, those of a product's two tiles are four, of
        which one whose first operand lies in registers reads but the last two. An index into constants is one."""
        found = set()
        for operand in self.operands[self._predicates() + 1 if self.writes() else 0 :]:
            if index := _CONSTANT.search(operand):
                found.add(int(index[1]))
                continue
            for kind, number in _UNIFORM.findall(operand):
                first = int(number)
                if kind == "gdesc":
                    found |= set(range(first + 2 if self.operands[1].startswith("R") else first, first + 4))
                elif kind == "desc" or (self.name.startswith("U") and ".64" in self.name):
                    found |= {first, first + 1}
                else:
                    found.add(first)
        return found

    def _predicates(self) -> int:
        """How many predicates it writes before a register: one or none."""
        return int(len(self.operands) > 1 and re.match(r"U?P\d|U?PT", self.operands[0]) is not None)


class Usage(NamedTuple):
    """What a kernel takes of a multiprocessor. registers: of a thread at the start, before warpgroups share them out
    anew. spills: instructions that store registers to local memory or load them. code: bytes of instructions."""

    registers: int
    spills: int
    code: int


def usage(cubin: bytes, text: str) -> Usage:
    """The usage of the kernel in `cubin`, whose machine code `text` is."""
    sections = dict(_sections(cubin))
    code = sum(len(content) for name, content in sections.items() if name.startswith(".text."))
    spills = sum(_SPILL.match(instruction.name) is not None for instruction in _parsed(text)[0])
    return Usage(_registers(sections.get(".nv.info", b"")), spills, code)


def _registers(info: bytes) -> int:
    """The number that `.nv.info` holds as EIATTR_REGCOUNT: (format, attribute, value or size of what follows) each."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (_SIZED, _REGCOUNT):
            return struct.unpack_from("<I", info, at + 8)[0]  # behind the function's index
        at += 4 + (size if form == _SIZED else 0)
    return 0


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a 64-bit ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    table = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        content = elf[offset : offset + length] if kind != _NOBITS else b""
        yield elf[table + name : elf.index(b"\0", table + name)].decode(), content


def unwritten(text: str) -> list[str]:
    """Each read of a uniform register that some path from the entry reaches without a write of it, in the text that
    `nvdisasm -c` prints of one kernel."""
    instructions, labels = _parsed(text)
    starts = {0, *labels.values()} | {i + 1 for i, x in enumerate(instructions) if x.name.split(".")[0] in _ENDS}
    starts = sorted(start for start in starts if start < len(instructions))
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(instructions)])]
    at = {block[0]: i for i, block in enumerate(blocks)}
    following = [{at[i] for i in _following(instructions, labels, block[-1]) if i in at} for block in blocks]
    _enter_tables(instructions, blocks, following)
    made = [set().union(*(instructions[i].writes() for i in block)) for block in blocks]
    written: list[set[int] | None] = [set(), *(None for _ in blocks[1:])]
    left = [0]
    while left:
        block = left.pop()
        behind = written[block] | made[block]
        for other in following[block]:
            here = behind if written[other] is None else written[other] & behind
            if here != written[other]:
                written[other] = here
                left.append(other)
    return [
        x for block, before in zip(blocks, written) if before is not None for x in _missing(instructions, block, before)
    ]


def _enter_tables(instructions: list[_Instruction], blocks: list[range], following: list[set[int]]) -> None:
    """Add what indirect branches (BRX) may jump to: the text does not tell, so the first block that nothing else leads
    to, as long as there is one. ptxas lays what a block leads to behind it."""
    tables = [i for i, block in enumerate(blocks) if instructions[block[-1]].name.startswith("BRX")]
    reached: set[int] = set()
    left = [0]
    while tables and left:
        while left:
            block = left.pop()
            if block not in reached:
                reached.add(block)
                left += following[block]
        left = sorted(set(range(len(blocks))) - reached)[:1]
        for table in tables:
            following[table] |= set(left)


def _missing(instructions: list[_Instruction], block: range, written: set[int]) -> Iterator[str]:
    written = set(written)
    for i in block:
        for register in sorted(instructions[i].reads() - written):
            yield f"{instructions[i].place}: {instructions[i].name} reads UR{register}"
        written |= instructions[i].writes()


def _parsed(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions, and the number of the one behind each label."""
    instructions: list[_Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            place, guard, name, rest = found.groups()
            instructions.append(_Instruction(place, guard is not None, name, [x.strip() for x in rest.split(",")]))
    return instructions, labels


def _following(instructions: list[_Instruction], labels: dict[str, int], i: int) -> Iterator[int]:
    """The instructions that may come behind a block's last one."""
    last = instructions[i]
    kind = last.name.split(".")[0]
    jumps = kind in ("BRA", "JMP", "CALL")
    if jumps and (target := _TARGET.search(last.operands[-1])):
        yield labels[target[1]]
    chosen = last.guarded or "DIV" in last.name or re.match(r"!?U?P\d", last.operands[0])
    if chosen or kind == "CALL" or not (jumps or kind in ("EXIT", "RET", "BPT", "BRX")):
        yield i + 1


def disassembled(cubin: bytes) -> str:
    """The text of a kernel's machine code, by the disassembler that Triton ships."""
    from triton import knobs

    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", str(path)]  # labels need no analysis of the data flow
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
