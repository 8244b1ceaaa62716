"""A claimed run of real processes: a launch that waits, and processes with its mark.

All processes are ended after the test.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.core.ids import new_id
from rollmesh.core.orphans import MARK_VARIABLE, new_mark
from rollmesh.core.process import start_ticks
from rollmesh.core.share import RunClaimRecord, place, write_claim
from rollmesh.wire.scheduling import RunClaim

WAITS = ("sleep", "600")


class ClaimedRun:
    """A run of the pipeline `math`."""

    def __init__(self, runs: Path, pipeline_id: str = "math") -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.mark = new_mark("test")
        self.launch = self.start("")
        self.claimed = RunClaimRecord(
            run_id=new_id("run-"),
            pipeline_id=pipeline_id,
            mark=self.mark,
            pid=self.launch.pid,
            started_ticks=start_ticks(self.launch.pid),
            place=place(),
        )
        self.record = write_claim(runs, self.claimed)

    @property
    def claim(self) -> RunClaim:
        """The launch's claim of the pipeline's name."""
        claimed, host = self.claimed, socket.gethostname()
        return RunClaim(
            claimed.run_id,
            host,
            claimed.pid,
            claimed.place,
            claimed.started_ticks,
            True,
            str(self.record),
        )

    @property
    def marked(self) -> list[subprocess.Popen[bytes]]:
        """Started processes, without the launch."""
        return self._started[1:]

    def start(self, mark: str) -> subprocess.Popen[bytes]:
        """Start a process with this mark, which waits until it is killed."""
        environment = os.environ | ({MARK_VARIABLE: mark} if mark else {})
        process = subprocess.Popen(WAITS, env=environment)
        self._started.append(process)
        return process

    def close(self) -> None:
        """End all started processes."""
        for each in self._started:
            each.kill()
            each.wait()


@contextmanager
def claimed_run(runs: Path, pipeline_id: str = "math") -> Iterator[ClaimedRun]:
    """Yield a claimed run."""
    run = ClaimedRun(runs, pipeline_id)
    try:
        yield run
    finally:
        run.close()
