"""Rules on tests: a test asserts, waits for events instead of sleeping, and mocks nothing of ours.

- Assertions are `assert`, pytest's raises, warns and fail, a checked child process, or a call of a
  function that itself asserts (one of the same file, or one named assert_... or check_...).
- A unit test's folder names the package that it tests.
"""

import ast
from collections.abc import Container, Iterator

from tests.house.source import Fault, Function, Module, dotted

PYTEST_ASSERTS = {"pytest.raises", "pytest.warns", "pytest.fail", "pytest.deprecated_call"}
SLEEPS = {"time.sleep", "asyncio.sleep", "sleep"}
MOCKS = {"unittest.mock", "mock", "pytest_mock"}


def asserts(module: Module) -> Iterator[Fault]:
    """A test that cannot fail is a defect."""
    if not _is_test_file(module):
        return
    local = {function.name: function for function in module.functions()}
    for function in local.values():
        if function.name.startswith("test_") and not _asserts(function, local, set()):
            yield module.fault(function, f"{function.name} asserts nothing")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            yield module.fault(node, "asserts a constant")


def sleeps(module: Module) -> Iterator[Fault]:
    """Tests wait for events; only `asyncio.sleep(0)` is allowed."""
    if not module.is_in("tests"):
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or dotted(node.func) not in SLEEPS:
            continue
        pause = node.args[0] if node.args else None
        if not (isinstance(pause, ast.Constant) and pause.value == 0):
            yield module.fault(node, "sleeps; wait for the event instead")


def mocks(module: Module) -> Iterator[Fault]:
    """Fakes come from rollmesh/testing; nothing of ours is replaced behind its back."""
    if not module.is_in("tests"):
        return
    ours = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None) or ""
            for alias in node.names:
                if MOCKS & {source, alias.name, f"{source}.{alias.name}"}:
                    yield module.fault(node, "imports a mock; use a fake from rollmesh.testing")
                if (source or alias.name).partition(".")[0] == "rollmesh":
                    ours.add((alias.asname or alias.name).partition(".")[0])
        elif _patches(node, ours):
            yield module.fault(node, "patches our own code; use a fake from rollmesh.testing")


def mirror(module: Module, files: Container[str]) -> Iterator[Fault]:
    """A folder of tests/unit has the path of the package that it tests."""
    if not module.is_in("tests/unit") or not module.file_name.startswith("test_"):
        return
    room, _, _ = module.path.removeprefix("tests/unit/").rpartition("/")
    tested = "/".join(["rollmesh", *filter(None, [room])])
    if f"{tested}/__init__.py" not in files:
        yield module.fault(1, f"tests {tested}, which does not exist")


def _is_test_file(module: Module) -> bool:
    return module.is_in("tests") and module.file_name.startswith("test_")


def _asserts(function: Function, local: dict[str, Function], seen: set[str]) -> bool:
    seen.add(function.name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        name = called.rpartition(".")[2]
        if called in PYTEST_ASSERTS or name.startswith(("assert_", "check_")):
            return True
        if called == "subprocess.run" and any(each.arg == "check" for each in node.keywords):
            return True
        if name in local and name not in seen and _asserts(local[name], local, seen):
            return True
    return False


def _patches(node: ast.AST, ours: set[str]) -> bool:
    """A setattr on ours; a constant in capitals is a number to choose, not code to replace."""
    if not isinstance(node, ast.Call) or dotted(node.func) != "monkeypatch.setattr":
        return False
    target, name = node.args[0], node.args[1] if len(node.args) > 1 else None
    if isinstance(target, ast.Constant):
        return str(target.value).startswith("rollmesh.")
    is_constant = isinstance(name, ast.Constant) and str(name.value).isupper()
    return dotted(target).partition(".")[0] in ours and not is_constant
