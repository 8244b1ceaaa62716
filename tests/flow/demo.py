"""`rollmesh demo`, made short, for tests of the whole.

Owns how a test starts it, or the same run of a model that is there, and reads what it leaves.
Invariant: it is the real command in a process of its own; the one who starts it ends it. Driven by
test_run.py, test_resume.py, test_adapters.py and test_page.py.
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
    """As a context it is waited for; where the test fails it is ended, since it may never end."""

    def __exit__(self, kind: type[BaseException] | None, *about: Any) -> None:
        if kind is not None:
            self.kill()  # all that it started ends with it
        super().__exit__(kind, *about)


def start(folder: Path, *more: str, **settings: object) -> Running:
    """`rollmesh demo` in `folder`, with `more` words and these settings."""
    return _started(folder, "demo", "--seed", "1", *more, **settings)


def start_with(model: Path, folder: Path, *more: str, **settings: object) -> Running:
    """The same run of a model that is there: to make one takes as long as all that follows."""
    (folder / "mesh.json").write_bytes(msgspec.json.encode(SETTINGS))
    fixed = {"model.path": model, "run.seed": 1}
    return _started(folder, "up", "mesh.json", *more, **fixed, **settings)


def _started(folder: Path, *words: str, **settings: object) -> Running:
    argv = [sys.executable, "-m", "rollmesh.cli.main", *words, "--no-live"]
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


def follow(path: Path) -> Generator[dict[str, Any], None, None]:
    """Rows of a file that is being written."""
    words = ["tail", "-n", "+1", "-F", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout
        try:
            for line in tail.stdout:
                yield msgspec.json.decode(line)
        finally:
            tail.terminate()


def read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())
