"""`rollmesh dashboard RUN_FOLDER`: the page of a running or finished run.

Invariant: nothing is written and nobody is asked; the page reads the run's files, so it may be
opened beside the run's own page, or long after it. Driven by people and by launch.
"""

from rollmesh.cli.options import parser
from rollmesh.cli.run_folder import run_folder
from rollmesh.dashboard.main import Options, add_arguments, run


def main(argv: list[str]) -> int:
    """Serve until stopped."""
    arguments = parser("dashboard", "Serve the page of a run: learning, fleet, trajectories.")
    add_arguments(arguments)
    options = arguments.parse_args(argv, namespace=Options())
    options.run_folder = run_folder(options.run_folder)
    run(options, print)
    return 0
