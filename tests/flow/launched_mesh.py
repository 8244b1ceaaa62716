"""A router and workers under a real supervisor, with an engine of the test.

Tests wait for events in launch's log or for the end of a process.
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
    """A mesh whose run folder is `folder/run`; environments may be modules in `folder`."""

    def __init__(self, folder: Path, engine_url: str, **sections: Any) -> None:
        """`sections` are settings: a dict for each section, and `env` as a string."""
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
        args = [str(HERE / "launch_program.py"), str(self.run), str(described), str(settings)]
        self.process = subprocess.Popen(
            [sys.executable, *args], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        )
        tail = ["tail", "-n", "+1", "-F", str(self.run / "logs" / "launch.log")]
        self._tail = subprocess.Popen(tail, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._events = self._read()

    def until_ready(self, *roles: str) -> None:
        """Wait until all of these have reported."""
        waiting = set(roles)
        while waiting:
            event = next(self._events)
            if event["event"] == "child.ready":
                waiting.discard(event["child"])

    def until(self, event: str, child: str, **more: object) -> dict[str, Any]:
        """Wait for the next such event in launch's log; skip events before it."""
        wanted = {"event": event, "child": child, **more}
        return next(each for each in self._events if wanted.items() <= each.items())

    def router(self) -> Ready:
        """Address of the router."""
        return read_addresses(self.run)["router"]

    def pids(self) -> dict[str, int]:
        """The newest process of each role."""
        return {row.role: row.pid for row in read_pids(self.run)}

    def end(self) -> dict[str, Any]:
        """Stop it in order; return its result."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=ENDS_WITHIN_S)
        result: dict[str, Any] = msgspec.json.decode(out)
        return result

    def close(self) -> None:
        """Kill all processes that are left."""
        with self._tail:  # closes its pipe and waits
            self._tail.kill()
        if self.process.returncode is None:
            self.process.terminate()
            self.process.communicate(timeout=ENDS_WITHIN_S)

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self._tail.stdout
        for line in self._tail.stdout:
            yield msgspec.json.decode(line)
