"""How variables are assigned and read: before any read, and whether one value is all that a variable ever has."""

from __future__ import annotations

from collections import Counter

from tilesmith.codegen.nodes import Assign, Const, For, If, Stmt, Var, While, blocks, expressions, walk


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
    for e in expressions(s):
        if isinstance(e, Var) and e.name not in assigned:
            raise _Early(s.line, e.name)
    return assigned


def single_values(body: tuple[Stmt, ...]) -> set[str]:
    """The variables assigned once whose reads all lie in the block of the assignment: they need no memory."""
    statements = walk(body)
    assigned = Counter(s.name for s in statements if isinstance(s, (Assign, For)))
    reads = Counter(e.name for s in statements for e in expressions(s) if isinstance(e, Var))
    found: set[str] = set()

    def settle(block: tuple[Stmt, ...], inside: Counter) -> Counter:
        """Note those whose reads are all `inside`, which holds the reads of `block` and returns."""
        for s in block:
            if isinstance(s, Assign) and assigned[s.name] == 1 and inside[s.name] == reads[s.name]:
                found.add(s.name)
        return inside

    def visit(block: tuple[Stmt, ...]) -> Counter:
        inside = Counter()
        for s in block:
            own = Counter(e.name for e in expressions(s) if isinstance(e, Var))
            if isinstance(s, While):  # `before`, the condition and `body` are one stretch of code
                own = settle(s.before, own + visit(s.before) + visit(s.body))
            else:
                for inner in blocks(s):
                    own.update(visit(inner))
            inside.update(own)
        return settle(block, inside)

    visit(body)
    return found
