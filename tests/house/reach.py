"""Find modules that nothing leads to, by following imports from the entry points.

- Entry points are pyproject's scripts, every __main__.py and the examples; for rollmesh/testing
  also tests and benchmarks.
- Imports anywhere in a file lead on, and so do strings that name a module of ours, as in lazy
  dispatch and argv lists.
- A package is reached with its children.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator

from tests.house.source import Fault, Module

MODULE_NAME = re.compile(r"(?P<name>rollmesh(\.\w+)+)(:\w+)?")


def unreachable(modules: Iterable[Module], pyproject: str) -> Iterator[Fault]:
    """A fault for each module of rollmesh/ that no entry point leads to."""
    by_name = {module.name: module for module in modules}
    scripts: dict[str, str] = tomllib.loads(pyproject)["project"].get("scripts", {})
    entries = {target.partition(":")[0] for target in scripts.values()}
    entries |= {name for name in by_name if name.endswith(".__main__")}
    entries |= {name for name in by_name if name.startswith("examples.")}
    reached = _follow(entries & by_name.keys(), by_name)
    outside = {name for name in by_name if name.startswith(("tests.", "benchmarks.", "examples."))}
    by_tests = _follow(outside, by_name)
    for name, module in by_name.items():
        if module.is_in("rollmesh/testing"):
            known = by_tests
        elif module.is_in("rollmesh"):
            known = reached
        else:
            continue
        if name not in known:
            yield module.fault(1, f"no entry point leads to {name}")


def _follow(start: Iterable[str], by_name: dict[str, Module]) -> set[str]:
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in reached or name not in by_name:
            continue
        reached.add(name)
        waiting.append(name.rpartition(".")[0])
        waiting.extend(_leads_to(by_name[name], by_name.keys()))
    return reached


def _leads_to(module: Module, known: Iterable[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = MODULE_NAME.fullmatch(node.value)
            if found:
                yield found["name"]
        elif isinstance(node, ast.JoinedStr):
            yield from _children(node, known)


def _children(text: ast.JoinedStr, known: Iterable[str]) -> Iterator[str]:
    """f"rollmesh.cli.{verb}" leads to every direct child of rollmesh.cli."""
    head = text.values[0]
    if isinstance(head, ast.Constant) and MODULE_NAME.fullmatch(str(head.value).rstrip(".")):
        prefix = str(head.value)
        for name in known:
            if prefix.endswith(".") and name.rpartition(".")[0] == prefix.rstrip("."):
                yield name
