"""`rollmesh make-model FOLDER`: write the demo's tiny warm-started model, to try the other verbs.

An existing model is overwritten only with `--force`; `--keep` leaves it and loads no torch.
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
    arguments.add_argument(
        "--seed", type=int, default=0, help="random seed of weights (default: 0)"
    )
    existing = arguments.add_mutually_exclusive_group()
    existing.add_argument("--keep", action="store_true", help="keep an existing model")
    existing.add_argument("--force", action="store_true", help="overwrite an existing model")
    options = arguments.parse_args(argv)
    folder: Path = options.folder
    if is_made(folder):
        if options.keep:
            return OK
        if not options.force:
            raise UserError(
                f"{folder}: there is a model already; name another folder, "
                "or overwrite it with --force, or keep it with --keep"
            )
    make_model(folder, options.seed)
    print(f"wrote {folder}; `rollmesh init --model {folder}` uses it", flush=True)
    return OK


def make_model(folder: Path, seed: int) -> None:
    """Write the model; UserError where that cannot be."""
    from rollmesh.trainer.models.tiny import write_model

    try:
        write_model(folder, seed, LAST_FILE)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None


def is_made(folder: Path) -> bool:
    """Whether the folder holds a whole model."""
    return (folder / LAST_FILE).is_file()
