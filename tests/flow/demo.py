"""Start a short `rollmesh demo`, or the same run of an existing model, and read its results.

The command runs in its own process, and the caller must end it.
"""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.runs import SETTINGS

SHORT = {
    "trainer.num_steps": 6,
    "trainer.groups_per_step": 2,
    "trainer.samples_per_group": 4,
    "trainer.max_running_groups": 4,
    "trainer.eval_rollouts": 8,
}


class Running(subprocess.Popen[str]):
    """A context that waits for the command, and kills it if the test fails, since it may never
    end.
    """

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        if kind is not None:
            self.kill()  # and all processes that it started
        super().__exit__(kind, *about)


def start(folder: Path, *more: str, **settings: object) -> Running:
    """Run `rollmesh demo` in `folder` with additional arguments and these settings."""
    return _started(folder, "demo", "--seed", "1", *more, **settings)


def start_with(model: Path, folder: Path, *more: str, **settings: object) -> Running:
    """Run the same on an existing model, since making a model takes as long as the run."""
    (folder / "mesh.json").write_bytes(msgspec.json.encode(SETTINGS))
    fixed = {"model.path": model, "run.seed": 1}
    return _started(folder, "up", "mesh.json", *more, **fixed, **settings)


def _started(folder: Path, *args: str, **settings: object) -> Running:
    argv = [sys.executable, "-m", "rollmesh.cli.main", *args, "--no-live"]
    for key, value in (SHORT | settings).items():
        argv += ["--set", f"{key}={value}"]
    return Running(
        argv,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def follow(path: Path, pid: int | None = None) -> Generator[dict[str, Any], None, None]:
    """Yield rows of a file while it is written, until the process `pid` has ended."""
    command = ["tail", "-n", "+1", *([f"--pid={pid}"] if pid else []), "-F", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout
        try:
            for line in tail.stdout:
                yield msgspec.json.decode(line)
        finally:
            tail.terminate()


def read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())
