"""Attention modules of transformers, seen from their code: do they use its interface, and do they hand its mask on."""

from __future__ import annotations

import ast
import functools
import inspect
import types

from torch import nn

from tilesmith.rewrite import CannotRespell, original_class, parse

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def uses_interface(module: nn.Module) -> bool:
    """Whether the forward of `module` takes its attention function from transformers' table of them."""
    code = getattr(inspect.unwrap(original_class(type(module)).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


@functools.cache
def computes_mask(cls: type) -> bool:
    """Whether a class that uses the interface gives it another mask than the model made, or may do so.

    Sparse selection (DeepSeek's indexers, Doge) edits the mask, and does so for the implementations it knows by name
    and for the types of mask that those get. Where transformers makes no mask for the file, there is none to lose.
    """
    forward = inspect.unwrap(cls.forward)
    if not _masks_are_made_for(forward):
        return False
    try:
        tree = parse(forward)
    except CannotRespell:
        return True
    values: dict[str, list[ast.expr | None]] = {argument.arg: [] for argument in _arguments(tree)}
    functions = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known = isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in targets:
                for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
                    values.setdefault(name, []).append(node.value if known and isinstance(target, ast.Name) else None)
            if known and node.value is not None and _names(node.value) & {_INTERFACE}:
                functions |= {name for target in targets for name in _names(target)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _names(n.func) & functions]
    return any(not _handed_on(mask, values, ()) for call in calls for mask in _masks(call))


@functools.cache
def passes_block_lists(cls: type) -> bool:
    """Whether a class that uses the interface tells its attention function which blocks of keys each query sees, and
    edits the mask only for functions that do not take them (MiniMax-M3)."""
    try:
        tree = parse(inspect.unwrap(cls.forward))
    except CannotRespell:
        return False
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(keyword.arg == "block_indices" for call in calls for keyword in call.keywords)


def _masks_are_made_for(forward: types.FunctionType) -> bool:
    """Whether the file of `forward` asks transformers for masks."""
    names = forward.__globals__.items()
    return any(name.startswith("create_") and "masking_utils" in getattr(f, "__module__", "") for name, f in names)


def _arguments(tree: ast.FunctionDef) -> list[ast.arg]:
    return [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _masks(call: ast.Call) -> list[ast.expr]:
    """The mask in a call of an attention function: (module, query, key, value, attention_mask, ...)."""
    return [*call.args[4:5], *(keyword.value for keyword in call.keywords if keyword.arg == "attention_mask")]


def _handed_on(node: ast.expr | None, values: dict[str, list[ast.expr | None]], seen: tuple[str, ...]) -> bool:
    """Whether the value of `node` is None, an argument, or a slice of one or a choice among several."""
    if isinstance(node, ast.Constant):
        return node.value is None
    if isinstance(node, ast.Name):
        known = node.id in values
        return node.id in seen or (known and all(_handed_on(v, values, (*seen, node.id)) for v in values[node.id]))
    if isinstance(node, ast.Subscript):
        return _handed_on(node.value, values, seen)
    return isinstance(node, ast.IfExp) and all(_handed_on(n, values, seen) for n in (node.body, node.orelse))
