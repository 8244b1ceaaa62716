"""What a train loop drives, and what it asks of a policy.

Invariant: nothing is decided here, so that loop and saver see each other through it alone. Put
together by process.py; driven by loop.py and saver.py.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.engine.in_memory import Part
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.books.records import RunRecords, Tally
from rollmesh.trainer.gpu_lease import ExclusiveGpus, GpuLease, Offloadable
from rollmesh.trainer.meter.fencing import FenceAsked
from rollmesh.trainer.pacing.pacer import Pacer
from rollmesh.trainer.pacing.ready_queue import SampleAllocator
from rollmesh.trainer.savepoints.shelf import Savepoints, Subject
from rollmesh.trainer.weights.folder import PublishFn, WeightVersions
from rollmesh.trainer.weights.verdicts import Probe


class TrainablePolicy(Subject, Offloadable, Protocol):
    """A policy, in this process or on ranks of its own."""

    @property
    def allocator(self) -> SampleAllocator:
        """Where it wants samples to lie."""

    def step(
        self, samples: Sequence[Sample], step: int, *, step_of_version: Mapping[int, int]
    ) -> StepReport:
        """Train once on a batch; the samples stay until the step ends. Versions are told with the
        number of steps after which they were made."""

    def end_step(self, step: int) -> None:
        """Nothing here looks at the samples of `step` any more: they may be freed everywhere."""

    def save(self, folder: Path) -> None:
        """Write the weights."""

    def export(self, folder: Path, policy_version: int) -> tuple[Part, ...]:
        """Lay the weights, from now on known as `policy_version`, where carriers find them until
        the next call; none where they are in `folder` at once. NoRoom where the disk is full; then
        it may be called again."""

    def set_policy_version(self, policy_version: int | None) -> None:
        """The weights held now were published under this name, or under none."""

    def probe(self) -> Probe:
        """What the weights held now say of a fixed text."""

    def close(self) -> None:
        """It is not needed any more."""


class TrainerDeps(msgspec.Struct):
    """What the loop drives."""

    client: RolloutClient
    pacer: Pacer
    policy: TrainablePolicy
    weights: WeightVersions
    bring: PublishFn
    records: RunRecords
    tally: Tally
    savepoints: Savepoints
    fence: Callable[[FenceAsked], None]
    """Have an engine fenced; returns at once."""
    gpu_lease: GpuLease = ExclusiveGpus()
    """Whose GPUs these are."""
