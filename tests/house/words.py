"""Rules on names, docstrings and comments, and on the words that they are written in.

Each check takes a Module and yields Faults; tests/house/test_rules.py proves that each can fail.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.house.source import Fault, Module

SHIPPED = ("rollmesh", "benchmarks", "examples")
EMPTY_FILE_NAMES = re.compile(r"(utils?|helpers?|misc|commons?)\.py")
EMPTY_CLASS_NAMES = re.compile(r"_?Base[A-Z]\w*|\w*(Helper|Util)s?")
SHARED_CLASS_NAMES = {"Config", "Settings", "ToolCall"}
"""One idea in several rooms, which do not import each other."""
UNPLAIN = re.compile(
    r"\b(whoever|whomever|somebody|nobody|anybody|everybody|anew|mend(s|ed|ing)?|lets? go of"
    r"|for ever|in (its|their|the) midst|told|at the latest|he|his|him|deeds?|comes? to nothing"
    r"|goes on with|stands (in|here|at)|Owns|Driven by|See the module)\b"
)
UNPLAIN_START = re.compile(r"(Of|Who|Whom|Whose|What|As|The same|Those|It) ")
"""A docstring is an imperative or a noun phrase."""
NOQA = re.compile(r"noqa(?P<codes>: [A-Z]+\d+(, [A-Z]+\d+)*)?(?P<reason> - \S.*)?")


def module_docstrings(module: Module) -> Iterator[Fault]:
    """Require a docstring of every shipped module."""
    if module.is_in(*SHIPPED) and not (ast.get_docstring(module.tree) or "").strip():
        yield module.fault(1, "module has no docstring")


def names(module: Module) -> Iterator[Fault]:
    """Refuse names of files and classes that say nothing."""
    if EMPTY_FILE_NAMES.fullmatch(module.file_name):
        yield module.fault(1, f"{module.file_name} names no noun")
    for owner in module.classes():
        if EMPTY_CLASS_NAMES.fullmatch(owner.name):
            yield module.fault(owner, f"class {owner.name}: no Helper, Util or Base")


def plain_words(module: Module) -> Iterator[Fault]:
    """Refuse words and openings of docstrings and messages that are not plain English."""
    if not module.is_in(*SHIPPED):
        return
    docstrings = {
        id(node.value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if " " in node.value and (found := UNPLAIN.search(node.value)):
            yield module.fault(node, f"say it without {found[0]!r}")
        if id(node) in docstrings and UNPLAIN_START.match(node.value):
            opening = node.value.partition(" ")[0]
            yield module.fault(node, f"a docstring that starts with {opening!r} is no sentence")


def plain_text(path: str, text: str) -> Iterator[Fault]:
    """Refuse the same words in a page."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := UNPLAIN.search(line):
            yield Fault(path, number, f"say it without {found[0]!r}")


def class_names(modules: Iterable[Module]) -> Iterator[Fault]:
    """Require that a class name is defined once in the package, and a public one once in its
    benchmarks and examples too."""
    places: dict[str, list[Fault]] = defaultdict(list)
    for module in modules:
        if module.is_in("rollmesh", "benchmarks", "examples"):
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and (
                    module.is_in("rollmesh") or not node.name.startswith("_")
                ):
                    places[node.name].append(module.fault(node, f"class {node.name}"))
    for name, found in places.items():
        if len(found) > 1 and name not in SHARED_CLASS_NAMES:
            for fault in found[1:]:
                yield fault._replace(message=f"{fault.message} is defined in {found[0].path} too")


def bare_versions(module: Module) -> Iterator[Fault]:
    """Refuse variables named `version`: `policy_version` or `protocol_version` says which."""
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
    """Require ASCII; strings have other characters as escapes."""
    for number, line in enumerate(module.text.splitlines(), 1):
        if not line.isascii():
            strange = next(letter for letter in line if not letter.isascii())
            yield module.fault(number, f"not ASCII: U+{ord(strange):04X}; write it as an escape")


def noqa_reasons(module: Module) -> Iterator[Fault]:
    """Require the rule and the reason of what is silenced: `noqa: RULE - reason`."""
    for line, comment in module.comments():
        found = NOQA.search(comment)
        if found and not (found["codes"] and found["reason"]):
            yield module.fault(line, "write it as `noqa: RULE - reason`")
