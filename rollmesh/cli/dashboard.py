"""`rollmesh dashboard [RUN_FOLDER]`: serve the page of a run, or list the runs in `runs/`.

It only reads the run's files, so it may run beside the run's own page or long after the run.
"""

import datetime
import time
from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.cli.run_folder import SETTINGS, all_runs, page_folder, run_folder
from rollmesh.cli.standing import of_folder
from rollmesh.core.errors import UserError
from rollmesh.core.process import OK
from rollmesh.dashboard.main import Options, add_arguments, run

RUNS = Path("runs")


def main(argv: list[str]) -> int:
    """Serve until stopped, or list the runs."""
    arguments = parser("dashboard", "Serve the page of a run: learning, fleet, trajectories.")
    add_arguments(arguments)
    options = arguments.parse_args(argv, namespace=Options())
    if options.run_folder is None:
        list_runs()
    else:
        run(options, page_folder(options.run_folder), print)
    return OK


def list_runs() -> None:
    """Print a line for each run, the newest first."""
    folders = all_runs(RUNS)
    width = max(len(str(folder)) for folder in folders)
    for folder in folders:
        print(f"{folder!s:<{width}}  {about(folder)}")
    print("`rollmesh dashboard RUN_FOLDER` serves the page of one")


def about(folder: Path) -> str:
    """When the run began, its state and its steps; for an evaluation on another mesh, its start."""
    began = datetime.datetime.fromtimestamp((folder / SETTINGS).stat().st_mtime).astimezone()
    try:
        standing = of_folder(run_folder(folder), time.time()).run
    except UserError:
        standing = None
    parts = [f"{began:%Y-%m-%d %H:%M}"]
    if standing:
        parts.append(f"{standing.phase}")
        parts += [f"step {standing.num_done} of {standing.num_steps}"] if standing.num_steps else []
    return "  ".join(parts)
