"""Keeps the service's process alive, and what depends on it tended.

    STARTING --reports--> SERVING --ends--> STARTING
    STARTING --ends--> RESTING, a moment, --> STARTING

Owns one child at a time. Invariants: whatever goes wrong here or in what is tended, the keeper goes
on, with one warning for each series of faults; a child that does not come to serve is not started
again at once; children die with the thread that started them, so one thread runs this and never
ends before its time. Driven by the actor of ray.py, in a thread.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from rollmesh.core.logs import get_logger
from rollmesh.core.process import LAUNCHER_VARIABLE, Ready

log = get_logger()

LOOK_S = 2.0
"""For a process that ended, and for what is tended."""


class Keeper:
    """See the module."""

    def __init__(
        self, argv: Sequence[str], folder: Path, tend: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        """`argv` is told `--ready-fd N` and runs in `folder`; `tend` is called with its address."""
        self.serves = threading.Event()
        """It has been found out once whether the process serves."""
        self.ready: Ready | None = None
        """Of the process that serves now."""
        self.complaint = ""
        """The last line of one that did not come to serve."""
        self._argv = argv
        self._folder = folder
        self._tend = tend
        self._look_s = look_s
        self._child: subprocess.Popen[bytes] | None = None
        self._is_failing = False

    def run(self, stop: threading.Event) -> None:
        """Until `stop`; then the process is ended."""
        try:
            while not stop.is_set():
                self._look(stop)
        finally:
            if self._child:
                self._child.kill()
                self._child.wait()

    def _look(self, stop: threading.Event) -> None:
        try:
            if self._child is None or self._child.poll() is not None:
                self._start()
            if self.ready:
                self._tend(self.ready.address)
        except Exception as error:  # noqa: BLE001 - door: the service lives as long as this loop
            if not self._is_failing:
                told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                log.warning("keeper.failed", why=told, fix="it is tried again each moment")
            self._is_failing = True
        else:
            self._is_failing = False
        if self.ready and self._child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self._look_s)
        else:
            stop.wait(self._look_s)

    def _start(self) -> None:
        self.ready = None
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as pipe:
            try:
                child = subprocess.Popen(
                    [*self._argv, "--ready-fd", str(writing)],
                    cwd=self._folder,
                    env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())},
                    pass_fds=[writing],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            finally:
                os.close(writing)
            self._child = child
            line = pipe.readline()
        assert child.stderr is not None
        if line:
            self.ready = msgspec.json.decode(line, type=Ready)
            # What it logs goes where our own goes, for as long as it lives.
            threading.Thread(target=_copy, args=(child.stderr,), daemon=True).start()
        else:
            with child.stderr as stream:
                said = stream.read().decode(errors="replace").strip().splitlines()
            code = child.wait()
            self.complaint = said[-1] if said else f"it ended with code {code}"
            log.warning("keeper.not_served", why=self.complaint)
        self.serves.set()


def _copy(stream: IO[bytes]) -> None:
    with stream:
        for line in stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
