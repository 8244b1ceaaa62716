"""The hooks of tests/conftest.py fail a run with an unlisted skip, or with leftovers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.leaks import MARK_VARIABLE, end_leftovers
from tests.house.skips import AllowedSkip, read_skips, refusal
from tests.house.source import ROOT

CONFTEST = "from tests.conftest import *\n"
SETTINGS = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"


def run_pytest(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A pytest of its own over one test file, under our conftest."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_it.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv += ["-p", "pytest_asyncio.plugin", *args, str(folder)]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)


def test_unlisted_skips_of_test_and_module_fail_the_run(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "def test_inside(): pytest.skip('no reason')\n"
        "@pytest.mark.skip(reason='by mark')\ndef test_marked(): ...\n"
        "@pytest.mark.xfail(reason='known')\ndef test_expected(): assert False\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such')\n")
    answer = run_pytest(tmp_path, text)
    assert answer.returncode == 2, answer.stdout  # pytest stops where a module does not load
    assert "could not import 'no_such'" in answer.stdout
    (tmp_path / "test_module.py").unlink()
    answer = run_pytest(tmp_path, text)
    assert answer.returncode == 1, answer.stdout
    assert "test_inside was skipped (no reason), and tests/skips.toml" in answer.stdout
    assert "test_marked was skipped (by mark)" in answer.stdout
    assert "1 failed, 1 xfailed, 1 error" in answer.stdout


def test_process_and_task_left_behind_fail_the_run(tmp_path: Path) -> None:
    answer = run_pytest(
        tmp_path,
        "import asyncio, subprocess, sys\n"
        "TASKS = []\n"
        "def test_process():\n"
        "    code = 'import time; time.sleep(60)'\n"
        "    TASKS.append(subprocess.Popen([sys.executable, '-c', code, 'a-stray']))\n"
        "async def test_task():\n"
        "    async def stray(): await asyncio.Event().wait()\n"
        "    TASKS.append(asyncio.get_running_loop().create_task(stray()))\n",
    )
    assert answer.returncode == 1, answer.stdout
    assert "processes left behind by the tests (killed)" in answer.stdout
    assert "a-stray" in answer.stdout
    assert "tasks left behind: <coroutine object test_task.<locals>.stray" in answer.stdout


def test_parallel_test_processes_fail_for_the_same_leftovers(tmp_path: Path) -> None:
    answer = run_pytest(
        tmp_path,
        "import pytest, subprocess, sys\n"
        "STRAYS = []\n"
        "def test_process():\n"
        "    code = 'import time; time.sleep(60)'\n"
        "    STRAYS.append(subprocess.Popen([sys.executable, '-c', code, 'a-stray']))\n"
        "def test_inside(): pytest.skip('no reason')\n",
        *("-p", "xdist.plugin", "-n", "1"),
    )
    assert answer.returncode == 1, answer.stdout
    assert "processes left behind by the tests (killed)" in answer.stdout
    assert answer.stdout.count("a-stray") == 1
    assert "test_inside was skipped (no reason), and tests/skips.toml" in answer.stdout
    assert "1 failed, 1 passed" in answer.stdout


def test_task_left_behind_by_a_module_that_shares_a_loop_fails_the_run(tmp_path: Path) -> None:
    answer = run_pytest(
        tmp_path,
        "import asyncio, pytest\n"
        "TASKS = []\n"
        "pytestmark = pytest.mark.asyncio(loop_scope='module')\n"
        "async def test_task():\n"
        "    async def stray(): await asyncio.Event().wait()\n"
        "    TASKS.append(asyncio.get_running_loop().create_task(stray()))\n"
        "async def test_same_loop(): assert not TASKS[0].done()\n",
    )
    assert answer.returncode == 1, answer.stdout
    assert "2 passed, 1 error" in answer.stdout
    assert "tasks left behind: <coroutine object test_task.<locals>.stray" in answer.stdout


def test_clean_tests_pass_under_the_hooks(tmp_path: Path) -> None:
    text = "async def test_a(): assert True is not None\ndef test_b(): assert 1 + 1 == 2\n"
    answer = run_pytest(tmp_path, text)
    assert answer.returncode == 0, answer.stdout
    assert "2 passed" in answer.stdout


def test_leftover_is_ended_and_named_by_its_command(tmp_path: Path) -> None:
    environment = {**os.environ, MARK_VARIABLE: "of-this-test"}
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "orphan"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (line,) = end_leftovers("of-this-test", grace_s=0)
    assert line.startswith(f"pid {process.pid}: ")
    assert line.endswith("orphan")
    assert process.returncode == -9
    assert end_leftovers("of-this-test") == []


@pytest.mark.parametrize(
    ("node_id", "reason", "allowed"),
    [
        ("tests/flow/test_page.py::test_a[x]", "no Chromium on this machine", True),
        ("tests/flow/test_page.py::test_b", "no Chromium on this machine", False),
        ("tests/flow/test_page.py::test_a[x]", "tired", False),
        ("tests/flow/test_page.py::test_a[x]", "no Chromium on this machine today", False),
    ],
)
def test_skip_needs_both_its_test_and_its_reason(node_id: str, reason: str, allowed: bool) -> None:
    entry = AllowedSkip("tests/*/test_page.py::test_a[*]", "no Chromium on this machine", "why")
    line = refusal([entry], node_id, reason)
    assert (line is None) == allowed
    assert line is None or (node_id in line and reason in line)


def test_skip_list_refuses_an_entry_without_its_why(tmp_path: Path) -> None:
    path = tmp_path / "skips.toml"
    path.write_text('[[skip]]\ntests = "tests/*"\nreason = "*"\n')
    with pytest.raises(TypeError, match="why"):
        read_skips(path)
