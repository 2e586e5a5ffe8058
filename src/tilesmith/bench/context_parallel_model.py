"""The cost model of context parallelism as a table: what "auto" takes on 8 and 64 GPUs.

`python -m tilesmith.bench.context_parallel_model` prints docs/context-parallel-model.md.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from tilesmith.distributed import Decision, Layout
from tilesmith.distributed.cost import MACHINES, Problem, choose
from tilesmith.distributed.pieces import Sight

SIZES = (8, 64)
TOKENS = tuple(1 << n for n in (16, 18, 20, 23))
HEADS = ((32, 8), (16, 16))
MEMORY = 17 * 10**9  # bytes for others' keys: an eighth of an H200
COLUMNS = ("allgather", "ring", "ulysses", "hybrid")


def decision(tokens: int, size: int, heads: int, kv_heads: int) -> Decision:
    """The model's choice for causal attention at head dim 128 in bf16, 8 GPUs to a host."""
    machine = replace(MACHINES["sm90"], memory=MEMORY)
    layout, sight = Layout.zigzag(tokens, size), Sight(right=0)
    return choose(Problem(layout, (0, tokens), sight, 1, heads, kv_heads, 128), machine)


def page() -> str:
    """The table as Markdown."""
    machine = MACHINES["sm90"]
    lines = [
        "# What context parallelism should cost",
        "",
        "Estimated, not measured: milliseconds for forward and backward of one layer's causal attention, by the model",
        "in `tilesmith.distributed.cost`, with head dim 128, bf16 and hosts of 8 H200s. The constants of the model:",
        "",
        f"- the attention kernel: {machine.rate / 1e12:g} TFLOP/s, and {machine.ramp * 1e6:g} µs a call",
        f"- the host: {machine.issue * 1e3:g} ms a call and {machine.exchange * 1e3:g} ms an exchange, "
        "which limit short passes",
        f"- between GPUs of a host: {machine.link.bandwidth / 1e9:g} GB/s and {machine.link.latency * 1e6:g} µs; "
        f"between hosts: {machine.network.bandwidth / 1e9:g} GB/s and {machine.network.latency * 1e6:g} µs a GPU",
        f"- memory for keys of other ranks: {MEMORY / 1e9:g} GB",
        "",
        'Bold marks what `mode="auto"` takes. For hybrids the best degree is shown in parentheses. – marks a mode that',
        "is not possible, and square brackets one that does not fit into this memory.",
        "",
        "| GPUs | tokens | heads | " + " | ".join(COLUMNS) + " |",
        "| --: | --: | :-- | " + " | ".join("--:" for _ in COLUMNS) + " |",
    ]
    for size in SIZES:
        for tokens in TOKENS:
            for heads, kv_heads in HEADS:
                lines.append(row(size, tokens, heads, kv_heads))
    return "\n".join(lines) + "\n"


def row(size: int, tokens: int, heads: int, kv_heads: int) -> str:
    """One line of the table."""
    found = decision(tokens, size, heads, kv_heads)
    cells = [_cell(found, mode) for mode in COLUMNS]
    return f"| {size} | {tokens:,} | {heads}/{kv_heads} | " + " | ".join(cells) + " |"


def _cell(found: Decision, mode: str) -> str:
    able = [one for one in found.estimates if one.mode == mode and not one.refused]
    if not able:
        return "–"
    fitting = [one for one in able if one.memory <= MEMORY]
    best = min(fitting or able, key=lambda one: one.seconds)
    text = f"{best.seconds * 1e3:,.2f}" if best.seconds < 1 else f"{best.seconds * 1e3:,.0f}"
    text += f" ({best.degree})" if mode == "hybrid" else ""
    if not fitting:
        return f"[{text}]"
    return f"**{text}**" if mode == found.mode else text


if __name__ == "__main__":
    sys.stdout.write(page())
