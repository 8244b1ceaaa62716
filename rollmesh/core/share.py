"""A run's part in a fleet of GPUs that other runs share.

- It names the part and holds the token that may change it; how many GPUs that is at a time is the
  scheduler's decision alone.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError
from rollmesh.core.secret_file import read_secret

TOKEN_FILE_VARIABLE = "ROLLMESH_PIPELINE_TOKEN_FILE"
"""Environment: path of the file with the pipeline's token."""
FLEET_FILE = "scheduler.toml"
"""The fleet's file where no other is named."""
JOURNAL = "scheduler"
"""The folder of the scheduler's journal where the fleet's file names no other."""
TOKENS = "tokens"
"""The folder in the journal's folder where admission keeps the token of each pipeline."""
KEYS = "keys"
"""The key folder in the journal's folder, made by `rollmesh scheduler up`."""


class Share(msgspec.Struct, frozen=True):
    """See the module."""

    scheduler: str
    """tcp:// address of the scheduler."""
    pipeline_id: str
    """The pipeline's name there."""
    token_file: str = ""
    """The file with its token; '': `token_file` finds it."""

    @property
    def token(self) -> str:
        """The pipeline's token; '' where there is no file of it.

        ConfigError if others can read the file.
        """
        return read_token(self.pipeline_id, self.token_file)


def token_file(
    pipeline_id: str, named: str = "", environment: Mapping[str, str] = os.environ
) -> Path | None:
    """The file with a pipeline's token; None if there is none.

    It is the file `named`, else that of ROLLMESH_PIPELINE_TOKEN_FILE, else the one that admission
    keeps for the fleet of this folder's scheduler.toml.
    """
    if told := named or environment.get(TOKEN_FILE_VARIABLE, ""):
        return Path(told)
    journal = _journal()
    path = journal / TOKENS / pipeline_id if journal else None
    return path if path and "/" not in pipeline_id and path.is_file() else None


def fleet_keys(token: Path | None = None) -> Path | None:
    """The keys that `rollmesh scheduler up` made in the journal's folder; None if there are none.

    `token` is the file of a pipeline's token there; by default this folder's scheduler.toml names
    the journal.
    """
    journal = token.absolute().parent.parent if token else _journal()
    keys = journal.absolute() / KEYS if journal else None
    return keys if keys and keys.is_dir() else None


def _journal() -> Path | None:
    """The journal's folder of this folder's scheduler.toml."""
    try:
        return Path(str(tomllib.loads(Path(FLEET_FILE).read_text()).get("journal", JOURNAL)))
    except (OSError, ValueError):
        return None


def read_token(pipeline_id: str, named: str = "") -> str:
    """The token of a pipeline; "" if there is no file of it, ConfigError if others can read it."""
    path = token_file(pipeline_id, named)
    return read_secret(path) if path else ""


def check_may_share(config: Config) -> None:
    """ConfigError where the trainer could not leave GPUs that are others' between its steps.

    `auto` is let through: the trainer checks again once it knows the device.
    """
    num_ranks, device = config.trainer.num_ranks, config.trainer.device
    if num_ranks > 1 and device not in ("cpu", "auto"):
        raise ConfigError(
            f'trainer.num_ranks = {num_ranks}, trainer.device = "{device}": on a shared fleet only '
            "a trainer of one rank can leave its GPUs to others; set trainer.num_ranks = 1"
        )
