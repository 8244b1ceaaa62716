"""A router and workers under a real supervisor, beside an engine of the test.

Owns the processes from `start` to `end`. Invariant: what a test waits for is an event in launch's
log, or a process's end. Driven by test_status.py and test_chaos.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.config import load_config
from rollmesh.core.process import Ready
from rollmesh.launch.folder import read_addresses, read_pids
from rollmesh.launch.plan import plan_serving
from rollmesh.testing.model_folder import write_model_folder

HERE = Path(__file__).parent
ENDS_WITHIN_S = 60.0


class LaunchedMesh:
    """`folder/run` is its run folder; modules in `folder` may be its environment."""

    def __init__(self, folder: Path, engine_url: str, **sections: Any) -> None:
        """`sections` are settings, each section as a dict, `env` as a string."""
        self.folder = folder
        self.run = folder / "run"
        write_model_folder(folder / "model")
        values = {
            "run": {"folder": str(folder), "name": "run"},
            "model": {"path": str(folder / "model")},
            "engine": {"urls": [engine_url]},
            **sections,
        }
        settings = folder / "mesh.json"
        settings.write_bytes(msgspec.json.encode(values))
        plans = plan_serving(load_config(settings), ("--config", str(settings)))
        described = folder / "plans.json"
        described.write_bytes(msgspec.json.encode(plans))
        words = [str(HERE / "launch_program.py"), str(self.run), str(described), str(settings)]
        self.process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        )
        tail = ["tail", "-n", "+1", "-F", str(self.run / "logs" / "launch.log")]
        self._tail = subprocess.Popen(tail, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._events = self._read()

    def until_ready(self, *roles: str) -> None:
        """Until all of these have reported."""
        waiting = set(roles)
        while waiting:
            event = next(self._events)
            if event["event"] == "child.ready":
                waiting.discard(event["child"])

    def until(self, event: str, child: str, **more: object) -> dict[str, Any]:
        """The next such event in launch's log, waited for; those before it are passed over."""
        wanted = {"event": event, "child": child, **more}
        return next(each for each in self._events if wanted.items() <= each.items())

    def router(self) -> Ready:
        """Where it serves."""
        return read_addresses(self.run)["router"]

    def pids(self) -> dict[str, int]:
        """The latest process of each role."""
        return {row.role: row.pid for row in read_pids(self.run)}

    def end(self) -> dict[str, Any]:
        """Stop it in order; what it said of its end."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=ENDS_WITHIN_S)
        told: dict[str, Any] = msgspec.json.decode(out)
        return told

    def close(self) -> None:
        """Whatever happened, leave nothing."""
        with self._tail:  # closes its pipe and waits
            self._tail.kill()
        if self.process.returncode is None:
            self.process.terminate()
            self.process.communicate(timeout=ENDS_WITHIN_S)

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self._tail.stdout
        for line in self._tail.stdout:
            yield msgspec.json.decode(line)
