"""Rules of every test run: no unlisted skip, no process and no task left behind.

The rules are in tests/house/skips.py and tests/house/leaks.py, where they are tested.
"""

import asyncio
import contextlib
import gc
import inspect
import signal
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.house.leaks import end_leftovers, mark_this_run
from tests.house.skips import read_skips, refusal

ALLOWED = read_skips(Path(__file__).with_name("skips.toml"))
MARK: pytest.StashKey[str] = pytest.StashKey()
LEFT: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Mark the environment, so that processes that tests start can be recognized.

    Workers of pytest-xdist inherit the mark of the process that started them, which checks for all.
    """
    if not hasattr(config, "workerinput"):
        config.stash[MARK] = mark_this_run()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes its background jobs ignore Ctrl-C, which their children inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn an unlisted skip into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the unlisted skip of a whole module into a failure."""
    report = yield
    if report.skipped:
        _judge(report)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    line = refusal(ALLOWED, report.nodeid, reason)
    if line is not None:
        report.outcome = "failed"
        report.longrepr = line


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze imported objects: no garbage collection visits them, now or in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Watch coroutine tests, and only these, for tasks left behind."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            mark = item.get_closest_marker("asyncio")
            shares_loop = mark is not None and mark.kwargs.get("loop_scope") == "module"
            item.fixturenames.insert(0, "no_task_left_by_" + ("module" if shares_loop else "test"))


@pytest.fixture
async def no_task_left_by_test() -> AsyncIterator[None]:
    """Check that the test and its fixtures end every task that they started."""
    async with _no_task_left():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def no_task_left_by_module() -> AsyncIterator[None]:
    """Check that the tests of a module that share a loop have ended all tasks after the last."""
    async with _no_task_left():
        yield


@contextlib.asynccontextmanager
async def _no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(3):  # cancelled tasks that were not awaited get a turn to end
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks left behind: {', '.join(str(task.get_coro()) for task in left)}"


@pytest.fixture
def young_heap() -> None:
    """Limit the collector, and code that lists all objects, to objects that are made from now
    on.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the workers, which are marked as well
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kill processes that outlive the tests, and fail the run."""
    mark = session.config.stash.get(MARK, None)
    if mark is None:
        return
    left = end_leftovers(mark)
    session.config.stash[LEFT] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the processes that were left behind."""
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section("processes left behind by the tests (killed)")
        terminalreporter.write_line("\n".join(left))
