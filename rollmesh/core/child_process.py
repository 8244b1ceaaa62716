"""Start, watch and stop one child process: the one way in which rollmesh starts programs.

- A child leads its own session, so that the terminal's Ctrl-C reaches its parent alone.
- It gets argv and the descriptors that are passed to it, and no others.
- A child that receives the pid of its launcher dies with the thread that started it
  (PR_SET_PDEATHSIG, which core/process.py requests in the child); so do ranks and weight senders,
  which request only that.
- `stop` sends SIGTERM, and SIGKILL after a timeout. Nothing is restarted here.
"""

import asyncio
import contextlib
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import msgspec

from rollmesh.core.process import LAUNCHER_VARIABLE, Ready


def describe_exit(code: int) -> str:
    """Return `exit code 1` or `killed by signal 9`; `code` is that of Popen.returncode."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def open_output(path: Path) -> IO[bytes]:
    """Open a file to which children append their output, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def spawn_options(
    *,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of subprocess.Popen and asyncio.create_subprocess_exec.

    `environment` replaces ours; None keeps it.
    """
    return {
        "pass_fds": tuple(pass_fds),
        "env": environment,
        "cwd": folder,
        "stdin": stdin,
        "stdout": stdout,
        "stderr": stderr,
        "start_new_session": True,
    }


def launched_environment(variables: Mapping[str, str] = {}) -> dict[str, str]:
    """Return our environment with `variables`, and ourselves as the child's launcher."""
    return {**os.environ, **variables, LAUNCHER_VARIABLE: str(os.getpid())}


class ManagedProcess:
    """A child that is running or has ended; thread-safe."""

    def __init__(self, argv: Sequence[str], *, reports: bool = False, **options: Any) -> None:
        """Start it; OSError if the system refuses. `options` are those of `spawn_options`.

        With `reports` the child gets `--ready-fd N`, for `wait_ready`.
        """
        self._report: IO[bytes] | None = None
        with ExitStack() as stack, ExitStack() as undo:
            words, pass_fds = list(argv), [*options.pop("pass_fds", ())]
            if reports:
                reading, writing = os.pipe()
                stack.callback(os.close, writing)
                self._report = undo.enter_context(os.fdopen(reading, "rb"))
                words += ["--ready-fd", str(writing)]
                pass_fds.append(writing)
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                words, **spawn_options(pass_fds=pass_fds, **options)
            )
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe to its standard input, if it was started with one."""
        return self._popen.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        """The pipe from its standard output, if it was started with one."""
        return self._popen.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """The pipe from its standard error, if it was started with one."""
        return self._popen.stderr

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def wait_ready(self, timeout_s: float | None = None) -> Ready | None:
        """Wait for its report and return it; None if it ended first, or not in time. Once only."""
        assert self._report is not None
        with self._report as pipe:
            is_readable, _, _ = select.select([pipe], [], [], timeout_s)
            line = pipe.readline() if is_readable else b""
        return msgspec.json.decode(line, type=Ready) if line else None

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        return self._popen.wait()

    def wait_for(self, timeout_s: float) -> bool:
        """Wait for its end for at most `timeout_s`; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return not self.is_running

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self._popen.kill()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, SIGKILL after `timeout_s`, and wait for its end."""
        self._popen.terminate()
        if not self.wait_for(timeout_s):
            self._popen.kill()
            self._popen.wait()


async def kill_and_wait(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """SIGKILL an asyncio child and wait for at most `timeout_s`: the kernel may not release it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), timeout_s)
