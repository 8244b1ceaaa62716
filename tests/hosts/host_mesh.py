"""A mesh over hosts, each process started there by its verb as a user would by hand.

- A host has a folder with the keys of its roles and no other.
- Model and run folder are on the file system that all hosts share.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rollmesh.testing.network import HostNetwork
from tests.flow.demo import follow, read
from tests.flow.trained_mesh import SETTINGS, RunHistory

ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")
ROUTER_PORT, HTTP_PORT, TRAINER_PORT, ENGINE_PORT = 5555, 8080, 5556, 30000
ENDS_WITHIN_S = 60.0
KEY_OF = {"router": "hub", "trainer": "publisher", "worker": "worker"}
"""Role of the key that each kind of process needs."""


class HostMesh:
    """The processes of a mesh; `run` is the trainer's run folder.

    `hosts` has the host of each process. A process is named by its kind, perhaps with a number:
    router, trainer, engine-0, worker-0.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        network: HostNetwork,
        hosts: dict[str, str],
        **sections: Any,
    ) -> None:
        self.network = network
        self.run = folder / "run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder, self._hosts = folder, hosts
        tree = SETTINGS | {
            "run": {"name": "run", "folder": str(folder), "seed": 1},
            "model": {"path": str(model), "max_context_tokens": 512},
            "router": {
                "bind": f"tcp://{self.address('router')}:{ROUTER_PORT}",
                "http_bind": f"127.0.0.1:{HTTP_PORT}",
            },
            **sections,
        }
        trainer = SETTINGS["trainer"] | {"bind": f"tcp://{self.address('trainer')}:{TRAINER_PORT}"}  # type: ignore[operator]
        tree["trainer"] = trainer | tree["trainer"]
        self._settings = folder / "mesh.json"
        self._settings.write_bytes(msgspec.json.encode(tree))
        self._model = model
        self._make_keys()

    def address(self, role: str) -> str:
        """Return the address of a process's host."""
        return self.network[self._hosts[role]].address

    def start(self, *roles: str) -> None:
        """Start processes, or their successors."""
        for role in roles:
            self._start(role)

    def kill(self, role: str) -> None:
        """Kill a process by SIGKILL."""
        process = self.processes[role]
        process.kill()
        process.wait(ENDS_WITHIN_S)

    def wait(self, role: str, timeout_s: float) -> int:
        """Wait for the end of a process; return its exit code."""
        return self.processes[role].wait(timeout_s)

    def until_step(self, step: int) -> None:
        """Wait until the trainer has finished that step."""
        with closing(follow(self.run / "metrics.jsonl")) as rows:
            next(row for row in rows if row["step"] >= step)

    def output(self, role: str) -> str:
        """Return what the processes of that role have printed."""
        return (self._folder / f"{role}.out").read_text(encoding="utf-8")

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.terminate()
        running = [
            psutil.Process(each.pid) for each in self.processes.values() if each.poll() is None
        ]
        for late in psutil.wait_procs(running, ENDS_WITHIN_S)[1]:
            late.kill()
        for child in self.processes.values():
            child.wait(ENDS_WITHIN_S)

    def _start(self, role: str) -> None:
        keys = self._keys_of(role)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "ROLLMESH_KEYS": str(keys) if keys else "",
        }
        with (self._folder / f"{role}.out").open("ab") as output:
            self.processes[role] = self.network[self._hosts[role]].start(
                [*ROLLMESH, *self._argv(role)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _argv(self, role: str) -> list[str]:
        match role.partition("-")[0]:
            case "router":
                engines = [each for each in self._hosts if each.startswith("engine")]
                urls = [f"http://{self.address(each)}:{ENGINE_PORT}" for each in engines]
                options = [word for url in urls for word in ("--engine", url)]
                return ["router", "--config", str(self._settings), *options]
            case "engine":
                options = ["--incremental-streaming-output", "--skip-tokenizer-init"]
                options += ["--host", self.address(role), "--port", f"{ENGINE_PORT}"]
                options += ["--no-api-key", "--role", role]
                return ["engine", "--model-dir", str(self._model), *options]
            case "worker":
                return ["worker", *self._of_mesh(), "--worker-id", role]
            case _:
                return ["train", *self._of_mesh(), "--go-on"]

    def _of_mesh(self) -> list[str]:
        router = f"tcp://{self.address('router')}:{ROUTER_PORT}"
        return ["--config", str(self._settings), "--router", router]

    def _keys_of(self, role: str) -> Path | None:
        """The router's keys are a folder, with the list of members; others are one file."""
        key = KEY_OF.get(role.partition("-")[0])
        if key is None or key == "hub":
            return self._folder / "keys" if key else None
        return self._folder / f"host-{self._hosts[role]}" / f"{key}.json"

    def _make_keys(self) -> None:
        """Make the keys of the mesh on the router's host, and copy those of the other roles to
        their hosts."""
        files = [(role, self._keys_of(role)) for role in self._hosts if role != "router"]
        words = []
        for role, file in files:
            if file:
                file.parent.mkdir(exist_ok=True)
                words += ["--export", f"{KEY_OF[role.partition('-')[0]]}={file}"]
        argv = [*ROLLMESH, "keys", str(self._folder / "keys"), *words]
        subprocess.run(argv, check=True, capture_output=True)


def check_whole(run: Path, num_steps: int) -> None:
    """Check that each step and group was trained once and no rollout was lost."""
    history, summary = RunHistory(run), read(run / "summary.json")
    assert history.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    trained = history.trained()
    assert len(set(trained)) == len(trained)
    assert (summary["num_steps"], summary["num_lost"]) == (num_steps, 0)
    assert summary["ended"] == "done"
    rollouts = [each["rollout_id"] for each in rows(run / "trajectories.jsonl")]
    assert len(set(rollouts)) == len(rollouts) == summary["num_rollouts"]


def rows(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the rows of a file."""
    return (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
