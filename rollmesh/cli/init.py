"""`rollmesh init`: a mesh.toml with every setting, its meaning and its default.

Invariant: it is generated from core/config.py, docstrings included, so it cannot go stale; read
back, it gives the defaults. Driven by people.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.options import parser
from rollmesh.core import config as settings
from rollmesh.core.config import Config, Section
from rollmesh.core.errors import UserError

HEAD = """\
# Settings of a rollmesh run, with their defaults; what you leave out stays as it is here.
# Start it with `rollmesh up mesh.toml`; `--set section.key=value` overrides a line.
# Secrets do not belong here: they come from the environment.
"""


def main(argv: list[str]) -> int:
    """Write the file; UserError if it is there already."""
    arguments = parser("init", "Write a mesh.toml with every setting explained.")
    arguments.add_argument("path", type=Path, nargs="?", default=Path("mesh.toml"))
    path: Path = arguments.parse_args(argv).path
    try:
        with path.open("x") as file:
            file.write(commented_toml())
    except FileExistsError:
        raise UserError(f"{path} is there already; remove it or name another file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another file") from None
    print(f"wrote {path}; `rollmesh up {path}` runs it")
    return 0


def commented_toml() -> str:
    """Every setting: its docstring as a comment, its default as the value."""
    docs = docstrings()
    defaults = Config()
    top, tables = [HEAD], []
    for name, value in fields(defaults):
        comment = docs[f"Config.{name}"] if f"Config.{name}" in docs else docs[type(value).__name__]
        if isinstance(value, Section):
            tables.append("\n".join([f"{comment}[{name}]", *keys(value, docs)]))
        elif isinstance(value, dict):
            tables.append(f"{comment}[{name}]\n")
        else:
            top.append(f"{comment}{name} = {toml(value)}\n")
    return "\n".join([*top, *tables])


def keys(section: Section, docs: dict[str, str]) -> Iterator[str]:
    """The lines of one table."""
    for name, value in fields(section):
        yield f"{docs[f'{type(section).__name__}.{name}']}{name} = {toml(value)}"
    yield ""


def fields(section: Section) -> Iterator[tuple[str, Any]]:
    """Names and values, in the order of the source."""
    for name in section.__struct_fields__:
        yield name, getattr(section, name)


def docstrings() -> dict[str, str]:
    """`Class` and `Class.field` to their docstrings as TOML comments, from the source."""
    docs: dict[str, str] = {}
    for owner in ast.parse(inspect.getsource(settings)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        docs[owner.name] = comment(ast.get_docstring(owner) or "")
        for field, text in zip(owner.body, owner.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                value = ast.literal_eval(text.value)
                docs[f"{owner.name}.{ast.unparse(field.target)}"] = comment(inspect.cleandoc(value))
    return docs


def comment(text: str) -> str:
    """Lines that begin with a hash."""
    return "".join(f"# {line}\n" for line in text.splitlines())


def toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's for what settings hold."""
    return msgspec.json.encode(value).decode()
