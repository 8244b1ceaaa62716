"""The word law: docstrings, names, comments and the letters they are written in.

Owns which names say nothing and what a module must say about itself. The checks are pure, from a
Module to its Faults; tests/house/test_rules.py proves that each can fail.
"""

import ast
import re
from collections.abc import Iterator

from tests.house.source import Fault, Function, Module, methods

SHIPPED = ("rollmesh", "benchmarks", "examples")
EMPTY_FILE_NAMES = re.compile(r"(utils?|helpers?|misc|commons?)\.py")
EMPTY_CLASS_NAMES = re.compile(r"_?Base[A-Z]\w*|\w*(Helper|Util|Manager)s?")
FIELD_NAMES_KEPT = {"StalenessManager"}  # the field's own word, known from other systems
NOQA = re.compile(r"noqa(?P<codes>: [A-Z]+\d+(, [A-Z]+\d+)*)?(?P<reason> - \S.*)?")


def module_docstrings(module: Module) -> Iterator[Fault]:
    """A shipped module has a docstring."""
    if module.is_in(*SHIPPED) and not (ast.get_docstring(module.tree) or "").strip():
        yield module.fault(1, "module has no docstring")


def public_docstrings(module: Module) -> Iterator[Fault]:
    """Public functions and classes with methods say what they promise; a record's fields do."""
    if not module.is_in(*SHIPPED):
        return
    for node in module.tree.body:
        if not isinstance(node, Function | ast.ClassDef):
            continue
        speaks = not isinstance(node, ast.ClassDef) or bool(methods(node))
        if speaks and not node.name.startswith("_") and not ast.get_docstring(node):
            yield module.fault(node, f"{node.name} has no docstring")


def names(module: Module) -> Iterator[Fault]:
    """A file and a class are named by their noun; a policy's version says whose it is."""
    if EMPTY_FILE_NAMES.fullmatch(module.file_name):
        yield module.fault(1, f"{module.file_name} names no noun")
    for owner in module.classes():
        if EMPTY_CLASS_NAMES.fullmatch(owner.name) and owner.name not in FIELD_NAMES_KEPT:
            yield module.fault(owner, f"class {owner.name}: no Helper, Util, Manager or Base")


def bare_versions(module: Module) -> Iterator[Fault]:
    """`policy_version`, `protocol_version`: never a parameter or variable named `version`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name == "version":
            yield module.fault(node, "bare `version`: say whose, as in policy_version")


def ascii_only(module: Module) -> Iterator[Fault]:
    """Code is ASCII; other letters stand in strings as escapes."""
    for number, line in enumerate(module.text.splitlines(), 1):
        if not line.isascii():
            strange = next(letter for letter in line if not letter.isascii())
            yield module.fault(number, f"not ASCII: U+{ord(strange):04X}; write it as an escape")


def noqa_reasons(module: Module) -> Iterator[Fault]:
    """A silenced rule is named, and the line says why: `noqa: RULE - reason`."""
    for line, comment in module.comments():
        found = NOQA.search(comment)
        if found and not (found["codes"] and found["reason"]):
            yield module.fault(line, "write it as `noqa: RULE - reason`")
