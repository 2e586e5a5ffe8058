"""Writes the pages of this folder: each pre-built kernel's Python text beside what is printed from it for each target.

    python docs/kernels/generate.py

A page shows the same loop or branch everywhere: the one that begins at a line of the Python text.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path

from tilesmith.codegen import KernelError, KernelIR, cuda, metal, spirv, wgsl
from tilesmith.codegen.disassembly import disassemble
from tilesmith.codegen.nodes import For, If
from tilesmith.kernels import KERNELS, fused_ops
from tilesmith.kernels.flash_attention import TunedConfigs, default_config

FOLDER = Path(__file__).parent
KERNEL_FILES = FOLDER.parents[1] / "src" / "tilesmith" / "kernels"
NOTICE = "<!-- written by docs/kernels/generate.py -->"
PYTHON_LINES, LINES = 60, 28
TARGETS = {
    "cuda": ("CUDA C++", "cpp", cuda.generate),
    "metal": ("Metal", "metal", metal.generate),
    "wgsl": ("WGSL", "wgsl", wgsl.generate),
    "spvasm": ("SPIR-V", "llvm", lambda ir: disassemble(spirv.generate(ir))),
}


@dataclass(frozen=True)
class Part:
    """A kernel of one configuration for some targets.

    file: of its Python text. shown: the line that the Python excerpt begins with. at: the line of the loop or
    branch that the other excerpts begin with, None: `shown`. after: a line that both come after.
    """

    config: object
    file: str
    shown: str
    at: str | None = None
    after: str = ""
    targets: tuple[str, ...] = tuple(TARGETS)


@dataclass(frozen=True)
class Page:
    """A kernel's page. kernel: its name in the catalogue."""

    title: str
    kernel: str
    parts: tuple[Part, ...]


_MATRIX, _TILES = "attention_matrix", "for start in range(0, last, bkv):"
PAGES = {
    "flash_attention": Page(
        "Flash attention",
        "flash_attention",
        (Part(default_config, "attention_scalar", _TILES),),
    ),
    "flash_attention_matrix": Page(
        "Flash attention on matrix units",
        "flash_attention",
        (
            Part(TunedConfigs.cuda, _MATRIX, _TILES, after="def _in_registers", targets=("cuda", "wgsl")),
            Part(TunedConfigs.apple, _MATRIX, _TILES, after="def _in_registers", targets=("metal",)),
            Part(TunedConfigs.rdna3, _MATRIX, _TILES, after="def _by_elements", targets=("spvasm",)),
        ),
    ),
    "layer_norm_linear": Page(
        "Layer norm and linear",
        "layer_norm_linear",
        (Part(fused_ops.LayerNormLinearConfig(4096), "norm_linear", "for start in range(0, vectors, depth):"),),
    ),
    "rms_norm_rope": Page(
        "RMS norm and rotary embedding",
        "rms_norm_rope",
        (
            Part(
                fused_ops.RMSNormRoPEConfig(4096, 128, 8192),
                "norm_rope",
                "for k in sweep(plan.count):",
                at="if live and (plan.exact or p < plan.vectors):",
            ),
        ),
    ),
    "swiglu": Page(
        "SwiGLU",
        "swiglu",
        (Part(fused_ops.SwiGLUConfig(4096, use_half=True), "gates", "if first + (threads * _VECTORS_A_THREAD - 1) <"),),
    ),
    "geglu": Page(
        "GeGLU",
        "geglu",
        (Part(fused_ops.GeGLUConfig(4096), "gates", "if first + (threads * _VECTORS_A_THREAD - 1) <"),),
    ),
    "residual_layer_norm": Page(
        "Residual and layer norm",
        "residual_layer_norm",
        (Part(fused_ops.ResidualLayerNormConfig(4096), "norms", "if row < rows:"),),
    ),
    "softmax_dropout": Page(
        "Softmax and dropout",
        "softmax_dropout",
        (Part(fused_ops.SoftmaxDropoutConfig(4096), "probability", "for k in unroll(some):", at="if row < rows and"),),
    ),
}


def pages() -> dict[str, str]:
    """File name -> text of every page, the index included."""
    return {f"{name}.md": _page(page) for name, page in PAGES.items()} | {"README.md": _index()}


def _page(page: Page) -> str:
    lines = [f"# {page.title}", "", NOTICE, "", inspect.getdoc(KERNELS[page.kernel].create), ""]
    python = None
    for part in page.parts:
        text = (KERNEL_FILES / f"{part.file}.py").read_text(encoding="utf-8").splitlines()
        at, shown = _places(part, text)
        ir = KERNELS[page.kernel].create(part.config)
        if python != (python := (part.file, shown)):
            where = f"src/tilesmith/kernels/{part.file}.py"
            lines += [f"## Python, [{where}](../../{where})", ""]
            lines += _fenced("python", _block(text, shown), PYTHON_LINES, "#")
        lines += ["```", _command(page, part), "```", "", _takes(ir), ""]
        for target in part.targets:
            lines += _printed(ir, target, at + 1)
    return "\n".join(lines) + "\n"


