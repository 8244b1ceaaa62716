"""The dependencies of the train loop, and the interface of a policy that it trains.

- Nothing is decided here, so loop and saver depend on this module and not on each other.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.checkpoints.store import Checkpointable, CheckpointStore
from rollmesh.trainer.gpu_lease import ExclusiveGpus, GpuLease, Offloadable
from rollmesh.trainer.pacing.pacer import Pacer
from rollmesh.trainer.pacing.ready_queue import SampleAllocator
from rollmesh.trainer.reports.exactness import FenceRequested
from rollmesh.trainer.reports.records import RunRecords
from rollmesh.trainer.reports.summary import Tally
from rollmesh.trainer.weights.folder import PublishFn, WeightVersions
from rollmesh.trainer.weights.verdicts import Probe


class TrainablePolicy(Checkpointable, Offloadable, Protocol):
    """A policy in this process, or on ranks."""

    @property
    def allocator(self) -> SampleAllocator:
        """Allocates samples where the policy reads them."""

    def step(
        self, samples: Sequence[Sample], step: int, *, step_of_version: Mapping[int, int]
    ) -> StepReport:
        """Train once on a batch, whose samples stay allocated until `end_step`. `step_of_version`
        has the number of train steps after which each policy version was made."""

    def end_step(self, step: int) -> None:
        """Free the samples of `step` everywhere; the caller no longer reads them."""

    def save(self, folder: Path) -> None:
        """Write the weights."""

    def export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        """Copy the weights, `policy_version` from now on, to memory that transports can read until
        the next call; return nothing if they are in `folder` already. Raises NoRoom if the disk is
        full; the call may be repeated."""

    def set_policy_version(self, policy_version: int | None) -> None:
        """Set the version under which the weights held now were published, or None."""

    def probe(self) -> Probe:
        """Score a fixed text by the weights held now."""

    def close(self) -> None:
        """Free everything."""


class TrainerDeps(msgspec.Struct):
    """Components of the train loop."""

    client: RolloutClient
    pacer: Pacer
    policy: TrainablePolicy
    weights: WeightVersions
    bring: PublishFn
    records: RunRecords
    tally: Tally
    checkpoints: CheckpointStore
    fence: Callable[[FenceRequested], None]
    """Fence an engine, without waiting."""
    gpu_lease: GpuLease = ExclusiveGpus()
