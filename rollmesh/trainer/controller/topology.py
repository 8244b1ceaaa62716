"""Which rank does what: data-parallel heads, and the ranks that compute beside them.

    rank     0 1 | 2 3 | 4 5        num_ranks = 6, tensor_parallel = 2
    group      0 |   1 |   2        one per data-parallel head
    head     0   | 2   | 4          the first of its group; 1, 3 and 5 follow theirs

Invariant: consecutive ranks form a group, and its first is its head. Pure; driven by both ends.
"""

import msgspec

from rollmesh.core.errors import ConfigError


class Topology(msgspec.Struct, frozen=True):
    """Of one controller's ranks."""

    num_ranks: int
    tensor_parallel: int = 1
    """Ranks that compute one row together."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.tensor_parallel < 1 or self.num_ranks % self.tensor_parallel:
            raise ConfigError(
                f"{self.num_ranks} ranks do not divide into groups of {self.tensor_parallel}"
            )

    def heads(self) -> range:
        """The ranks that are given data."""
        return range(0, self.num_ranks, self.tensor_parallel)
