"""An agent's program: its output, its exit, and the end of all its processes."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
import uvloop

from rollmesh.core.errors import InfraError
from rollmesh.envs.program import Command, Excerpt, ProgramExit, run_program

LIMITS_S = (1.0, 10.0, 60.0)
KEPT = {name: os.environ[name] for name in ("PATH", "ROLLMESH_TEST_RUN") if name in os.environ}

# A child that leaves its group, session and parent and writes its pid to a file, or to a pipe that
# the test reads; then the program continues.
DAEMON = """
import os, signal
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        os.write(writing, b".")
        signal.pause()
    os._exit(0)
os.read(reading, 1)
"""


async def run(
    folder: Path, code: str, timeout_s: float = 100.0, max_output_bytes: int = 1000
) -> ProgramExit:
    command = Command((sys.executable, "-c", code), folder, KEPT)
    return await run_program(command, timeout_s, max_output_bytes)


async def overtime(folder: Path, code: str) -> ProgramExit:
    """Run with growing timeouts until the program has begun: it has printed or written `pid`."""
    for limit_s in LIMITS_S:
        ended = await run(folder, code, limit_s)
        if ended.output or (folder / "pid").exists():
            break
    return ended


def ends(pid: int) -> bool:
    """Whether a killed process ends in time."""
    try:
        psutil.Process(pid).wait(60.0)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        return True
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_output_of_both_streams_and_the_exit_code_come_back(tmp_path: Path) -> None:
    code = "import os; os.write(1, b'out '); os.write(2, b'err'); raise SystemExit(3)"
    assert await run(tmp_path, code) == ProgramExit(3, "out err", is_overtime=False)


async def test_a_program_gets_its_environment_its_folder_and_an_empty_stdin(tmp_path: Path) -> None:
    code = "import os, sys; print(sorted(os.environ), os.getcwd(), repr(sys.stdin.read()))"
    command = Command((sys.executable, "-c", code), tmp_path, {"A": "1", "LC_CTYPE": "C.UTF-8"})
    ended = await run_program(command, 30.0, 1000)
    assert ended.output == f"['A', 'LC_CTYPE', 'ROLLMESH_MARK'] {tmp_path} ''\n"


async def test_long_output_keeps_its_first_and_last_bytes(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('a' * 300_000 + 'b' * 300_000)"
    ended = await run(tmp_path, code, max_output_bytes=20)
    assert ended.output == f"{'a' * 10}\n[... 599980 bytes left out ...]\n{'b' * 10}"


async def test_a_timeout_kills_the_process_group(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; "
    code += "import os; print(os.getpid(), flush=True); signal.pause()'])"
    ended = await overtime(tmp_path, code)
    assert (ended.exit_code, ended.is_overtime) == (-signal.SIGKILL, True)
    assert not is_alive(int(ended.output))


@pytest.mark.parametrize("ending", ["", "signal.pause()"], ids=["ends", "overtime"])
async def test_a_daemon_that_left_group_session_and_parent_is_ended_too(
    tmp_path: Path, ending: str
) -> None:
    ended = await (overtime(tmp_path, DAEMON + ending) if ending else run(tmp_path, DAEMON))
    assert ended.is_overtime == bool(ending)
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_a_daemon_that_emptied_its_environment_dies_with_its_group(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
    code += "'import signal; signal.pause()'], env={}); open('pid', 'w').write(str(p.pid))"
    ended = await run(tmp_path, code)
    assert (ended.exit_code, ended.output) == (0, "")
    assert ends(int((tmp_path / "pid").read_text()))


async def test_cancellation_ends_the_program_and_its_descendants(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    running = asyncio.create_task(run(tmp_path, DAEMON + "signal.pause()"))
    pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(pid)


async def test_a_program_that_does_not_exist_is_an_infra_error(tmp_path: Path) -> None:
    command = Command(("no-such-program",), tmp_path, KEPT)
    with pytest.raises(InfraError, match="no-such-program: cannot be run"):
        await run_program(command, 1.0, 100)


def test_a_program_runs_on_uvloop(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run(tmp_path, "print(7)")) == ProgramExit(0, "7\n", is_overtime=False)
        ended = runner.run(overtime(tmp_path, DAEMON + "signal.pause()"))
    assert ended.is_overtime
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_no_descriptor_of_another_thread_is_closed_on_uvloop(tmp_path: Path) -> None:
    is_over = threading.Event()

    def open_and_close() -> None:
        while not is_over.is_set():
            for descriptor in os.pipe():
                os.close(descriptor)  # OSError if other code has closed it

    async def run_often() -> set[int]:
        command = Command(("true",), tmp_path, KEPT)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(open_and_close))
            ended = []
            for _ in range(10):
                ended += await asyncio.gather(*(run_program(command, 30.0, 100) for _ in range(4)))
            is_over.set()
        return {each.exit_code for each in ended}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            assert runner.run(run_often()) == {0}
        finally:
            is_over.set()


async def test_descriptors_are_closed(tmp_path: Path) -> None:
    await run(tmp_path, "")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await run(tmp_path, "")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_excerpt_is_the_same_however_its_input_is_cut() -> None:
    whole, pieces = Excerpt(10), Excerpt(10)
    data = bytes(range(97, 123))
    whole.add(data)
    for byte in data:
        pieces.add(bytes([byte]))
    assert pieces.text() == whole.text() == "abcde\n[... 16 bytes left out ...]\nvwxyz"
    short = Excerpt(10)
    short.add(b"abcdefg")
    assert short.text() == "abcdefg"
