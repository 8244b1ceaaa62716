"""Which run folder a verb means: the one that is named, or the newest, or an evaluation's mesh's.

Invariant: a folder with other settings than ours is none, such as a model's, whose file of them has
the same name. Driven by the verbs that look at runs.
"""

from pathlib import Path

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.core.run_state import EVAL_MESH
from rollmesh.dashboard.rows import RunSection
from rollmesh.serve.client.evaluation_files import PLAN

SETTINGS = "config.json"


class _Settings(msgspec.Struct, frozen=True):
    """What every run's has."""

    run: RunSection


def newest(runs: Path) -> Path:
    """The run folder that was begun last; UserError if there is none."""
    return all_runs(runs)[0]


def all_runs(runs: Path) -> list[Path]:
    """The run folders in `runs`, the newest first; UserError if there is none."""
    folders = (path.parent for path in runs.glob(f"*/{SETTINGS}"))
    begun = {each: (each / SETTINGS).stat().st_mtime for each in folders if _is_run(each)}
    if not begun:
        raise UserError(f"{runs}: no runs there; name a run folder")
    return sorted(begun, key=lambda folder: begun[folder], reverse=True)


def run_folder(named: Path | None) -> Path:
    """The folder that is meant, or of an evaluation its mesh's; UserError if it is none."""
    folder = named or newest(Path("runs"))
    if (folder / PLAN).is_file():
        folder = folder / EVAL_MESH
        if not folder.exists():
            raise UserError(f"{folder.parent}: it runs on another's mesh; ask that by --router")
    if not _is_run(folder):
        raise UserError(f"{folder}: no such run folder; runs stand in runs/NAME")
    return folder


def page_folder(named: Path) -> Path:
    """The folder whose page is meant: an evaluation's own, else as `run_folder` finds it."""
    return named if (named / PLAN).is_file() else run_folder(named)


def _is_run(folder: Path) -> bool:
    try:
        msgspec.json.decode((folder / SETTINGS).read_bytes(), type=_Settings)
    except (OSError, msgspec.MsgspecError):
        return False
    return True
