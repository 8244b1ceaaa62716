"""`rollmesh up [mesh.toml]`: a run with the user's own settings.

Invariant: it ends only when every process that it started has ended, and its exit code says how
the run went. Driven by people, and in containers as the main process.
"""

from pathlib import Path

from rollmesh.cli.options import add_no_keys, add_set, add_share, add_view, parser, share_of
from rollmesh.cli.resume import add_resume, resume_command, settings_of
from rollmesh.launch.run import RunOptions, launch


def main(argv: list[str]) -> int:
    """Start the mesh, watch it until it ends; the exit code."""
    arguments = parser("up", "Start engines, router, workers, trainer and page; watch them.")
    arguments.add_argument(
        "config",
        type=Path,
        nargs="?",
        default=Path("mesh.toml"),
        help="mesh.toml of this folder if left out; `rollmesh init` writes one",
    )
    add_share(arguments)
    add_resume(arguments)
    add_set(arguments)
    add_no_keys(arguments)
    add_view(arguments)
    options = arguments.parse_args(argv)
    return launch(
        RunOptions(
            config=settings_of(options),
            is_live=options.is_live,
            has_keys=options.has_keys,
            resume=options.resume,
            share=share_of(options),
            resume_command=resume_command("up", argv),
        )
    )
