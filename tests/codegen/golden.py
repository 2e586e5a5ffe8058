"""What the printers wrote when it was last read. `PYTHONPATH=src:tests python -m codegen.golden` writes it anew."""

from __future__ import annotations

import struct
from pathlib import Path

from codegen.samples import SAMPLES
from tilesmith.codegen import KernelError, cuda, metal, spirv, to_json, wgsl

FOLDER = Path(__file__).parent.parent / "golden" / "codegen"
NAMES = (
    "rms_norm",
    "control_flow",
    "halves",
    "subgroups",
    "matmul",
    "softmax",
    "softmax_8",
    "softmax_anywhere",
    "reserved_names",
)


def instructions(module: bytes) -> list[list[int]]:
    """The instructions of a SPIR-V module: opcode, then operands. Raises ValueError where lengths do not add up."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    found, at = [], 5
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if length == 0 or at + length > len(words):
            raise ValueError(f"instruction {opcode} at word {at} has length {length}")
        found.append([opcode, *words[at + 1 : at + length]])
        at += length
    return found


def listing(module: bytes) -> str:
    """A SPIR-V module as text: one instruction a line, in numbers."""
    return "".join(" ".join(map(str, i)) + "\n" for i in instructions(module))


PRINTERS = {
    "cu": cuda.generate,
    "metal": metal.generate,
    "wgsl": wgsl.generate,
    "spirv": lambda ir: listing(spirv.generate(ir)),
    "json": lambda ir: to_json(ir, indent=None) + "\n",
}


def outputs(name: str) -> dict[str, str]:
    """File name -> text for one sample; the JSON of the first only."""
    ir, found = SAMPLES[name]().ir, {}
    for suffix, generate in PRINTERS.items():
        if suffix == "json" and name != NAMES[0]:
            continue
        try:
            found[f"{name}.{suffix}"] = generate(ir)
        except KernelError:
            continue
    return found


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for name in NAMES:
        for file, text in outputs(name).items():
            (FOLDER / file).write_text(text)
