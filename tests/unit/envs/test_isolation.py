"""Slots: the choice of the mode, the program's view in one, and its complete removal."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import InfraError
from rollmesh.envs import containment, isolation
from rollmesh.envs.containment import CgroupLimits
from rollmesh.envs.isolation import Command, Isolation, IsolationSettings
from rollmesh.envs.program import ProgramExit, run_program
from rollmesh.envs.scratch import new_scratch

PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/")


@pytest.fixture
def settled() -> Iterator[Callable[..., Isolation]]:
    def settle(mode: str, **limits: int) -> Isolation:
        found = Isolation(
            IsolationSettings(mode, limits=CgroupLimits(**limits)),  # type: ignore[arg-type]
            serve,
        )
        isolation.use_isolation(found)
        return found

    yield settle
    isolation.use_isolation(Isolation(IsolationSettings()))


async def serve(listening: socket.socket) -> Callable[[], None]:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    return (await asyncio.start_server(answer, sock=listening)).close


@pytest.fixture(params=["bwrap", "uid"])
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "bwrap":
        needs_bwrap()
    else:
        needs_root()
    mode: str = request.param
    return mode


def needs_bwrap() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    done = subprocess.run(["bwrap", *NAMESPACES, "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no namespaces for bubblewrap: {done.stderr.decode().strip()}")


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")


async def run(code: str, *words: str, python: str = PYTHON, base_url: str = "") -> ProgramExit:
    async with new_scratch() as scratch:
        command = Command((python, "-c", code, *words), scratch.work, {}, base_url=base_url)
        return await run_program(command, 60.0, 4000)


async def test_a_slot_keeps_exit_codes_signals_and_output(
    mode: str, settled: Callable[..., Isolation]
) -> None:
    settled(mode)
    assert await run("print('out'); raise SystemExit(3)") == ProgramExit(
        3, "out\n", is_overtime=False
    )
    ended = await run("import os; os.kill(os.getpid(), 9)")
    assert ended.exit_code == -signal.SIGKILL


async def test_under_bwrap_only_the_endpoint_is_reachable_at_its_own_address(
    settled: Callable[..., Isolation],
) -> None:
    needs_bwrap()
    settled("bwrap")
    code = "import socket, sys\nfor port in sys.argv[1:]:\n try: print(socket.create_connection(("
    code += "'127.0.0.1', int(port))).recv(5))\n except OSError as error: print(error.strerror)"
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("", 0)) as host:
        port = str(host.getsockname()[1])
        words = (port, str(other.getsockname()[1]))
        ended = await run(code, *words, base_url=f"http://127.0.0.1:{port}/v1")
        assert ended.output == "b'hello'\nConnection refused\n"


async def test_under_bwrap_an_interpreter_is_found_through_a_symlinked_venv(
    settled: Callable[..., Isolation], tmp_path: Path
) -> None:
    needs_bwrap()
    settled("bwrap")
    venv.create(tmp_path / "there", symlinks=True)
    (tmp_path / "venv").symlink_to("there")
    ended = await run("print('ran')", python=str(tmp_path / "venv" / "bin" / "python"))
    assert ended.output == "ran\n"


async def test_auto_tries_the_next_mode_and_none_is_shown(
    settled: Callable[..., Isolation], tmp_path: Path
) -> None:
    """bwrap shows the program its own file in a private folder, and uid cannot read it."""
    found = settled("auto")
    needs_root()
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    program = private / "agent"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    async with new_scratch() as scratch:
        command = Command((str(program),), scratch.work, {}, network="host")
        assert (await run_program(command, 60.0, 100)).output == "ran\n"
    assert found.shown in ("bwrap", "none")


async def test_a_mode_that_is_named_is_not_replaced_and_its_failure_names_the_path(
    settled: Callable[..., Isolation], tmp_path: Path
) -> None:
    needs_root()
    settled("uid")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "agent.py").write_text("")
    async with new_scratch() as scratch:
        command = Command((PYTHON, str(private / "agent.py")), scratch.work, {})
        with pytest.raises(InfraError, match=r'worker.isolation = "uid" cannot run .*agent\.py'):
            await run_program(command, 60.0, 100)


async def test_processes_of_a_slot_are_limited_and_end_with_it(
    mode: str, settled: Callable[..., Isolation]
) -> None:
    settled(mode, num_processes=20)
    code = """
import os, signal
num = 0
try:
    while num < 60:
        if os.fork() == 0:
            os.setsid()
            signal.pause()
        num += 1
except OSError:
    pass
print(num)
"""
    ended = await run(code)
    assert ended.exit_code == 0
    if mode == "uid" or os.geteuid() != 0 or os.access("/sys/fs/cgroup/pids", os.W_OK):
        assert 0 < int(ended.output) < 20


async def test_a_program_without_isolation_is_warned_of_once(
    settled: Callable[..., Isolation], caplog: pytest.LogCaptureFixture
) -> None:
    settled("none")
    async with new_scratch() as scratch:
        for _ in range(2):
            await run_program(Command(("/bin/true",), scratch.work, {}), 60.0, 1000)
    assert sum("isolation.none" in line for line in caplog.messages) == 1


def test_the_control_groups_of_a_killed_process_are_removed_and_those_in_use_are_kept(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    gone, running = f"rollmesh-{ended.pid}-0", f"rollmesh-{os.getpid()}-0"
    for name in (gone, running, "rollmesh-x-0"):
        (tmp_path / name).mkdir()
    containment.remove_ended(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {running, "rollmesh-x-0"}
