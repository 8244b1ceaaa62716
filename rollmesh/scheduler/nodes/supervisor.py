"""Supervisor of the service's process in a Ray actor.

    STARTING --reports--> SERVING --ends--> STARTING
    STARTING --ends--> RESTING, a moment, --> STARTING

- Whatever fails here or in the callback, the supervisor continues, with one warning for each series
  of faults.
- A process that fails to start is not restarted at once.
- The process dies with the thread that started it, so that this thread must never end early.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from rollmesh.core.child_process import ManagedProcess, describe_exit, launched_environment
from rollmesh.core.logs import get_logger
from rollmesh.core.process import Ready

log = get_logger()

CHECK_S = 2.0
"""Interval of checking the process and calling `check`."""


class ServiceSupervisor:
    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        check: Callable[[str], None],
        check_s: float = CHECK_S,
    ) -> None:
        """`argv` gets `--ready-fd N` and runs in `folder`; `check` is called with the service's
        address."""
        self.serves = threading.Event()
        """Set once the first start has succeeded or failed."""
        self.ready: Ready | None = None
        """Report of the process that serves now."""
        self.last_line = ""
        """Last output line of a process that failed to start."""
        self._argv = argv
        self._folder = folder
        self._check = check
        self._check_s = check_s
        self._child: ManagedProcess | None = None
        self._is_failing = False

    def run(self, stop: threading.Event) -> None:
        """Run until `stop`, then kill the process."""
        try:
            while not stop.is_set():
                self._look(stop)
        finally:
            if self._child:
                self._child.kill()
                self._child.wait()

    def _look(self, stop: threading.Event) -> None:
        try:
            if self._child is None or not self._child.is_running:
                self._start()
            if self.ready:
                self._check(self.ready.address)
        except Exception as error:  # noqa: BLE001 - door: the service ends with this loop
            if not self._is_failing:
                why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                log.warning("supervisor.failed", why=why, fix="it is retried")
            self._is_failing = True
        else:
            self._is_failing = False
        if self.ready and self._child:
            self._child.wait_for(self._check_s)
        else:
            stop.wait(self._check_s)

    def _start(self) -> None:
        self.ready = None
        child = self._child = ManagedProcess(
            self._argv,
            reports=True,
            folder=self._folder,
            environment=launched_environment(),
            stderr=subprocess.PIPE,
        )
        ready = child.wait_ready()
        assert child.stderr is not None
        if ready:
            self.ready = ready
            # Its log goes to our own stderr.
            threading.Thread(target=_copy, args=(child.stderr,), daemon=True).start()
        else:
            with child.stderr as stream:
                lines = stream.read().decode(errors="replace").strip().splitlines()
            code = child.wait()
            self.last_line = lines[-1] if lines else describe_exit(code)
            log.warning("supervisor.start_failed", why=self.last_line)
        self.serves.set()


def _copy(stream: IO[bytes]) -> None:
    with stream:
        for line in stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
