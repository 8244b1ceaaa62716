"""The policy on several ranks: what a train loop calls, and the role that the ranks have for it.

    loop > RankedPolicy > controller > PolicyRole at each rank > Policy, with ShardedRanks

- Samples are in this process's store from their arrival. A step deals their handles by length,
  siblings together; ranks of this host read them in place, and they are freed everywhere when the
  step has ended. Plain values of a sample are sent with the call; its arrays are one handle.
- Minibatches are chosen here, on the whole batch, so a loss does not depend on the number of ranks.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from torch import Tensor

from rollmesh.core.addresses import split_address, with_host
from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CallFailed, CheckpointError, NoRoom, RankGone
from rollmesh.core.ids import RolloutId
from rollmesh.core.types import Branch, Json
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.samples import Sample, SampledRun, arrays_in
from rollmesh.tensors.handles import RTensor
from rollmesh.tensors.handshake import memory_id
from rollmesh.tensors.plane import use
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.algorithms.packing import assign_minibatches
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.rank_group import RankGroupSettings
from rollmesh.trainer.controller.rendezvous import RankContext, gather
from rollmesh.trainer.controller.spec import Meeting, PlaneSpec, RoleSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from rollmesh.trainer.pacing.ready_queue import StoreAllocator, copy_samples
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranks import ShardedRanks, not_finite_error, resolve_device
from rollmesh.trainer.staleness import Staleness
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.keys import Keys

ROLE = "actor"
MAX_SAMPLE_BYTES = 2**34
"""Limit of the memory for samples, if /dev/shm is as large. Pages are used as needed, and pacing
bounds how many samples wait."""


class _SampleFields(msgspec.Struct, frozen=True):
    """The fields of a sample beside its arrays."""

    rollout_id: RolloutId
    branch: Branch
    reward: float
    sibling_rewards: tuple[float, ...]
    weight: float
    temperature: float
    images: tuple[str, ...]
    runs: tuple[SampledRun, ...]
    """Without engine names, which ranks do not need to measure gaps."""


class _Exported(msgspec.Struct, frozen=True):
    """The exported weights of ranks."""

    parts: tuple[SharedSegment, ...] = ()
    refused: str = ""
    """The error of a full disk; the export may be repeated."""


def rank_plan(
    path: str, settings: TrainerConfig, folder: Path, device: str, bind: str = Meeting().bind
) -> RankPlan:
    """Return the plan of the ranks that train the model in `path`; the same at each of them."""
    # Each rank has its own device, and the trainer's address may be known to itself alone.
    own = msgspec.structs.replace(settings, device="", rank_bind="")
    actor = RoleSpec(
        make="rollmesh.trainer.ranked:PolicyRole",
        settings={"path": path, "trainer": msgspec.to_builtins(own)},
    )
    return RankPlan(
        topology=Topology(settings.num_ranks),
        roles={ROLE: actor},
        device=device,
        num_threads=settings.num_threads,
        settings=RankGroupSettings(
            start_s=settings.rank_start_timeout_s,
            exit_s=settings.rank_exit_timeout_s,
            silence_s=settings.rank_silence_s,
        ),
        bind=bind,
        num_local=settings.local_ranks,
        folder=str(folder),
    )


class RankedPolicy:
    """A TrainablePolicy on `settings.num_ranks` ranks; see Policy for its methods."""

    def __init__(
        self,
        path: str,
        settings: TrainerConfig,
        folder: Path,
        keys: Keys | None = None,
        staleness: Staleness | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Start the ranks; raise RankGone if one cannot load the model. `staleness` paces what they
        train; ranks that are started elsewhere join at `meeting`."""
        device = str(resolve_device(settings.device, settings.local_ranks))
        meeting = meeting or Meeting()
        plan = rank_plan(path, settings, folder, device, meeting.bind)
        self._num_minibatches = settings.num_minibatches
        bind = with_host("tcp://:0", split_address(meeting.bind)[0])
        samples = PlaneSpec(bind=bind, store_bytes=max_sample_bytes())
        self._tensor_runtime = TensorRuntime(samples, keys)
        assert self._tensor_runtime.plane.store is not None
        self.allocator = StoreAllocator(self._tensor_runtime.plane.store)
        """Allocates samples in this process's store."""
        self._controller = TrainController(plan, self._tensor_runtime, keys, staleness)
        self._before = use(self._tensor_runtime.plane)
        """The process's data plane before this one."""
        try:
            meeting.publish(self._controller.address)
            self._controller.start(meeting.stop)
        except BaseException:
            self._leave()
            raise

    @property
    def staleness(self) -> Staleness | None:
        """The pacing of the batches, read-only."""
        return self._controller.staleness

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        *,
        step_of_version: Mapping[int, int] | None = None,
    ) -> StepReport:
        """Train once on a batch; see Policy. Samples outside the allocator are copied to it first.
        Raises RankError if a rank fails or is lost."""
        minibatches = assign_minibatches(samples, self._num_minibatches)
        groups = [sample.group_id for sample in samples]
        rule = DispatchRule(groups=groups, parts=minibatches, uneven="pad")
        rows = self._rows(samples, minibatches, step)
        made = _made(samples, step_of_version or {})
        report = self._controller.call(RoleCall(f"{ROLE}.step", rule=rule), rows, step, made)
        return msgspec.convert(report, StepReport)

    def end_step(self, step: int) -> None:
        """Free the samples of `step` here and at the ranks, and log what is left."""
        self._controller.end_step(step)

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """Write the model folder, on the first rank."""
        self._check_finite(folder)
        self._controller.call(f"{ROLE}.save", str(folder.absolute()), policy_version)

    def export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        """Export the weights; return the parts of all ranks, of similar size."""
        self._check_finite(folder)
        answer = self._controller.call(f"{ROLE}.export", str(folder.absolute()), policy_version)
        exported = msgspec.json.decode(answer, type=_Exported)
        if exported.refused:
            raise NoRoom(exported.refused)
        return exported.parts

    def snapshot(self, folder: Path) -> None:
        """Copy the state; each rank writes its own rows in the background."""
        self._check_finite(folder)
        self._controller.call(f"{ROLE}.snapshot", str(folder.absolute()))

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have written; raise CallFailed if one could not."""
        return bool(self._controller.call(f"{ROLE}.is_snapshot_written"))

    def restore(self, folder: Path) -> None:
        """Read the state; any number of ranks may have written it."""
        try:
            self._controller.call(f"{ROLE}.restore", str(folder.absolute()))
        except CallFailed as error:
            raise CheckpointError(str(error)) from None

    def set_policy_version(self, policy_version: int | None) -> None:
        """See Policy."""
        self._controller.call(f"{ROLE}.set_policy_version", policy_version)

    def probe(self) -> Probe:
        """See Policy."""
        return msgspec.convert(self._controller.call(f"{ROLE}.probe"), Probe)

    def offload(self) -> None:
        """Move weights and optimiser of each rank to its host; ranks that have ended hold
        nothing."""
        with contextlib.suppress(RankGone):
            self._controller.call(f"{ROLE}.offload")

    def reload(self) -> None:
        """Move weights and optimiser of each rank back to its device."""
        self._controller.call(f"{ROLE}.reload")

    def close(self) -> None:
        """End the ranks."""
        self._controller.close()
        self._leave()

    def _rows(
        self, samples: Sequence[Sample], minibatches: Sequence[int], step: int
    ) -> list[dict[str, Any]]:
        """The rows of a call: plain values, and the arrays as a handle of `step`."""
        handles = self._controller.take(self._handles(samples), step)
        return [
            {"plain": _plain(sample), "arrays": handle, "minibatch": minibatch}
            for sample, handle, minibatch in zip(samples, handles, minibatches, strict=True)
        ]

    def _handles(self, samples: Sequence[Sample]) -> list[RTensor]:
        outside = [sample for sample in samples if not self.allocator.holds(sample)]
        copied = iter(copy_samples(outside, self.allocator.allocate))
        found = [each.handle or next(copied).handle for each in samples]
        return [handle for handle in found if handle is not None]

    def _check_finite(self, folder: Path) -> None:
        """Raise NotFinite here, since an error at a rank would be a CallFailed."""
        if not self._controller.call(f"{ROLE}.is_finite"):
            raise not_finite_error(folder)

    def _leave(self) -> None:
        use(self._before)
        self._tensor_runtime.close()


class PolicyRole:
    """The role of one rank."""

    def __init__(self, context: RankContext, path: str, trainer: Mapping[str, Json]) -> None:
        settings = msgspec.convert(trainer, TrainerConfig)
        settings = msgspec.structs.replace(settings, device=context.device)
        ranks = ShardedRanks(context.mesh["data"], sharing_ranks(memory_id(str(SHARED_MEMORY))))
        self._policy = Policy(path, settings, ranks)

    def step(
        self,
        rows: Sequence[dict[str, Any]],
        step: int,
        made: Sequence[tuple[int, int]],
        row_weights: Sequence[float],
    ) -> dict[str, Any]:
        """Train on this rank's samples; return the report of all ranks. `made` has pairs of policy
        version and train steps after which it was made."""
        own = [row for row, weight in zip(rows, row_weights, strict=True) if weight]
        minibatches = [row["minibatch"] for row in own]
        samples = [_sample(row) for row in own]
        step_report = self._policy.step(samples, step, minibatches, dict(made))
        report: dict[str, Any] = msgspec.to_builtins(step_report)
        report["gaps"] += [[]] * (len(rows) - len(own))  # padding rows are last
        return report

    def save(self, folder: str, policy_version: int | None) -> None:
        """Write the model folder."""
        self._policy.save(Path(folder), policy_version)

    def export(self, folder: str, policy_version: int) -> str:
        """Export this rank's part; return the parts of all ranks, as JSON."""
        try:
            exported = _Exported(self._policy.export(Path(folder), policy_version))
        except NoRoom as error:  # every rank must take part in the gathering
            exported = _Exported(refused=str(error))
        bodies = gather(msgspec.json.encode(exported))
        all_exported = [msgspec.json.decode(each, type=_Exported) for each in bodies]
        parts = tuple(part for each in all_exported for part in each.parts if part.pieces)
        refused = next((each.refused for each in all_exported if each.refused), "")
        return msgspec.json.encode(_Exported(parts, refused)).decode()

    def snapshot(self, folder: str) -> None:
        """Copy this rank's part, and write it in the background."""
        self._policy.snapshot(Path(folder))

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have written it."""
        return self._policy.is_snapshot_written()

    def restore(self, folder: str) -> None:
        """Read this rank's part; any number of ranks may have written it."""
        self._policy.restore(Path(folder))

    def is_finite(self) -> bool:
        """Whether no weight of any rank is NaN or infinite."""
        return self._policy.is_finite()

    def set_policy_version(self, policy_version: int | None) -> None:
        """Set the version of the weights held now."""
        self._policy.set_policy_version(policy_version)

    def offload(self) -> None:
        """Move weights and optimiser to the host."""
        self._policy.offload()

    def reload(self) -> None:
        """Move weights and optimiser back to the device."""
        self._policy.reload()

    def probe(self) -> dict[str, Any]:
        """Score a fixed text."""
        probe: dict[str, Any] = msgspec.to_builtins(self._policy.probe())
        return probe


