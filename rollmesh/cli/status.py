"""`rollmesh status [RUN_FOLDER]`: how a run stands, from the files it leaves.

Invariant: it reads what the page reads, so both say the same, and it works on a run that lives, has
ended or was killed. Driven by people.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmesh.cli.options import parser
from rollmesh.core.errors import UserError
from rollmesh.dashboard.reader import RunReader

MIB = 2**20


def main(argv: list[str]) -> int:
    """Print it."""
    arguments = parser("status", "Say how a run stands, from its folder.")
    arguments.add_argument(
        "run_folder", type=Path, nargs="?", help="the newest in runs/ if left out"
    )
    folder = arguments.parse_args(argv).run_folder or newest(Path("runs"))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no such run folder; runs stand in runs/NAME")
    now_s = time.time()
    reader = RunReader(folder)
    reader.poll(now_s)
    print("\n".join(describe(reader.state(now_s))))
    return 0


def newest(runs: Path) -> Path:
    """The run folder that was begun last; UserError if there is none."""
    begun = {path.parent: path.stat().st_mtime for path in runs.glob("*/config.json")}
    if not begun:
        raise UserError(f"{runs}: no runs there; name a run folder")
    return max(begun, key=lambda folder: begun[folder])


def describe(state: dict[str, Any]) -> Iterator[str]:
    """The lines."""
    run, last = state["run"], state["learning"]["last"] or {}
    step = last.get("step")
    done = 0 if step is None else step + 1
    yield f"{run['name']}: {run['phase']}, step {done} of {run['num_steps']}"
    yield (
        f"success {number(last.get('success'))}, untrained {number(run['success_untrained'])},"
        f" policy version {last.get('policy_version', '-')},"
        f" oldest sample {last.get('max_age', '-')}"
    )
    fleet = state["fleet"]
    router = fleet["router"] or {"engines": [], "workers": []}
    for engine in router["engines"]:
        yield (
            f"engine {engine['url']}: {engine['phase']}, policy version"
            f" {engine['policy_version']}, {engine['num_running']} running"
        )
    for worker in router["workers"]:
        yield (
            f"{worker['worker_id']}: {worker['state']}, {worker['in_flight']} in flight,"
            f" {worker['num_finished']} finished"
        )
    for process in fleet["processes"]:
        yield f"pid {process['pid']} {process['role']}: {process['rss_bytes'] / MIB:.0f} MB"


def number(value: float | None) -> str:
    """Two digits."""
    return "-" if value is None else f"{value:.2f}"