def _places(part: Part, text: list[str]) -> tuple[int, int]:
    """The lines, from 0, at which the printed and the Python excerpt begin."""
    first = next(i for i, line in enumerate(text) if part.after in line)
    at = next(i for i, line in enumerate(text[first:], first) if (part.at or part.shown) in line)
    return at, max(i for i in range(first, at + 1) if part.shown in text[i])


def _printed(ir: KernelIR, target: str, line: int) -> list[str]:
    """A target's text from what begins at that line of the Python text, or why it refuses."""
    title, language, generate = TARGETS[target]
    try:
        text = generate(ir).splitlines()
    except KernelError as refusal:
        return [f"## {title}", "", f"Refused: {refusal}.", ""]
    comment = ";" if target == "spvasm" else "//"
    return [f"## {title}", "", *_fenced(language, text[_start(ir, text, line) :], LINES, comment)]


def _start(ir: KernelIR, printed: list[str], line: int) -> int:
    """The printed line where the first loop or branch of that line of the Python text begins."""
    kind = next(type(s) for s in ir.statements if s.line == line and isinstance(s, (For, If)))
    before = [s for s in ir.statements if isinstance(s, kind)]
    count = next(k for k, s in enumerate(before) if s.line == line)
    entry = next((k for k, text in enumerate(printed) if f" {ir.name}(" in text), 0)
    words = ("for (", "OpLoopMerge") if kind is For else ("if (", "OpSelectionMerge")
    found = [k for k in range(entry, len(printed)) if printed[k].strip().startswith(words)]
    return found[count]


def _block(text: list[str], start: int) -> list[str]:
    """The lines from `start` to the end of its block and, of a branch, of its else."""
    depth = len(text[start]) - len(text[start].lstrip())
    end = start + 1
    while end < len(text) and (
        not text[end].strip() or len(text[end]) - len(text[end].lstrip()) > depth or text[end].strip() == "else:"
    ):
        end += 1
    return text[start:end]


def _fenced(language: str, lines: list[str], limit: int, comment: str) -> list[str]:
    """A block of code without its common indentation; what is beyond the limit is counted."""
    lines = [line.rstrip() for line in lines if line.strip()]
    kept, left = lines[:limit], len(lines) - limit
    margin = min(len(line) - len(line.lstrip()) for line in kept)
    more = [f"{comment} {left:,} more line{'s' * (left > 1)}"] if left > 0 else []
    return [f"```{language}", *(line[margin:] for line in kept), *more, "```", ""]


def _command(page: Page, part: Part) -> str:
    fields = [(f, getattr(part.config, f.name)) for f in dataclasses.fields(part.config)]
    given = [f"--set {f.name}={str(value).lower()}" for f, value in fields if value != f.default]
    return " ".join(["tilesmith codegen", page.kernel, *given, f"--target {part.targets[0]}"])


def _takes(ir: KernelIR) -> str:
    access = {"read": "reads", "write": "writes", "readwrite": "reads and writes"}
    tensors = ", ".join(f"{access[b.access]} `{b.name}` ({b.type})" for b in ir.buffers)
    scalars = ", ".join(f"`{s.name}` ({s.type})" for s in ir.scalars)
    needs = f" Needs {', '.join(sorted(ir.features))}." if ir.features else ""
    return (
        f"{ir.threads} threads per workgroup, {ir.shared_bytes:,} bytes of shared memory: {tensors}; scalars "
        f"{scalars}.{needs}"
    )


def _index() -> str:
    lines = [
        "# Pre-built kernels",
        "",
        NOTICE,
        "",
        "Each kernel is one Python source in `tilesmith.kernels`, from which `tilesmith.codegen` prints the code for",
        "every target. The tests run that code through Vulkan and WebGPU, and on CUDA where there is a GPU. The Metal",
        "code has not been compiled by Apple's compiler: a C++ compiler checks it against a stub of Metal's library.",
        "",
        "How to write one: [Portable kernels](../guides/portable-kernels.md).",
        "",
        "| kernel | configuration | threads | shared bytes | lines of CUDA, Metal, WGSL | words of SPIR-V |",
        "| :-- | :-- | --: | --: | --: | --: |",
    ]
    for name, page in PAGES.items():
        for part in page.parts:
            ir = KERNELS[page.kernel].create(part.config)
            counts = ", ".join(str(_count(TARGETS[t][2], ir)) for t in ("cuda", "metal", "wgsl"))
            words = _count(spirv.generate, ir)
            lines.append(
                f"| [{page.title}]({name}.md) | `{_configuration(part.config)}` | {ir.threads} | {ir.shared_bytes:,} | "
                f"{counts} | {words} |"
            )
    return "\n".join(lines) + "\n"


def _configuration(config: object) -> str:
    given = [f for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]
    return f"{type(config).__name__}({', '.join(f'{f.name}={getattr(config, f.name)!r}' for f in given)})"


def _count(generate, ir: KernelIR) -> str:
    """Lines of a text, words of a binary; a dash where the target refuses."""
    try:
        printed = generate(ir)
    except KernelError:
        return "–"
    return f"{len(printed) // 4:,}" if isinstance(printed, bytes) else f"{printed.count(chr(10)):,}"


def main() -> None:
    """Write every page."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
