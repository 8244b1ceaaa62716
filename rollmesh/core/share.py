"""A run's part in a fleet of GPUs that other runs share.

Owns what a process must know to find it. Invariant: it names the part, and who knows what is in it;
how much that is at a time is the scheduler's word alone. Driven by the verbs, launch and the
trainer.
"""

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError


class Share(msgspec.Struct, frozen=True):
    """See the module."""

    scheduler: str
    """tcp:// address of who knows the shares."""
    pipeline_id: str
    """What the run is called there."""


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
