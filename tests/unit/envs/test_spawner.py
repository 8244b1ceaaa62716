"""The spawner: the users that it starts programs as, and the end of all processes of a slot."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError, InfraError
from rollmesh.envs import spawner
from rollmesh.envs.spawning import Spawner, account_of, exit_code
from tests.house.skips import needs_shared_python
from tests.house.source import ROOT

PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
NOBODY, FIRST_UID, NUM_UIDS = 65534, 310_000, 4
CONFINED = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all,+setuid,+setgid")
ENDS_WITHIN_S = 60.0
FOREVER = "import time; print('begun', flush=True); time.sleep(3600)"
KILLER = """
import os, signal
print("begun", flush=True)
while True:
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        pass
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


class Program:
    """A program in a slot: its output and the pipe of its exit code."""

    def __init__(self, connection: Spawner, uid: int, code: str, *words: str) -> None:
        output, writing = os.pipe()
        control = os.open(os.devnull, os.O_RDONLY)
        argv = (PYTHON, "-c", code, *words)
        self._exits = connection.run(uid, argv, Path("/"), {}, writing, control)
        os.close(writing)
        os.close(control)
        self._output = output

    def begun(self) -> bool:
        return os.read(self._output, 100) == b"begun\n"

    def output(self) -> str:
        """Wait for its end; return the rest of its output."""
        with os.fdopen(self._output, "rb") as file:
            return file.read().decode()

    def exit_code(self) -> int:
        return exit_code(self._exits)


@contextlib.contextmanager
def started(*words: int) -> Iterator[tuple[Spawner, "subprocess.Popen[bytes]", socket.socket]]:
    """Start a spawner with its capabilities in a container; yield it and its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [*CONFINED, sys.executable, "-I", "-S", spawner.__file__, str(theirs.fileno())]
    process = subprocess.Popen([*argv, *map(str, words)], env={}, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield Spawner(ours), process, ours
    finally:
        ours.close()
        process.wait(ENDS_WITHIN_S)


def test_a_program_runs_as_the_user_of_its_slot_with_a_large_argv() -> None:
    with started(NOBODY, FIRST_UID, NUM_UIDS) as (connection, _, _):
        code = "import os, sys; print(os.getresuid(), os.getgroups(), sum(map(len, sys.argv)))"
        program = Program(connection, FIRST_UID + 1, code, *["x" * 100_000] * 8)
        assert program.exit_code() == 0
        uid = FIRST_UID + 1
        assert program.output() == f"{(uid, uid, uid)} [] 800002\n"


@pytest.mark.parametrize("uid", [0, NOBODY, FIRST_UID - 1, FIRST_UID + NUM_UIDS])
def test_a_user_outside_the_range_is_refused(uid: int, capfd: pytest.CaptureFixture[str]) -> None:
    with started(NOBODY, FIRST_UID, NUM_UIDS) as (connection, _, _):
        program = Program(connection, uid, FOREVER)
        assert program.exit_code() == spawner.NOT_STARTED
        assert program.output() == ""
        assert (
            f"spawner: request refused: ValueError: 'run' as user {uid}" in capfd.readouterr().err
        )
        with pytest.raises(InfraError, match="could not be ended"):
            connection.end(uid)


@pytest.mark.parametrize("words", [(NOBODY, NOBODY - 1, 4), (NOBODY, NOBODY - 5, 4), (1000, 0, 4)])
def test_a_range_with_root_or_the_worker_in_it_is_refused(words: tuple[int, int, int]) -> None:
    with started(*words) as (_, process, _):
        assert process.wait(ENDS_WITHIN_S) == 1


@pytest.mark.parametrize("code", [FOREVER, KILLER])
def test_closing_the_connection_ends_the_slots(code: str) -> None:
    with started(NOBODY, FIRST_UID, NUM_UIDS) as (connection, process, ours):
        program = Program(connection, FIRST_UID, code)
        assert program.begun()
        ours.close()
        assert program.output() == ""
        with pytest.raises(InfraError, match="has ended"):
            program.exit_code()
        assert process.wait(ENDS_WITHIN_S) == 0


def test_a_program_that_kills_every_process_it_can_is_ended() -> None:
    with started(NOBODY, FIRST_UID, NUM_UIDS) as (connection, _, _):
        program = Program(connection, FIRST_UID, KILLER)
        assert program.begun()
        connection.end(FIRST_UID)
        assert program.exit_code() == -signal.SIGKILL
        assert program.output() == ""


WORKER = f"""
import asyncio, os, pwd, sys
from pathlib import Path
from rollmesh.envs import isolation
from rollmesh.envs.isolation import Command, Isolation, IsolationSettings
from rollmesh.envs.program import run_program
from rollmesh.envs.scratch import new_scratch
from rollmesh.envs.spawning import account_of, process_spawner, start_spawner_and_drop_rights

start_spawner_and_drop_rights(account_of("{NOBODY}"), {FIRST_UID}, {NUM_UIDS})
assert process_spawner() is not None and "ROLLMESH_SPAWNER_FD" not in os.environ
settings = IsolationSettings("uid", first_uid={FIRST_UID}, num_uids={NUM_UIDS})
isolation.use_isolation(Isolation(settings))

async def main():
    async with new_scratch() as scratch:
        given = scratch.work / "given"
        given.touch(0o600)
        given.write_text("for the program")
        command = Command(("{PYTHON}", "-c", sys.argv[1]), scratch.work, {{}})
        ended = await run_program(command, 3600, 999)
        print(ended.exit_code, ended.output, (scratch.work / "inner/made").read_text(), flush=True)
    assert not scratch.work.exists()

asyncio.run(main())
"""


def worker(code: str) -> "subprocess.Popen[bytes]":
    """Start a process that becomes user 65534 and runs `code` in a slot."""
    argv = [*CONFINED, sys.executable, "-c", WORKER, code]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)


def test_private_files_pass_between_a_worker_without_rights_and_its_program() -> None:
    needs_shared_python()
    code = (
        "import os; os.umask(0o077); os.mkdir('inner'); open('inner/made', 'w').write('made');"
        "print(open('given').read(), end='')"
    )
    process = worker(code)
    output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, output) == (0, b"0 for the program made\n")


def test_a_program_dies_with_its_worker() -> None:
    needs_shared_python()
    name = f"rollmesh-test-{os.getpid()}"
    code = (
        "import socket; s = socket.socket(socket.AF_UNIX);"
        f"s.connect('\\0{name}'); s.send(b'.'); s.recv(1)"
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        listening.settimeout(ENDS_WITHIN_S)
        with worker(code) as process:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(ENDS_WITHIN_S)
                assert connection.recv(1) == b"."
                process.kill()
                assert connection.recv(1) == b""


@pytest.mark.parametrize("user", ["no-such-user", "0", "root"])
def test_a_worker_cannot_run_as_root_or_an_unknown_user(user: str) -> None:
    with pytest.raises(ConfigError, match=f"--user {user}: "):
        account_of(user)
