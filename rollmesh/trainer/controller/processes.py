"""The processes of the ranks: started, watched, ended.

- Each is a session of its own, so that the terminal's Ctrl-C reaches the controller only, and dies
  with the thread that started it, which is the controller's.
- A thread waits for each process and reports its end once, with the cause.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from rollmesh.core.child_process import ManagedProcess, describe_exit, open_output
from rollmesh.core.process import listen
from rollmesh.trainer.controller.spec import RankSpec, to_argument

MODULE = "rollmesh.trainer.controller"

OnExit = Callable[[int, str], None]
"""Called with a rank, and the cause of its end."""


class RankProcesses:
    """The processes of one controller."""

    def __init__(self, on_exit: OnExit) -> None:
        """`on_exit` is called on the thread that waits for the rank."""
        self._on_exit = on_exit
        self._children: list[ManagedProcess] = []
        self._threads: list[threading.Thread] = []

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start a process for each spec; raise OSError if the system refuses one, AddressError if
        the ranks cannot meet at `meet_at`."""
        with listen(f"{specs[0].meet_at}:0") as store:
            host, port = store.getsockname()[:2]
            for spec in specs:
                is_first = spec.rank == 0
                self._start(
                    msgspec.structs.replace(
                        spec,
                        store=f"{host}:{port}",
                        store_fd=store.fileno() if is_first else None,
                    )
                )

    def _start(self, spec: RankSpec) -> None:
        argv = [sys.executable, "-m", MODULE, "--spec", to_argument(spec)]
        with _output(spec) as output:
            child = ManagedProcess(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=() if spec.store_fd is None else (spec.store_fd,),
            )
        self._children.append(child)
        watch = threading.Thread(target=self._watch, args=(spec.rank, child), daemon=True)
        self._threads.append(watch)
        watch.start()
        assert child.stdin
        with contextlib.suppress(BrokenPipeError), child.stdin:  # it may have ended already
            child.stdin.write(f"{spec.secret}\n".encode())

    def kill(self) -> None:
        """Kill all processes."""
        for child in self._children:
            child.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended and were reported; return whether they have."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def _watch(self, rank: int, child: ManagedProcess) -> None:
        self._on_exit(rank, describe_exit(child.wait()))


def _output(spec: RankSpec) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """The file for a rank's output; without a run folder, the output of this process."""
    if not spec.folder:
        return contextlib.nullcontext()
    return open_output(Path(spec.folder) / "logs" / f"rank-{spec.rank}.out")
