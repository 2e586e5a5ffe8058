"""Respell one function: the same source, with some global names bound to other objects or some statements edited.

The new function shares the live globals of the old one; what is injected becomes a free variable. So nothing is written
into the function's module, and later changes of that module are seen as before.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

_FACTORY = "_respelled"
_RESPELLED = "_tilesmith_respelled"  # attribute of a respelled function: what it was made of
_COMPILER_FLAGS = 0x1FF0000  # the __future__ bits of co_flags


class CannotRespell(ValueError):
    """The source of a function is missing, is not what runs, or cannot be compiled elsewhere."""


def respell(
    function: types.FunctionType,
    names: Mapping[str, Any],
    edit: Callable[[ast.FunctionDef], None] | None = None,
) -> types.FunctionType:
    """A function with the source of `function` in which each name of `names` means the given object.

    `edit` may change the syntax tree in place first; a function that was respelled before gets both edits. Tracebacks
    and line numbers keep pointing at the original file.
    Raises `CannotRespell` when the source cannot be read or does not compile to the code that `function` runs.
    """
    if _RESPELLED in function.__dict__:
        original, before, edit_before = function.__dict__[_RESPELLED]
        return respell(original, {**before, **names}, _one_after_the_other(edit_before, edit))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    clash = set(names) & (set(function.__code__.co_varnames) | set(function.__code__.co_cellvars) | set(cells))
    if clash:
        raise CannotRespell(f"{', '.join(sorted(clash))} is a local name of {function.__qualname__}")
    tree = _tree(function)
    if not _is_what_runs(function):
        raise CannotRespell(f"the source of {function.__qualname__} is not what runs")
    if edit is not None:
        edit(tree)
        ast.fix_missing_locations(tree)
    code = _compile(function, tree, (*cells, *names))
    bound = {**cells, **{name: types.CellType(value) for name, value in names.items()}}
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(bound[n] for n in code.co_freevars)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    made.__dict__[_RESPELLED] = (function, dict(names), edit)
    return made


def _one_after_the_other(
    first: Callable[[ast.FunctionDef], None] | None, second: Callable[[ast.FunctionDef], None] | None
) -> Callable[[ast.FunctionDef], None]:
    def edit(tree: ast.FunctionDef) -> None:
        for one in (first, second):
            if one is not None:
                one(tree)
                ast.fix_missing_locations(tree)

    return edit


def parse(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of `function`, to look at. Raises `CannotRespell` when its source cannot be read."""
    return _tree(function)


def of_self(node: ast.AST | None) -> str | None:
    """The name in `self.name`; None for any other expression."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own else None


def _tree(function: types.FunctionType) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise CannotRespell(f"the source of {function.__qualname__} cannot be read") from error
    text = "".join(lines)
    # A method's source is indented: a class statement above it gives the indentation a meaning.
    nested = text[:1].isspace()
    try:
        tree = ast.parse("class _:\n" + text if nested else text)
    except SyntaxError as error:
        raise CannotRespell(f"the source of {function.__qualname__} is not one statement") from error
    found = tree.body[0].body[0] if nested else tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise CannotRespell(f"{function.__qualname__} is not a plain function definition")
    names = {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)}
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        raise CannotRespell(f"{function.__qualname__} uses names that Python mangles by class")
    ast.increment_lineno(found, first - (2 if nested else 1))
    return found


def _compile(function: types.FunctionType, tree: ast.FunctionDef, free: tuple[str, ...]) -> types.CodeType:
    """The code object of `tree` inside a function whose parameters are `free`."""
    made = ast.FunctionDef(**{field: getattr(tree, field, None) for field in tree._fields})
    made.decorator_list, made.returns = [], None
    made.args = _bare(tree.args)
    factory = ast.parse(f"def {_FACTORY}({', '.join(free)}): pass").body[0]
    factory.body = [ast.copy_location(made, tree)]
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    flags = function.__code__.co_flags & _COMPILER_FLAGS
    outer = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    inner = next(c for c in outer.co_consts if isinstance(c, types.CodeType))
    return next(c for c in inner.co_consts if isinstance(c, types.CodeType) and c.co_name == tree.name)


def _bare(args: ast.arguments) -> ast.arguments:
    """The parameters without annotations and defaults, which the new function takes from the old one."""
    plain = [[ast.arg(arg=a.arg) for a in group] for group in (args.posonlyargs, args.args, args.kwonlyargs)]
    return ast.arguments(
        posonlyargs=plain[0],
        args=plain[1],
        vararg=args.vararg and ast.arg(arg=args.vararg.arg),
        kwonlyargs=plain[2],
        kw_defaults=[None] * len(plain[2]),
        kwarg=args.kwarg and ast.arg(arg=args.kwarg.arg),
        defaults=[],
    )


def _is_what_runs(function: types.FunctionType) -> bool:
    """Whether the file, as it is now, still compiles to the code that `function` runs."""
    # The whole file, because how a name is bound at its top level decides some instructions of the functions in it.
    lines, _ = inspect.findsource(function)
    code = function.__code__
    return any(
        c.co_name == code.co_name and c.co_firstlineno == code.co_firstlineno and c.co_code == code.co_code
        for c in _codes("".join(lines), code.co_filename)
    )


@functools.lru_cache(maxsize=32)
def _codes(text: str, filename: str) -> tuple[types.CodeType, ...]:
    found, todo = [], [compile(text, filename, "exec", dont_inherit=True)]
    while todo:
        inner = [c for c in todo.pop().co_consts if isinstance(c, types.CodeType)]
        found += inner
        todo += inner
    return tuple(found)


def respelled_forward(
    cls: type, names: Mapping[str, Any], edit: Callable[[ast.FunctionDef], None] | None = None
) -> types.FunctionType:
    """The forward of `cls` respelled under the decorators that it has, for a subclass of `cls`.

    A wrapper that a base class puts round the forward of every subclass (transformers' layers have one, for gradient
    checkpointing) is left out, as it comes back by itself.
    """
    forward = cls.forward
    if hasattr(forward, "__wrapped__"):
        wrapper = type("_", (cls,), {"forward": lambda self: None}).forward
        while hasattr(forward, "__wrapped__") and forward.__code__ is wrapper.__code__:
            forward = forward.__wrapped__
    return _under_decorators(forward, lambda inner: respell(inner, names, edit))


def _under_decorators(function: Any, respelled: Callable[[types.FunctionType], types.FunctionType]) -> Any:
    """Copies of the decorators' wrappers, from the outermost in, around the respelled innermost function."""
    if not isinstance(function, types.FunctionType):
        raise CannotRespell(f"{function!r} is not a Python function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return respelled(function)
    cells = list(function.__closure__ or ())
    places = [i for i, cell in enumerate(cells) if cell.cell_contents is inner]
    if len(places) != 1:
        raise CannotRespell(f"a decorator of {function.__qualname__} does not call what it wraps by one name")
    made_inner = _under_decorators(inner, respelled)
    cells[places[0]] = types.CellType(made_inner)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__, made.__wrapped__ = function.__kwdefaults__, made_inner
    made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return made
