"""Every rule of the house holds for every file of the repository.

The rules are in the modules beside this one; test_rules.py proves that each can fail.
"""

import doctest
import importlib
import tomllib
from collections.abc import Callable, Iterable, Iterator

import pytest

from rollmesh.core.config import Config
from tests.house import faults, promises, reach, secrets, sizes, usage, words
from tests.house.config_keys import config_keys
from tests.house.skips import read_skips
from tests.house.source import ROOT, Fault, Module, all_files, all_modules

MAX_TEXT_BYTES = 1_000_000
RULES: list[Callable[[Module], Iterator[Fault]]] = [
    sizes.file_sizes,
    sizes.function_sizes,
    words.module_docstrings,
    words.names,
    words.plain_words,
    words.bare_versions,
    words.ascii_only,
    words.noqa_reasons,
    faults.doors,
    faults.suppressed,
    faults.pickles,
    faults.collections,
    promises.asserts,
    promises.sleeps,
    promises.mocks,
]


def none_of(found: Iterable[Fault]) -> None:
    """Fail with one line for each fault."""
    lines = [str(fault) for fault in found]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Module], Iterator[Fault]]) -> None:
    none_of(fault for module in all_modules() for fault in rule(module))


def test_most_functions_are_short() -> None:
    shipped = [module for module in all_modules() if module.is_in("rollmesh")]
    assert 0 < sizes.p95_function(shipped) <= sizes.MAX_P95_LINES


def test_a_class_name_is_defined_once() -> None:
    none_of(words.class_names(all_modules()))


def test_pages_are_in_plain_words() -> None:
    pages = [path for path in all_files() if path.endswith(".md") and path != "CHANGELOG.md"]
    none_of(
        fault
        for path in pages
        for fault in words.plain_text(path, (ROOT / path).read_text("utf-8"))
    )


def test_unit_tests_mirror_the_source() -> None:
    files = set(all_files())
    none_of(fault for module in all_modules() for fault in promises.mirror(module, files))


def test_nothing_public_is_without_a_user() -> None:
    allowed = tomllib.loads((ROOT / "tests/house/unused_allowed.toml").read_text("ascii"))
    assert all(isinstance(reason, str) and reason for reason in allowed.values())
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    none_of(usage.unused(all_modules(), pyproject, set(allowed)))


def test_every_module_is_reached_from_an_entry_point() -> None:
    none_of(reach.unreachable(all_modules(), (ROOT / "pyproject.toml").read_text("utf-8")))


def test_no_secret_and_no_trace_of_one_machine() -> None:
    none_of(fault for path, text in texts() for fault in secrets.secrets(path, text))


def texts() -> Iterator[tuple[str, str]]:
    """(path, text) of every file that is text and was written by hand."""
    for path in all_files():
        raw = (ROOT / path).read_bytes()
        if b"\0" not in raw and len(raw) <= MAX_TEXT_BYTES:
            yield path, raw.decode("utf-8")


def test_config_keys_are_frozen() -> None:
    frozen = (ROOT / "tests/house/config_keys.txt").read_text("ascii").split()
    keys = sorted(config_keys(Config))
    assert keys == frozen, "a setting was added or removed: see CONTRIBUTING.md on new keys"


def test_listed_skips_name_test_files_that_exist() -> None:
    listed = read_skips(ROOT / "tests/skips.toml")
    for entry in listed:
        pattern = entry.test_file()
        assert entry.why
        if (ROOT / pattern).parent.is_dir():
            assert list(ROOT.glob(pattern)), f"tests/skips.toml: {pattern} matches no file"


def test_examples_in_docstrings_are_true() -> None:
    shown = [
        module for module in all_modules() if module.is_in("rollmesh") and ">>>" in module.text
    ]
    results = [doctest.testmod(importlib.import_module(module.name)) for module in shown]
    assert sum(result.attempted for result in results) > 0
    assert not any(result.failed for result in results)
