"""Rules on errors: where a broad `except` is allowed, what must never be loaded, and where a full
garbage collection may run.

- A broad `except` is allowed where its line, or the one above, carries `door: why`.
- Nothing else catches Exception, and nothing unpickles.
"""

import ast
import itertools
import re
from collections.abc import Iterator

from tests.house.source import Fault, Module, dotted

BROAD = {"Exception", "BaseException"}
DOOR = re.compile(r"#.*\bdoor: \S")
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLE_CALLS = {"torch.load", "torch.save", "pandas.read_pickle"}


def doors(module: Module) -> Iterator[Fault]:
    """A broad except is marked with its reason, or hands the error on."""
    lines = ["", *module.text.splitlines(), ""]
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler) or not _is_broad(node.type):
            continue
        marked = any(DOOR.search(lines[number]) for number in (node.lineno - 1, node.lineno))
        if not marked and not _hands_on(node):
            yield module.fault(node, "broad except without `door: <why>`")


def suppressed(module: Module) -> Iterator[Fault]:
    """`suppress(Exception)` is a broad except that ruff does not see."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not dotted(node.func).endswith("suppress"):
            continue
        if any(_is_broad(argument) for argument in node.args):
            yield module.fault(node, "suppress() of every error; name the ones that are meant")


def pickles(module: Module) -> Iterator[Fault]:
    """Nothing is pickled, by us or by a library on our behalf."""
    for node in ast.walk(module.tree):
        for name in _imported(node):
            if name.partition(".")[0] in PICKLES:
                yield module.fault(node, f"imports {name}; loading such data runs code")
        if isinstance(node, ast.Call) and dotted(node.func) in PICKLE_CALLS:
            yield module.fault(node, f"{dotted(node.func)} pickles; use safetensors")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield module.fault(node.value, "allow_pickle: leave it off")


def collections(module: Module) -> Iterator[Fault]:
    """A full collection stops a process that serves; at its start, one is before the freeze."""
    if not module.is_in("rollmesh"):
        return
    followers: dict[int, str] = {}
    for node in ast.walk(module.tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            for one, then in itertools.pairwise(statements if isinstance(statements, list) else []):
                followers[one.lineno] = _called(then)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or dotted(node.func) != "gc.collect":
            continue
        if followers.get(node.lineno) != "gc.freeze":
            yield module.fault(node, "a full collection; free objects by reference counts instead")


def _called(node: ast.stmt) -> str:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return dotted(node.value.func) if is_call else ""  # type: ignore[attr-defined]  # see above


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(each) for each in caught.elts)
    return dotted(caught).rpartition(".")[2] in BROAD


def _hands_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module]
    return []
