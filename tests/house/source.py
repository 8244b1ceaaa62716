"""Files of the repository, and its Python modules parsed once, for the house checks.

- Every file counts that .gitignore does not name.
- A check takes a Module and yields Faults.
- Paths are relative to the repository with slashes, so that a fault reads the same on every
  machine.
"""

import ast
import functools
import gc
import io
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FOLDERS = ("rollmesh/", "tests/", "benchmarks/", "examples/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """One breach of a rule, at one line."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Module:
    """A Python file: its path, text and tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its dotted name: `rollmesh.core.ids`, and `rollmesh.core` for its __init__.py."""
        dotted = self.path.removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")

    @property
    def file_name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    def is_in(self, *folders: str) -> bool:
        """Whether it is below one of `folders`."""
        return self.path.startswith(tuple(f"{folder}/" for folder in folders))

    def fault(self, at: ast.AST | int, message: str) -> Fault:
        """A fault at the line of a node, or at a line."""
        line = at if isinstance(at, int) else getattr(at, "lineno", 1)
        return Fault(self.path, line, message)

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every class, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                yield node

    def comments(self) -> Iterator[tuple[int, str]]:
        """(line, text) of every comment."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def parse(path: str, text: str) -> Module:
    """A module of `text`, as if it were at `path`."""
    return Module(path, text, ast.parse(text, path))


@functools.cache
def all_modules() -> tuple[Module, ...]:
    """Every Python module of the repository, in order of path; read once, and kept."""
    with _no_collections():
        return tuple(
            parse(path, (ROOT / path).read_text(encoding="utf-8"))
            for path in all_files()
            if path.endswith(".py") and path.startswith(PYTHON_FOLDERS)
        )


@contextmanager
def _no_collections() -> Iterator[None]:
    # The trees are 1.6 million objects: to go through them again and again made reading them take
    # five times as long, and added two seconds to each collection of every later test.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def all_files() -> tuple[str, ...]:
    """Every file of the repository that .gitignore does not name, in order of path."""
    ignored = [".git", *(ROOT / ".gitignore").read_text(encoding="ascii").split()]
    return tuple(sorted(_walk(ROOT, [pattern.rstrip("/") for pattern in ignored])))


def _walk(folder: Path, ignored: list[str]) -> Iterator[str]:
    for entry in folder.iterdir():
        if any(fnmatch(entry.name, pattern) for pattern in ignored) or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _walk(entry, ignored)
        else:
            yield entry.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; empty where the node is anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def methods(owner: ast.ClassDef) -> list[Function]:
    """The functions in the body of a class."""
    return [node for node in owner.body if isinstance(node, Function)]


def decorators(node: Function | ast.ClassDef) -> list[str]:
    """The dotted names of a definition's decorators, calls without their arguments."""
    heads = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
    return [dotted(head) for head in heads]
