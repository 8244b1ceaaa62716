"""`rollmesh demo`, made short, for tests of the whole.

Owns how a test starts it and reads what it leaves. Invariant: it is the real command in a process
of its own; the one who starts it ends it. Driven by test_run.py and test_page.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

SHORT = {
    "trainer.num_steps": 6,
    "trainer.groups_per_step": 2,
    "trainer.samples_per_group": 4,
    "trainer.max_running_groups": 4,
    "trainer.eval_rollouts": 8,
}


def start(folder: Path, **settings: object) -> subprocess.Popen[str]:
    """`rollmesh demo` in `folder`."""
    words = [sys.executable, "-m", "rollmesh.cli.main", "demo", "--no-live", "--seed", "1"]
    for key, value in (SHORT | settings).items():
        words += ["--set", f"{key}={value}"]
    return subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def follow(path: Path) -> Iterator[dict[str, Any]]:
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
