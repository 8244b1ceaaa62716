"""Find the key file for an address that a user named, as Jupyter finds its tokens.

1. DIR/keys, if the user named a run by --run DIR
2. ROLLMESH_KEYS, or the keys that were handed to this process
3. runs/NAME/keys of the newest run under runs/ whose router listens at that address
4. none
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, Role, check_dial, read_key_file, read_keys

RUN_KEYS = "keys"
"""The key folder in a run folder."""
RUNS = Path("runs")


class _Address(msgspec.Struct):
    address: str = ""


def find_keys(
    address: str,
    role: Role,
    run: Path | None = None,
    environment: Mapping[str, str] | Any = os.environ,
) -> Keys | None:
    """The keys for the router at `address`, or None for a mesh without keys.

    ConfigError for a file that cannot be used; AddressError for another machine without keys.
    """
    if run is not None:
        return keys_of_run(run, role)
    keys = read_keys(environment, role)
    if keys is None and not environment.get(KEYS_VARIABLE):
        found = next((each for each in _runs() if address in _addresses(each)), None)
        keys = keys_of_run(found, role) if found else None
    check_dial(address, keys)
    return keys


def keys_of_run(run: Path, role: Role) -> Keys | None:
    """The keys of that role in a run folder; None if the run has none."""
    folder = run / RUN_KEYS
    if not run.is_dir():
        raise ConfigError(f"--run {run}: no such run folder")
    return read_key_file(folder, role) if has_keys(run) else None


def has_keys(run: Path) -> bool:
    """Whether a run folder has keys of its own."""
    return (run / RUN_KEYS).is_dir()


def _runs() -> Iterator[Path]:
    """The run folders under runs/, evaluations' meshes included, the newest first."""
    found = [*RUNS.glob("*/addresses.json"), *RUNS.glob("*/*/addresses.json")]
    for path in sorted(found, key=_modified_s, reverse=True):
        yield path.parent


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _addresses(run: Path) -> set[str]:
    try:
        told = msgspec.json.decode((run / "addresses.json").read_bytes(), type=dict[str, _Address])
    except (OSError, msgspec.MsgspecError):
        return set()
    return {each.address for each in told.values()} - {""}
