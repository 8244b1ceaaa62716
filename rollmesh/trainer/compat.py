"""The names that AReaL's users know, over ours.

    get_capacity, get_pending_limit, get_stats            how much may be under way, and what is
    on_rollout_{enqueued,submitted,accepted,rejected}     what has become of one
    on_version_recovered                                  go on from a checkpoint

Owns nothing: each is a line over KnownFormula, which admits as those names do. Driven by training
loops that were written against them; a loop that wants the age of each sample bounded steps a
StalenessManager (staleness.py) instead.
"""

from typing import Protocol

from rollmesh.trainer.pacing.known_formula import KnownCounts, KnownFormula


class VersionProvider(Protocol):
    """Who knows how many steps have been trained."""

    def get_version(self) -> int:
        """That many."""


class KnownStaleness(KnownFormula):
    """What is called StalenessManager there."""

    def __init__(
        self,
        version_provider: VersionProvider,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
    ) -> None:
        """As there."""
        super().__init__(
            version_provider.get_version,
            max_concurrent_rollouts,
            consumer_batch_size,
            max_staleness,
        )

    def get_capacity(self) -> int:
        """`capacity`; may be negative."""
        return self.capacity

    def get_pending_limit(self) -> int:
        """`pending_limit`"""
        return self.pending_limit

    def get_stats(self) -> KnownCounts:
        """`counts`: a copy with the fields `enqueued`, `running`, `accepted` and `rejected`."""
        return self.counts

    def on_rollout_enqueued(self) -> None:
        """`enqueue`"""
        self.enqueue()

    def on_rollout_submitted(self) -> None:
        """`submit`"""
        self.submit()

    def on_rollout_accepted(self) -> None:
        """`accept`"""
        self.accept()

    def on_rollout_rejected(self) -> None:
        """`reject`"""
        self.reject()

    def on_version_recovered(self, policy_version: int) -> None:
        """`recover`: `policy_version` is that of the last finished step, plus 1."""
        self.recover(policy_version)
