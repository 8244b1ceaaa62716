"""A mesh with an embedded engine, and a trainer whose incarnations the test starts and kills.

- Mesh and run folder outlive each trainer.
- The state of a run is read from its files.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import Config, load_config
from rollmesh.core.files import read_rows
from rollmesh.core.process import Ready
from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_addresses
from rollmesh.launch.plan import plan_serving
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.flow.demo import follow

HERE = Path(__file__).parent
ENDS_WITHIN_S = 60.0
LOOK_S = 0.01
"""Poll interval for the end of a trainer's step."""
SETTINGS = {
    "env": "guess",
    "run": {"name": "run"},
    "model": {"max_context_tokens": 512},
    "sampling": {"max_tokens": 4},
    "worker": {"max_rollouts": 16},
    "publish": {"lease_s": 3.0},  # an engine waits this long if a trainer died during an update
    "trainer": {
        "num_steps": 25,
        "groups_per_step": 2,
        "samples_per_group": 4,
        "max_running_groups": 4,
        "checkpoint_steps": 4,
        "learning_rate": 1e-3,
        "max_logprob_gap": 1.0,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, for the tests that import this."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


class TrainedMesh:
    """`run` is its run folder."""

    def __init__(
        self, folder: Path, model: Path, sections: dict[str, Any] | None = None, **trainer: object
    ) -> None:
        """`trainer` are more of its settings, `sections` whole others."""
        self.run = folder / "run"
        tree = SETTINGS | {
            "run": {"name": "run", "folder": str(folder)},
            "model": {"path": str(model), "max_context_tokens": 512},
            "trainer": SETTINGS["trainer"] | trainer,  # type: ignore[operator]
            **(sections or {}),
        }
        settings = folder / "mesh.json"
        settings.write_bytes(msgspec.json.encode(tree))
        self.config: Config = load_config(settings)
        described = folder / "plans.json"
        plans = plan_serving(self.config, ("--config", str(settings)))
        described.write_bytes(msgspec.json.encode(plans))
        args = [str(HERE / "launch_program.py"), str(self.run), str(described), str(settings)]
        nowhere = subprocess.DEVNULL
        self._mesh = subprocess.Popen(
            [sys.executable, *args], stdout=nowhere, start_new_session=True
        )
        self._settings = settings
        self._zygote: subprocess.Popen[str] | None = None
        self._stderr = (folder / "trainer.err").open("w")

    def begin(self) -> int:
        """Start a trainer; return its pid."""
        self._command("begin")
        return int(self._answer())

    def end(self) -> int:
        """Wait for the trainer's end; return its exit code."""
        return int(self._answer())

    def outlives(self, pause_s: float) -> bool:
        """Whether the trainer still runs after this time; returns at once if it ends."""
        assert self._zygote
        assert self._zygote.stdout
        return not select.select([self._zygote.stdout], [], [], pause_s)[0]

    def until(self, num_rows: int) -> None:
        """Wait until there are rows of `num_rows` steps, or the trainer has ended."""
        while len(self.rows("metrics.jsonl")) < num_rows and self.outlives(LOOK_S):
            pass

    def kill(self, pid: int) -> int:
        """Kill the trainer if it has not ended; return its exit code."""
        os.kill(pid, signal.SIGKILL)
        return self.end()

    def stderr_output(self) -> str:
        """Output of the trainers on stderr."""
        return (self.run.parent / "trainer.err").read_text()

    def close(self) -> None:
        """Kill all processes that are left."""
        if self._zygote:
            with self._zygote:
                self._zygote.kill()
        self._mesh.terminate()
        self._mesh.wait(ENDS_WITHIN_S)
        self._stderr.close()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of one of the run's files, without a torn last line."""
        return read_rows(self.run / name)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = msgspec.json.decode((self.run / "summary.json").read_bytes())
        return summary

    def _command(self, line: str) -> None:
        if self._zygote is None:
            router = wait_for(self.run, "router").address
            args = [str(HERE / "trainer_zygote.py"), str(self._settings), router]
            self._zygote = subprocess.Popen(
                [sys.executable, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._zygote.stdin
        self._zygote.stdin.write(f"{line}\n")
        self._zygote.stdin.flush()

    def _answer(self) -> str:
        assert self._zygote
        assert self._zygote.stdout
        return self._zygote.stdout.readline()


def wait_for(run: Path, role: str) -> Ready:
    """The Ready report of a process of the mesh, once there is one."""
    launched = follow(run / "logs" / "launch.log")
    next(row for row in launched if (row["event"], row.get("child")) == ("child.ready", role))
    return read_addresses(run)[role]
