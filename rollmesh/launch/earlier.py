"""What a run has left for engines that start in it: the newest weights that it published.

Invariant: weights are named by the policy version under which they were published, which the
trainer has written down before their folder is there. Driven by `run`, for a run that is gone on
with, and by the verb `engine`, for one that takes the place of another.
"""

from pathlib import Path

import msgspec

from rollmesh.core import published
from rollmesh.core.config import Config


class Earlier(msgspec.Struct, frozen=True):
    """With what engines begin that sampled before."""

    weights: Path
    """The newest that were published; where none are left, the model that the run began with."""
    policy_version: int = 0
    """Theirs."""


def find_earlier(config: Config) -> Earlier:
    """As the run's folder tells."""
    return newest_published(weights_of(config)) or Earlier(Path(config.model.path))


def weights_of(config: Config) -> Path:
    """Where the run's trainer publishes."""
    return config.run_folder() / "weights"


def newest_published(weights: Path) -> Earlier | None:
    """The newest whole model of those that stand in a run's folder `weights`; None without any."""
    newest = published.newest_published(weights)
    return Earlier(newest.folder, newest.policy_version) if newest else None
