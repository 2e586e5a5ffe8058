"""How variables are assigned and read: before any read, and whether one value is all that a variable ever has."""

from __future__ import annotations

from collections import Counter

from tilesmith.codegen.nodes import Assign, Const, For, If, Stmt, While, blocks, reads, walk


def unassigned(body: tuple[Stmt, ...]) -> tuple[int, str] | None:
    """(line, name) of the first read that may come before any assignment, or None."""
    try:
        _block(body, set())
    except _Early as early:
        return early.args
    return None


class _Early(Exception):
    """Line and name of an early read."""


def _block(body: tuple[Stmt, ...], assigned: set[str]) -> set[str]:
    for s in body:
        if isinstance(s, While):
            _block(s.body, _reads(s, _block(s.before, set(assigned))))
            continue
        _reads(s, assigned)
        if isinstance(s, Assign):
            assigned.add(s.name)
        elif isinstance(s, If):
            assigned |= _block(s.then, set(assigned)) & _block(s.orelse, set(assigned))
        elif isinstance(s, For):
            after = _block(s.body, assigned | {s.name})
            if isinstance(s.start, Const) and isinstance(s.stop, Const) and s.start.value < s.stop.value:
                assigned |= after - {s.name}
    return assigned


def _reads(s: Stmt, assigned: set[str]) -> set[str]:
    for name in reads(s):
        if name not in assigned:
            raise _Early(s.line, name)
    return assigned


def single_values(body: tuple[Stmt, ...]) -> set[str]:
    """The variables assigned once whose reads all lie in the block of the assignment: they need no memory."""
    statements = walk(body)
    assigned = Counter(s.name for s in statements if isinstance(s, (Assign, For)))
    read = Counter(name for s in statements for name in reads(s))
    found: set[str] = set()

    def settle(block: tuple[Stmt, ...], inside: Counter) -> Counter:
        """Note those whose reads are all `inside`, which holds the reads of `block` and returns."""
        for s in block:
            if isinstance(s, Assign) and assigned[s.name] == 1 and inside[s.name] == read[s.name]:
                found.add(s.name)
        return inside

    def visit(block: tuple[Stmt, ...]) -> Counter:
        inside = Counter()
        for s in block:
            if isinstance(s, While):  # `before`, the condition and `body` are one stretch of code
                inside += settle(s.before, Counter(reads(s)) + visit(s.before) + visit(s.body))
                continue
            for name in reads(s):
                inside[name] += 1
            for inner in blocks(s):
                inside += visit(inner)
        return settle(block, inside)

    visit(body)
    return found


def declarations(body: tuple[Stmt, ...]) -> dict[int, dict[int, list[str]]]:
    """For each block, by its id: the variables that a text declares before its k-th statement.

    A variable belongs to the innermost block that holds all its uses. Loops declare their own.
    """
    counters = {s.name for s in walk(body) if isinstance(s, For)}
    uses: dict[int, dict[str, list[int]]] = {}
    found: dict[int, dict[int, list[str]]] = {}

    def header(s: Stmt) -> list[str]:
        """The variables of a statement without its blocks; the condition of a while is inside its block."""
        names = [s.name, *reads(s)] if isinstance(s, Assign) else reads(s)
        return [name for name in names if name not in counters]

    def gather(block: tuple[Stmt, ...]) -> dict[str, list[int]]:
        """Note which statements of a block use a variable."""
        uses[id(block)] = places = {}
        for k, s in enumerate(block):
            names = dict.fromkeys(header(s))
            for inner in blocks(s):
                names.update(dict.fromkeys(gather(inner)))
            for name in names:
                places.setdefault(name, []).append(k)
        return places

    def settle(block: tuple[Stmt, ...], outer: set[str]) -> None:
        """Declare what is not declared in `outer` here or in the block's blocks."""
        found[id(block)] = here = {}
        for name, places in uses[id(block)].items():
            first = block[places[0]]
            inside = len(places) == 1 and blocks(first) and name not in header(first)
            if name not in outer and not inside:
                here.setdefault(places[0], []).append(name)
        outer = outer.union(*here.values())
        for s in block:
            for inner in blocks(s):
                settle(inner, outer)

    gather(body)
    settle(body, set())
    return found
