"""Generated bugs: a correct function with one operator or one number changed.

- Every bug fails the checks of its function, and the original source passes them.
"""

import ast
from collections.abc import Iterator
from typing import TypeGuard

import msgspec

from examples.bugs.functions import FUNCTIONS, CheckedFunction

SWAPS: dict[type[ast.AST] | None, type[ast.AST]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Mod: ast.FloorDiv,
}


class Bug(msgspec.Struct, frozen=True):
    """A function with a bug."""

    id: str
    function: CheckedFunction
    source: str


def all_bugs() -> list[Bug]:
    """Every bug of every function, in a fixed order."""
    return [bug for function in FUNCTIONS for bug in _bugs(function)]


def _bugs(function: CheckedFunction) -> Iterator[Bug]:
    num_places = len(_places(ast.parse(function.source)))
    for number in range(num_places):
        tree = ast.parse(function.source)
        _break(_places(tree)[number])
        source = ast.unparse(tree) + "\n"
        if not _holds(source, function.checks):
            yield Bug(f"{function.name}-{number}", function, source)


def _places(tree: ast.Module) -> list[ast.AST]:
    """Nodes in which one change may make a bug."""
    return [node for node in ast.walk(tree) if _is_number(node) or _operator(node) in SWAPS]


def _is_number(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _operator(node: ast.AST) -> type[ast.AST] | None:
    """Kind of operator that a node holds."""
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            return type(node.op)
        case ast.Compare():
            return type(node.ops[0])
        case _:
            return None


def _break(place: ast.AST) -> None:
    """Change the number or the operator of a node."""
    if _is_number(place):
        assert isinstance(place.value, int)
        place.value += 1
        return
    operator = _operator(place)
    assert operator is not None
    if isinstance(place, ast.Compare):
        place.ops[0] = SWAPS[operator]()  # type: ignore[call-overload]
    else:
        place.op = SWAPS[operator]()  # type: ignore[attr-defined]


def _holds(source: str, checks: str) -> bool:
    """Whether the checks pass; the source is from this repository, so it may run here."""
    try:
        exec(source + checks, {})
    except Exception:  # noqa: BLE001 - door: a broken function may raise anything
        return False
    return True
