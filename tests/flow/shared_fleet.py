"""A scheduler on this machine with four slots, and runs of two real pipelines that share them.

The owners of each slot are read from the scheduler's journal. Every started process is ended, also
after an error.
"""

import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.transport import ask_scheduler
from rollmesh.scheduler.service.explain import FleetExplanation
from rollmesh.wire.scheduling import ReadScheduler
from tests.ports import free_ports

ENDS_WITHIN_S = 60.0
TRAINS_ON = {"math": (0, 1), "code": (2, 3)}
FLEET = """
bind = "tcp://127.0.0.1:{}"
http_bind = "127.0.0.1:{}"
journal = "{}"

[[nodes]]
name = "here"
gpus = 4

[pipelines.math]
clusters.actor_train = [0, 1]
generation = [0, 1, 2, 3]

[pipelines.code]
clusters.actor_train = [2, 3]
generation = [0, 1, 2, 3]
"""
RUN: dict[str, Any] = {
    "env": "guess",
    "dashboard": {"enabled": False},
    "sampling": {"max_tokens": 4},
    "worker": {"num_workers": 1, "max_rollouts": 16},
    "engine": {"num_embedded": 4},
    "trainer": {
        "num_steps": 5,
        "groups_per_step": 2,
        "samples_per_group": 4,
        "max_running_groups": 4,
        "eval_rollouts": 8,
        "checkpoint_steps": 3,
        "max_logprob_gap": 1.0,
    },
}


class SharedFleet:
    """`rollmesh scheduler up` and the runs that were started on it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        ports = free_ports(2)
        self.address = f"tcp://127.0.0.1:{ports[0]}"
        file = folder / "scheduler.toml"
        file.write_text(FLEET.format(*ports, folder / "scheduler"))
        self._up = self._start("scheduler", "up", str(file))
        assert self._up.stdout
        self.first_line = self._up.stdout.readline()  # all pipelines are registered by then
        self._runs: list[subprocess.Popen[str]] = []

    def begin(self, pipeline: str, name: str = "", **sections: Any) -> subprocess.Popen[str]:
        """Start `rollmesh up` with this share of the fleet, in a folder named `name`; `sections`
        replace its settings."""
        name = name or pipeline
        settings = self.folder / f"{name}.json"
        model = {"path": str(self.model), "max_context_tokens": 512}
        run = {"name": name, "folder": str(self.folder)}
        whole = RUN | {"run": run, "model": model} | sections
        settings.write_bytes(msgspec.json.encode(whole))
        share = ("--scheduler", self.address, "--pipeline", pipeline)
        self._runs.append(self._start("up", str(settings), "--no-live", *share))
        return self._runs[-1]

    def kill_scheduler(self) -> None:
        """Kill the scheduler (-9); its parent restarts it."""
        for child in psutil.Process(self._up.pid).children():
            if "serve" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)

    def view(self) -> FleetExplanation:
        """The scheduler's explanation of the fleet."""
        with contextlib.chdir(self.folder):  # scheduler.toml names the keys
            answer = ask_scheduler(
                self.address, ReadScheduler(new_id("read")), patience_s=ENDS_WITHIN_S
            )
        return msgspec.json.decode(answer.body, type=FleetExplanation)

    def slot_history(self) -> dict[int, list[tuple[str, str, int, str]]]:
        """Owners of each slot, in order: (pipeline, cluster, rank, phase), '' for none."""
        database = sqlite3.connect(self.folder / "scheduler" / "scheduler.sqlite")
        with contextlib.closing(database):
            rows = database.execute(
                "SELECT gpu, pipeline_id, cluster, rank, phase FROM history ORDER BY rowid"
            ).fetchall()
        slots: dict[int, list[tuple[str, str, int, str]]] = {}
        for gpu, *row in rows:
            slots.setdefault(gpu, []).append(tuple(row))
        return slots

    def close(self) -> None:
        """End all processes; clean up after killed ones."""
        for process in (*self._runs, self._up):
            with process:
                if process.poll() is None:
                    process.terminate()
                try:
                    process.communicate(timeout=ENDS_WITHIN_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)

    def _start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "rollmesh.cli.main", *args],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if args[0] == "up" else None,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )


def direct_handovers(owners: list[tuple[str, str, int, str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of owners between which a slot passed without having been free."""
    for before, after in itertools.pairwise(owners):
        if before[:3] != after[:3] and before[0] and after[0]:
            yield str(before), str(after)
