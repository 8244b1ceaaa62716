"""Uses of public code are found, and so are modules that no entry point reaches."""

import msgspec
import pytest

from tests.house.config_keys import config_keys
from tests.house.reach import unreachable
from tests.house.source import Module, parse
from tests.house.usage import unused

PYPROJECT = '[project]\nname = "rollmesh"\nscripts = {rollmesh = "rollmesh.cli.main:main"}\n'
MAIN = parse("rollmesh/cli/main.py", "from rollmesh.core import a\ndef main(): ...\n")


def unused_names(*modules: Module, allowed: tuple[str, ...] = ()) -> list[str]:
    found = unused([MAIN, *modules], PYPROJECT, set(allowed))
    return [fault.message.partition(":")[0] for fault in found]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(): ...", ["f"]),
        ("def f():\n    return f()", ["f"]),
        ("class A:\n    def m(self): ...\na = A()", ["A.m"]),
        ("class A:\n    @property\n    def m(self): ...\na = A()", ["A.m"]),
        ("class A(asyncio.Protocol):\n    def connection_made(self): ...\na = A()", []),
        ("class _Gate:\n    def callback(self): ...\n", []),
        ("def _f(): ...", []),
        ("@routes.get('/status')\ndef f(): ...", []),
        ("@contextlib.contextmanager\ndef f(): ...", ["f"]),
        ("def f(): ...\ng = f", []),
        ("def f(): ...\ng = 'rollmesh.core.a:f'", []),
        ("def f(): ...\ng = getattr(x, 'f')", []),
        ("class A: ...\ndef _g() -> 'list[A]': ...", []),
        ("class A: ...\nclass _B(A): ...", []),
    ],
)
def test_public_code_without_a_user_is_named(text: str, names: list[str]) -> None:
    found = unused_names(parse("rollmesh/core/a.py", text))
    assert found == [f"rollmesh.core.a.{name}" for name in names]


def test_tests_are_no_users_except_of_the_testing_room() -> None:
    test = parse("tests/unit/core/test_a.py", "a.f()\nFakeClock()")
    code = parse("rollmesh/core/a.py", "def f(): ...")
    fake = parse("rollmesh/testing/clock.py", "class FakeClock: ...\nclass Idle: ...")
    assert unused_names(code, test, fake) == ["rollmesh.core.a.f", "rollmesh.testing.clock.Idle"]


def test_benchmarks_and_examples_are_users() -> None:
    code = parse("rollmesh/core/a.py", "def f(): ...\ndef g(): ...")
    uses = [parse("benchmarks/a.py", "a.f()"), parse("examples/a.py", "from x import g as h")]
    assert unused_names(code, *uses) == []


def test_allowance_silences_its_name_and_must_not_be_idle() -> None:
    code = parse("rollmesh/core/a.py", "def f(): ...\ndef g(): ...\nx = g")
    assert unused_names(code, allowed=("rollmesh.core.a.f",)) == []
    idle = unused_names(code, allowed=("rollmesh.core.a.f", "rollmesh.core.a.g"))
    assert idle == ["rollmesh.core.a.g is used or gone; remove it"]


@pytest.mark.parametrize(
    "lead",
    [
        "import rollmesh.core.b",
        "from rollmesh.core import b",
        "from rollmesh.core.b import f",
        "def late():\n    from rollmesh.core.b import f",
        "argv = ['-m', 'rollmesh.core.b']",
        "target = 'rollmesh.core.b:Class'",
        "name = f'rollmesh.core.{verb}'",
    ],
)
def test_a_lead_reaches_the_module_and_its_package(lead: str) -> None:
    modules = [
        MAIN,
        parse("rollmesh/core/__init__.py", ""),
        parse("rollmesh/core/a.py", lead),
        parse("rollmesh/core/b.py", ""),
    ]
    package = {"no entry point leads to rollmesh.cli", "no entry point leads to rollmesh"}
    assert {fault.message for fault in unreachable(modules, PYPROJECT)} <= package


def test_a_module_without_a_lead_is_named_even_if_tests_import_it() -> None:
    modules = [
        MAIN,
        parse("rollmesh/core/b.py", ""),
        parse("rollmesh/testing/clock.py", ""),
        parse("rollmesh/testing/idle.py", ""),
        parse("rollmesh/engine/embedded/__main__.py", "import rollmesh.engine.embedded.server"),
        parse("rollmesh/engine/embedded/server.py", ""),
        parse("tests/unit/core/test_b.py", "import rollmesh.core.b, rollmesh.testing.clock"),
    ]
    found = [fault.path for fault in unreachable(modules, PYPROJECT)]
    assert found == ["rollmesh/core/b.py", "rollmesh/testing/idle.py"]


def test_config_keys_are_dotted_through_structs_lists_and_unions() -> None:
    class Engine(msgspec.Struct):
        url: str
        max_running: int = 1

    class Tree(msgspec.Struct):
        name: str
        engine: Engine
        spare: Engine | None = None
        engines: tuple[Engine, ...] = ()
        extra: dict[str, int] = {}

    assert list(config_keys(Tree)) == [
        "name",
        "engine.url",
        "engine.max_running",
        "spare.url",
        "spare.max_running",
        "engines[].url",
        "engines[].max_running",
        "extra",
    ]
