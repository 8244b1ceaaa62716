"""Every house rule can fail, and accepts valid code."""

from collections.abc import Callable, Iterator

import pytest

from tests.house import faults, promises, secrets, sizes, words
from tests.house.source import Fault, Module, parse

Rule = Callable[[Module], Iterator[Fault]]
DOC = '"""One.\n\nTwo.\nThree.\n"""\n'
TEST = "tests/unit/core/test_a.py"
ROOM = "rollmesh/core/a.py"

BAD: list[tuple[Rule, str, str]] = [
    (sizes.file_sizes, ROOM, "x = 1\n" * 601),
    (sizes.function_sizes, ROOM, "def f():\n" + "    x = 1\n" * 60),
    (words.module_docstrings, ROOM, "x = 1\n"),
    (words.module_docstrings, "rollmesh/core/__init__.py", "x = 1\n"),
    (words.names, "rollmesh/core/utils.py", ""),
    (words.plain_words, ROOM, '"""Read by whoever asks."""\n'),
    (words.plain_words, ROOM, '"""Of a session."""\n'),
    (words.plain_words, ROOM, 'raise UserError("the worker was told to stop")\n'),
    (words.names, ROOM, "class BaseEngine: ...\n"),
    (words.names, ROOM, "class RouterHelper: ...\n"),
    (words.bare_versions, ROOM, "def f(version): ...\n"),
    (words.bare_versions, ROOM, "class A:\n    version: int = 0\n"),
    (words.ascii_only, ROOM, "# caf\u00e9\n"),
    (words.noqa_reasons, ROOM, "import os  # noqa\n"),
    (words.noqa_reasons, ROOM, "import os  # noqa: F401\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept Exception:\n    g()\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept:\n    g()\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept (OSError, BaseException) as error:\n    g()\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept Exception:  # noqa: BLE001 - why not\n    g()\n"),
    (faults.suppressed, ROOM, "with contextlib.suppress(Exception):\n    f()\n"),
    (faults.pickles, ROOM, "import pickle\n"),
    (faults.pickles, ROOM, "from pickle import loads\n"),
    (faults.pickles, ROOM, "torch.load('weights')\n"),
    (faults.pickles, ROOM, "numpy.load('a', allow_pickle=True)\n"),
    (promises.asserts, TEST, "def test_a():\n    f()\n"),
    (promises.asserts, TEST, "def f():\n    f()\ndef test_a():\n    f()\n"),
    (promises.asserts, TEST, "def test_a():\n    assert True\n"),
    (faults.collections, ROOM, "gc.collect()\n"),
    (faults.collections, ROOM, "def f():\n    gc.collect()\n    serve()\n"),
    (promises.sleeps, TEST, "time.sleep(0.1)\n"),
    (promises.sleeps, TEST, "await_it = asyncio.sleep(pause)\n"),
    (promises.mocks, TEST, "from unittest import mock\n"),
    (promises.mocks, TEST, "from unittest.mock import Mock\n"),
    (promises.mocks, TEST, "from rollmesh.core import ids\nmonkeypatch.setattr(ids, 'f', g)\n"),
    (promises.mocks, TEST, "monkeypatch.setattr('rollmesh.core.ids.f', g)\n"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (sizes.file_sizes, ROOM, "x = 1\n" * 600),
    (sizes.function_sizes, ROOM, "@g(\n  1,\n)\ndef f():\n" + "    x = 1\n" * 59),
    (words.module_docstrings, ROOM, DOC),
    (words.module_docstrings, ROOM, '"""One line."""\n'),
    (words.names, ROOM, "class StalenessManager: ...\nclass Based: ...\n"),
    (words.plain_words, ROOM, '"""Read one record."""\nx = "told"\n'),
    (words.bare_versions, ROOM, "def f(policy_version): ...\n"),
    (words.noqa_reasons, ROOM, "import torch  # noqa: PLC0415 - keeps torch out of --help\n"),
    (words.noqa_reasons, ROOM, "text = '# noqa'\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept OSError:\n    g()\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept BaseException:\n    g()\n    raise\n"),
    (faults.doors, ROOM, "try:\n    f()\nexcept Exception:  # noqa: BLE001 - door: cli\n    g()\n"),
    (faults.doors, ROOM, "try:\n    f()\n# door: cli\nexcept Exception:\n    log.exception('a')\n"),
    (faults.suppressed, ROOM, "with contextlib.suppress(OSError):\n    f()\n"),
    (promises.asserts, TEST, "def f():\n    assert x\ndef test_a():\n    f()\n"),
    (promises.asserts, TEST, "def test_a():\n    with pytest.raises(ValueError):\n        f()\n"),
    (promises.asserts, TEST, "def test_a():\n    subprocess.run(argv, check=True)\n"),
    (faults.collections, ROOM, "def f():\n    gc.collect()\n    gc.freeze()\n"),
    (faults.collections, TEST, "gc.collect()\n"),
    (promises.sleeps, TEST, "asyncio.sleep(0)\n"),
    (promises.sleeps, ROOM, "time.sleep(1)\n"),
    (promises.mocks, TEST, "from rollmesh.core import ids\nmonkeypatch.setattr(ids, 'MAX', 1)\n"),
    (promises.mocks, TEST, "monkeypatch.setattr(sys, 'stdin', None)\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_finds_the_breach(rule: Rule, path: str, text: str) -> None:
    found = list(rule(parse(path, text)))
    assert len(found) == 1
    assert str(found[0]).startswith(f"{path}:{found[0].line}: ")


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_accepts_valid_code(rule: Rule, path: str, text: str) -> None:
    assert list(rule(parse(path, text))) == []


def test_p95_counts_methods_and_nested_functions() -> None:
    text = (
        "def f():\n    def g():\n        return 1\n    return g\nclass A:\n    def h(self): ...\n"
    )
    assert 1 < sizes.p95_function([parse(ROOM, text)]) <= 4


def test_a_class_of_two_modules_is_found() -> None:
    one, two = (parse(f"rollmesh/core/{name}.py", "class Book: ...\n") for name in "ab")
    (found,) = words.class_names([one, two])
    assert found.path == two.path
    assert list(words.class_names([one])) == []
    (found,) = words.class_names([one, parse("benchmarks/lib/b.py", "class Book: ...\n")])
    assert found.path == "benchmarks/lib/b.py"


def test_a_forbidden_word_of_a_page_is_found() -> None:
    (found,) = words.plain_text("README.md", "fine\nnobody waits\n")
    assert found.line == 2


@pytest.mark.parametrize(
    ("path", "tested"),
    [
        ("tests/unit/core/test_ids.py", "rollmesh/core/__init__.py"),
        ("tests/unit/serve/router/test_any_name.py", "rollmesh/serve/router/__init__.py"),
    ],
)
def test_a_unit_test_needs_the_room_of_its_folder(path: str, tested: str) -> None:
    module = parse(path, "")
    assert list(promises.mirror(module, {tested})) == []
    assert len(list(promises.mirror(module, {"rollmesh/other/__init__.py"}))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "-----BEGIN RSA PRIVATE " + "KEY-----",
        "token = 'hf_" + "a" * 34 + "'",
        "key = 'sk-" + "a" * 48 + "'",
        "cd /wo" + "rk/main",
        "see .." + "/shared/design.md",
        "pip install --extra-index" + "-url x",
        "https://download.pytorch" + ".org/whl",
    ],
)
def test_secret_or_trace_is_found(line: str) -> None:
    (found,) = secrets.secrets("README.md", f"fine\n{line}\n")
    assert (found.path, found.line) == ("README.md", 2)


def test_ordinary_text_holds_no_secret() -> None:
    text = "sk-test /v1/chat /tmp/x the work/life task-force https://example.org hf_model"
    assert list(secrets.secrets("README.md", text)) == []