def sharing_ranks(memory: str) -> list[int]:
    """Return the ranks whose memory is that of the first rank, and so of the trainer, which reads
    exported weights there; a collective. `memory` is the name of this rank's."""
    memories = gather(memory.encode())
    return [rank for rank, each in enumerate(memories) if each == memories[0]]


def max_sample_bytes() -> int:
    """Limit of the memory for samples."""
    try:
        shared = os.statvfs(SHARED_MEMORY)
    except OSError:
        return MAX_SAMPLE_BYTES
    # A size of 0 is no limit.
    return min(shared.f_blocks * shared.f_frsize or MAX_SAMPLE_BYTES, MAX_SAMPLE_BYTES)


def _made(samples: Sequence[Sample], step_of_version: Mapping[int, int]) -> list[tuple[int, int]]:
    """(policy version, train steps after which it was made) of each version in `samples`."""
    versions = {run.policy_version for sample in samples for run in sample.runs}
    return sorted((each, step_of_version[each]) for each in versions & step_of_version.keys())


def _plain(sample: Sample) -> Any:
    plain = msgspec.convert(sample, _SampleFields, from_attributes=True)
    runs = tuple([SampledRun(run.num_tokens, run.policy_version) for run in sample.runs])
    return msgspec.to_builtins(msgspec.structs.replace(plain, runs=runs))


def _sample(row: Mapping[str, Any]) -> Sample:
    """The sample of a row; its arrays are those that were fetched, read-only."""
    memory: Tensor = row["arrays"]
    plain = msgspec.convert(row["plain"], _SampleFields)
    return Sample(**arrays_in(memory.numpy())._asdict(), **msgspec.structs.asdict(plain))
