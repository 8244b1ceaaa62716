"""Find public functions, classes and methods of rollmesh/ without a caller.

- A use is a read of the name in rollmesh/, benchmarks/ or examples/, outside its own body, or a
  string such as `module:Name` or a role's `role.method`, in getattr, in a quoted annotation or in
  pyproject's scripts. Tests are users of rollmesh/testing only.
- Names are matched without types, so a fault is certain and a miss is possible.
- Code registered by a decorator, and methods that an outside base class calls by name, are not
  judged.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.house.source import Fault, Function, Module, decorators, dotted, methods

# Decorators that leave a definition to be called by its name; any other registers it somewhere.
PLAIN_DECORATORS = {
    "property", "staticmethod", "classmethod", "abstractmethod", "overload", "override", "final",
    "contextmanager", "asynccontextmanager", "cache", "lru_cache", "cached_property", "wraps",
    "dataclass", "total_ordering", "unique", "no_grad", "inference_mode", "runtime_checkable",
}  # fmt: skip
# Base classes that call no method of ours by name.
PLAIN_BASES = {
    "object", "Struct", "Enum", "StrEnum", "IntEnum", "Flag", "IntFlag", "Protocol", "ABC",
    "NamedTuple", "TypedDict", "Generic", "Exception", "ValueError", "RuntimeError", "OSError",
}  # fmt: skip
PLAIN_LIBRARIES = {"", "abc", "enum", "msgspec", "typing"}  # asyncio.Protocol is not typing's
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:(?P<name>[A-Za-z_]\w*)")
ROLE_METHOD = re.compile(r"[a-z]+\.(?P<name>[a-z_]+)")  # as calls of the train controller name it
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Definition:
    """A public name and where it is defined."""

    module: Module
    node: Function | ast.ClassDef
    owner: str = ""

    @property
    def full_name(self) -> str:
        """`rollmesh.core.ids.IntervalSet.add`"""
        return ".".join(filter(None, [self.module.name, self.owner, self.node.name]))


def unused(modules: Iterable[Module], pyproject: str, allowed: set[str]) -> Iterator[Fault]:
    """Yield a fault for each definition without a user, and for each allowance without need."""
    modules = list(modules)
    shipped = [each for each in modules if each.is_in("rollmesh", "benchmarks", "examples")]
    product = [each for each in shipped if not each.is_in("rollmesh/testing")]
    uses = _uses(product) + Counter(_script_names(pyproject))
    uses_with_tests = _uses(modules)
    idle = set(allowed)
    for definition in _definitions(shipped):
        fake = definition.module.is_in("rollmesh/testing")
        total = (uses_with_tests if fake else uses)[definition.node.name]
        if total > _reads(definition.node)[definition.node.name]:
            continue
        if definition.full_name in allowed:
            idle.discard(definition.full_name)
            continue
        users = "nothing uses it" if fake else "nothing uses it, except perhaps tests"
        what = f"{definition.full_name}: {users}; remove it, or make it private"
        yield definition.module.fault(definition.node, what)
    for name in sorted(idle):
        yield Fault("tests/house/unused_allowed.toml", 1, f"{name} is used or gone; remove it")


def _definitions(modules: Iterable[Module]) -> Iterator[Definition]:
    ours = {owner.name for module in modules for owner in module.classes()}
    for module in modules:
        if not module.is_in("rollmesh"):
            continue
        for node in module.tree.body:
            if isinstance(node, Function | ast.ClassDef) and _is_judged(node):
                yield Definition(module, node)
            if isinstance(node, ast.ClassDef) and not _is_called_from_outside(node, ours):
                for method in filter(_is_judged, methods(node)):
                    yield Definition(module, method, node.name)


def _is_judged(node: Function | ast.ClassDef) -> bool:
    plain = all(_last(name) in {*PLAIN_DECORATORS, "setter"} for name in decorators(node))
    return plain and not node.name.startswith("_")


def _is_called_from_outside(owner: ast.ClassDef, ours: set[str]) -> bool:
    if owner.name.startswith("_"):
        return True  # an adapter that a library calls back; it is private already
    heads = [base.value if isinstance(base, ast.Subscript) else base for base in owner.bases]
    return not all(_is_plain_base(dotted(head), ours) for head in heads)


def _is_plain_base(name: str, ours: set[str]) -> bool:
    library, _, last = name.rpartition(".")
    return last in ours or (last in PLAIN_BASES and library in PLAIN_LIBRARIES)


def _uses(modules: Iterable[Module]) -> Counter[str]:
    total: Counter[str] = Counter()
    for module in modules:
        total.update(_reads(module.tree))
    return total


def _reads(tree: ast.AST) -> Counter[str]:
    return Counter(name for node in ast.walk(tree) for name in _names_read(node))


def _names_read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names if alias.asname)
    elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
        yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = REFERENCE.fullmatch(node.value) or ROLE_METHOD.fullmatch(node.value)
        if found:
            yield found["name"]
    elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
        yield from _quoted(node.annotation)
    elif isinstance(node, Function) and node.returns:
        yield from _quoted(node.returns)


def _quoted(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from WORD.findall(node.value)


def _script_names(pyproject: str) -> list[str]:
    scripts: dict[str, str] = tomllib.loads(pyproject)["project"].get("scripts", {})
    return [target.partition(":")[2] for target in scripts.values()]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
