"""The folder of a gateway's journal, which holds what agents and models said to each other.

Invariant: nobody else may look into it; one that others can look into is refused in a line, and one
that is not there is made. Driven by archive.py and recovery.py.
"""

import stat
from pathlib import Path

from rollmesh.core.errors import ConfigError, JournalError


def make_private(folder: Path) -> None:
    """ConfigError where others can look into the folder, or it cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except FileExistsError:
        raise ConfigError(
            f"--journal {folder}: is a file; name a folder, or --no-journal"
        ) from None
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(
            f"--journal {folder}: {why}; name another folder, or --no-journal"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--journal {folder}: others can look into it; chmod 700 {folder}")


def unusable(error: JournalError) -> ConfigError:
    """What the user is told of a journal that cannot be gone on with."""
    return ConfigError(f"--journal: {error}; name another folder, or --no-journal")
