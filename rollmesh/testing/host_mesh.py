"""A mesh over hosts of its own, each process started by its verb, as a user would by hand.

- A host has the keys of its roles and no other. Model and run folder are on the file system that
  all hosts share.
- `until_full_speed` measures how long a mesh needs after a fault.
"""

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rollmesh.testing.network import HostNetwork

ROLLMESH = (sys.executable, "-m", "rollmesh.cli.main")
ROUTER_PORT, HTTP_PORT, TRAINER_PORT, ENGINE_PORT = 5555, 8080, 5556, 30000
ENDS_WITHIN_S = 60.0
LOOK_S = 0.02
NUM_STEPS_AGAIN = 4
"""Steps after which the trainer has its full speed: more than it may take with old weights."""
NUM_REPORTS_AGAIN = 2
"""Reports of more finished rollouts after which a worker has its full speed: the first one may be
of rollouts that finished during the fault."""
FIVE_HOSTS = {
    "router": "router",
    "trainer": "trainer",
    "engine-0": "engine",
    "worker-0": "one",
    "worker-1": "two",
}
"""A mesh with a host for each process."""
LINKS = (
    ("router", "one"),
    ("one", "engine"),
    ("trainer", "one"),
    ("router", "trainer"),
    ("trainer", "engine"),
    ("router", "engine"),
)
"""The links between these hosts, one of each kind."""
SLOW_LINKS = {"delay_s": 0.1, "loss": 0.05}
"""Fault of a `Forwarder`: 200 ms there and back, and a packet in twenty is lost."""
REPLACED_ROLES = ("worker-0", "engine-0", "router", "trainer")
"""A process of each kind, whose host is replaced in turn."""
KEY_OF = {"router": "hub", "trainer": "publisher", "worker": "worker"}
"""Role of the key that each kind of process needs."""


class HostMesh:
    """The processes of a mesh.

    `hosts` has the host of each process. A process is named by its kind, perhaps with a number:
    router, trainer, engine-0, worker-0.
    """

    def __init__(
        self,
        folder: Path,
        network: HostNetwork,
        hosts: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> None:
        """`folder` gets the run folder, keys and output; `settings` are those of mesh.toml."""
        self.network = network
        self.run = folder / "run"
        self._folder, self._hosts = folder, hosts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        address = self.address
        fixed = {
            "run": {"name": "run", "folder": str(folder)},
            "router": {
                "bind": f"tcp://{address('router')}:{ROUTER_PORT}",
                "http_bind": f"127.0.0.1:{HTTP_PORT}",
            },
            "trainer": {"bind": f"tcp://{address('trainer')}:{TRAINER_PORT}"},
        }
        tree = dict(settings)
        for section, values in fixed.items():
            tree[section] = {**tree.get(section, {}), **values}
        self._settings = folder / "mesh.json"
        self._settings.write_bytes(msgspec.json.encode(tree))
        self._model = tree["model"]["path"]
        self._make_keys()

    def address(self, role: str) -> str:
        """Return the address of a process's host."""
        return self.network[self._hosts[role]].address

    def start(self, *roles: str, options: tuple[str, ...] = ()) -> None:
        """Start processes, or the successors of dead ones, with more options."""
        for role in roles:
            if role in self.processes:
                self.processes[role].wait(ENDS_WITHIN_S)
            keys = self._keys_of(role)
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            with (self._folder / f"{role}.out").open("ab") as output:
                self.processes[role] = self.network[self._hosts[role]].start(
                    [*ROLLMESH, *self._argv(role), *options],
                    env=os.environ | threads | {"ROLLMESH_KEYS": str(keys) if keys else ""},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

    def kill(self, role: str) -> None:
        """Kill a process by SIGKILL."""
        self.processes[role].kill()
        self.processes[role].wait(ENDS_WITHIN_S)

    def replace_host(self, role: str) -> None:
        """Remove a process's host as a power failure does; start the process on another host with
        the same address."""
        gone = self.network.vanish(self._hosts[role])
        self.network.add(gone.name, gone.address)
        self.start(role)

    def wait(self, role: str, timeout_s: float) -> int:
        """Wait for the end of a process; return its exit code. TimeoutExpired if it has none."""
        return self.processes[role].wait(timeout_s)

    def output(self, role: str) -> str:
        """Return what the processes of that role have printed."""
        return (self._folder / f"{role}.out").read_text(encoding="utf-8")

    def close(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.terminate()
        left = [psutil.Process(each.pid) for each in self.processes.values() if each.poll() is None]
        for late in psutil.wait_procs(left, ENDS_WITHIN_S)[1]:
            late.kill()
        for process in self.processes.values():
            process.wait(ENDS_WITHIN_S)

    def finish(self, num_more: int, timeout_s: float) -> int:
        """Kill the trainer; let its successor take some more steps and end the run. Return the
        number of all steps."""
        self.kill("trainer")
        num_steps = self.num_steps() + num_more
        self.start("trainer", options=("--set", f"trainer.num_steps={num_steps}"))
        code = self.wait("trainer", timeout_s)
        if code:
            raise RuntimeError(f"trainer ended with code {code}: {self.output('trainer')[-2000:]}")
        return num_steps

    def until_steps(self, num_steps: int, timeout_s: float) -> None:
        """Wait until the trainer has taken this many steps; TimeoutError if that takes longer."""
        give_up_s, pause = time.monotonic() + timeout_s, threading.Event()
        while self.num_steps() < num_steps:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"after {timeout_s:g} s: {self.num_steps()} steps")
            pause.wait(LOOK_S)

    def num_steps(self) -> int:
        """Return the number of train steps so far."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def num_finished(self) -> dict[str, int]:
        """Return the number of rollouts that each worker has reported; empty if the router does not
        answer."""
        try:
            raw = self.network[self._hosts["router"]].call(_get, HTTP_PORT, "/status")
        except OSError:
            return {}
        workers = msgspec.json.decode(raw)["workers"]
        return {each["worker_id"]: each["num_finished"] for each in workers}

    def until_full_speed(self, timeout_s: float) -> float:
        """Wait until the trainer has taken some steps and each worker has finished rollouts, from
        now on; return the seconds. TimeoutError if that takes longer."""
        begun_s, first_step = time.monotonic(), self.num_steps()
        last, num_reports = self.num_finished(), dict.fromkeys(self._workers(), 0)
        pause = threading.Event()
        while min(num_reports.values()) < NUM_REPORTS_AGAIN or (
            self.num_steps() < first_step + NUM_STEPS_AGAIN
        ):
            if time.monotonic() - begun_s > timeout_s:
                num_steps = self.num_steps() - first_step
                raise TimeoutError(f"after {timeout_s:g} s: {num_steps} steps, {num_reports}")
            pause.wait(LOOK_S)
            now = self.num_finished()
            for role in num_reports:
                num_reports[role] += now.get(role, 0) > last.get(role, 0)
            last |= now
        return time.monotonic() - begun_s

    def _workers(self) -> list[str]:
        return [role for role in self._hosts if role.startswith("worker")]

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
        words = []
        for role in self._hosts:
            file = self._keys_of(role)
            if file and role != "router":
                file.parent.mkdir(exist_ok=True)
                words += ["--export", f"{KEY_OF[role.partition('-')[0]]}={file}"]
        argv = [*ROLLMESH, "keys", str(self._folder / "keys"), *words]
        subprocess.run(argv, check=True, capture_output=True)


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ENDS_WITHIN_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()
