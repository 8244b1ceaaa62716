"""`rollmesh make-model FOLDER`: the demo's tiny model, warm-started, for who wants to try the rest.

Invariant: with `--keep`, a model that is there stays as it is, and torch is not even loaded. Driven
by people, by launch for the demo, and by a container that starts before all others.
"""

# ruff: noqa: PLC0415 - torch is loaded where there is something to make

from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.core.errors import UserError
from rollmesh.core.process import OK

LAST_FILE = "config.json"
"""Written last: a folder that has it holds a whole model."""


def main(argv: list[str]) -> int:
    """Make it; the exit code."""
    arguments = parser("make-model", "Write the demo's warm-started tiny model.")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--keep", action="store_true", help="keep a model that is there")
    options = arguments.parse_args(argv)
    if options.keep and is_made(options.folder):
        return OK
    from rollmesh.trainer.models.warmstart import write_model

    try:
        write_model(options.folder, options.seed, LAST_FILE)
    except OSError as error:
        raise UserError(f"{options.folder}: {error.strerror}; name another folder") from None
    return OK


def is_made(folder: Path) -> bool:
    """Whether a whole model stands there."""
    return (folder / LAST_FILE).is_file()
