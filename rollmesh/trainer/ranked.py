"""The policy on several ranks: what a train loop calls, and the role that the ranks have for it.

    loop > RankedPolicy > controller > PolicyRole at each rank > Policy, with the others as its team

Samples lie in this process's store from the intake on. A step takes them there and deals their
handles by length, siblings together; ranks of this host look at their own where they lie, and when
the step has ended they are gone everywhere. Invariants: those of the policy, whose losses are
the same for any number of ranks, since minibatches are chosen here, on the whole batch; what a
sample is of plain values travels with the call, its arrays are one handle. Driven by the train
loop; the role by rank.py.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CallFailed, CheckpointError, NoRoom
from rollmesh.core.ids import RolloutId
from rollmesh.core.types import Branch, Json
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.serve.client.samples import Sample, SampledRun, arrays_in
from rollmesh.tensors.handles import RTensor
from rollmesh.tensors.plane import use
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.algorithms.batches import assign_minibatches
from rollmesh.trainer.algorithms.step_report import StepReport
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.rendezvous import RankContext, gather
from rollmesh.trainer.controller.spec import PlaneSpec, RoleSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from rollmesh.trainer.models.device import resolve_device
from rollmesh.trainer.pacing.ready_queue import StoreAllocator, copy_samples
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.ranks import ShardedRanks, not_finite_error
from rollmesh.trainer.staleness import Staleness
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.keys import Keys

ROLE = "actor"
MAX_ROOM_BYTES = 2**34
"""For samples that wait or train, if /dev/shm is as large. It takes what it needs: pacing bounds
how many wait."""


class _SampleFields(msgspec.Struct, frozen=True):
    """What a sample is besides its arrays."""

    rollout_id: RolloutId
    branch: Branch
    reward: float
    sibling_rewards: tuple[float, ...]
    weight: float
    temperature: float
    images: tuple[str, ...]
    runs: tuple[SampledRun, ...]
    """Without names: ranks measure gaps run by run, and never ask whose they are."""


class _Laid(msgspec.Struct, frozen=True):
    """What ranks handed over."""

    parts: tuple[SharedSegment, ...] = ()
    refused: str = ""
    """By a disk that is full, and in what words; then another try may do."""


class RankedPolicy:
    """See the module; what Policy has, on as many ranks as `settings.num_ranks` says."""

    def __init__(
        self,
        path: str,
        settings: TrainerConfig,
        folder: Path,
        keys: Keys | None = None,
        staleness: Staleness | None = None,
    ) -> None:
        """Start the ranks; RankGone where one cannot load the model. `staleness` paces what they
        train, to look at."""
        device = str(resolve_device(settings.device, settings.num_ranks))
        settings = msgspec.structs.replace(settings, device=device)
        actor = RoleSpec(
            make="rollmesh.trainer.ranked:PolicyRole",
            settings={"path": path, "trainer": msgspec.to_builtins(settings)},
        )
        plan = RankPlan(
            topology=Topology(settings.num_ranks),
            roles={ROLE: actor},
            device=device,
            num_threads=settings.num_threads,
            folder=str(folder),
        )
        self._num_minibatches = settings.num_minibatches
        self._tensor_runtime = TensorRuntime(PlaneSpec(store_bytes=room_bytes()), keys)
        assert self._tensor_runtime.plane.store is not None
        self.allocator = StoreAllocator(self._tensor_runtime.plane.store)
        """Where samples lie that train here."""
        self._controller = TrainController(plan, self._tensor_runtime, keys, staleness)
        self._before = use(self._tensor_runtime.plane)
        """The process's plane before ours."""
        try:
            self._controller.start()
        except BaseException:
            self._leave()
            raise

    @property
    def staleness(self) -> Staleness | None:
        """As TrainController has it."""
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
        """As Policy has it; RankError where a rank fails or is gone. Samples that lie elsewhere
        than in the room are brought there first."""
        minibatches = assign_minibatches(samples, self._num_minibatches)
        groups = [sample.group_id for sample in samples]
        rule = DispatchRule(groups=groups, parts=minibatches, uneven="pad")
        rows = self._rows(samples, minibatches, step)
        made = _made(samples, step_of_version or {})
        told = self._controller.call(RoleCall(f"{ROLE}.step", rule=rule), rows, step, made)
        return msgspec.convert(told, StepReport)

    def end_step(self, step: int) -> None:
        """As Trainee says: free them here and at the ranks, and see what is left."""
        self._controller.end_step(step)

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """As Policy has it; written by the first rank."""
        self._check_finite(folder)
        self._controller.call(f"{ROLE}.save", str(folder.absolute()), policy_version)

    def export(self, folder: Path, policy_version: int) -> tuple[SharedSegment, ...]:
        """As Policy has it: the parts of all ranks, about as large as each other."""
        self._check_finite(folder)
        told = self._controller.call(f"{ROLE}.export", str(folder.absolute()), policy_version)
        laid = msgspec.json.decode(told, type=_Laid)
        if laid.refused:
            raise NoRoom(laid.refused)
        return laid.parts

    def snapshot(self, folder: Path) -> None:
        """Implement Policy's method; each rank writes its own rows."""
        self._check_finite(folder)
        self._controller.call(f"{ROLE}.snapshot", str(folder.absolute()))

    def is_snapshot_written(self) -> bool:
        """As Subject has it; CallFailed where a rank could not."""
        return bool(self._controller.call(f"{ROLE}.is_snapshot_written"))

    def restore(self, folder: Path) -> None:
        """As Subject has it; of any number of ranks."""
        try:
            self._controller.call(f"{ROLE}.restore", str(folder.absolute()))
        except CallFailed as error:
            raise CheckpointError(str(error)) from None

    def set_policy_version(self, policy_version: int | None) -> None:
        """As Policy has it."""
        self._controller.call(f"{ROLE}.set_policy_version", policy_version)

    def probe(self) -> Probe:
        """As Policy has it."""
        told = self._controller.call(f"{ROLE}.probe")
        return msgspec.convert(told, Probe)

    def offload(self) -> None:
        """As Lodger has it; on GPUs core/share.py refuses it."""

    def reload(self) -> None:
        """As Lodger has it."""

    def close(self) -> None:
        """End the ranks."""
        self._controller.close()
        self._leave()

    def _rows(
        self, samples: Sequence[Sample], minibatches: Sequence[int], step: int
    ) -> list[dict[str, Any]]:
        """What travels of each, its arrays as a handle of `step`."""
        handles = self._controller.take(self._handles(samples), step)
        return [
            {"plain": _plain(sample), "arrays": handle, "minibatch": minibatch}
            for sample, handle, minibatch in zip(samples, handles, minibatches, strict=True)
        ]

    def _handles(self, samples: Sequence[Sample]) -> list[RTensor]:
        outside = [sample for sample in samples if not self.allocator.holds(sample)]
        brought = iter(copy_samples(outside, self.allocator.lay))
        found = [each.handle or next(brought).handle for each in samples]
        return [handle for handle in found if handle is not None]

    def _check_finite(self, folder: Path) -> None:
        """Raise NotFinite here: an error at a rank would reach the trainer as a failed call."""
        if not self._controller.call(f"{ROLE}.is_finite"):
            raise not_finite_error(folder)

    def _leave(self) -> None:
        use(self._before)
        self._tensor_runtime.close()


class PolicyRole:
    """One rank's policy."""

    def __init__(self, context: RankContext, path: str, trainer: Mapping[str, Json]) -> None:
        settings = msgspec.convert(trainer, TrainerConfig)
        self._policy = Policy(path, settings, ShardedRanks(context.mesh["data"]))

    def step(
        self,
        rows: Sequence[dict[str, Any]],
        step: int,
        made: Sequence[tuple[int, int]],
        row_weights: Sequence[float],
    ) -> dict[str, Any]:
        """Train on this rank's samples, whose versions were `made` after so many steps; what all
        ranks report."""
        own = [row for row, weight in zip(rows, row_weights, strict=True) if weight]
        minibatches = [row["minibatch"] for row in own]
        samples = [_sample(row) for row in own]
        told = self._policy.step(samples, step, minibatches, dict(made))
        report: dict[str, Any] = msgspec.to_builtins(told)
        report["gaps"] += [[]] * (len(rows) - len(own))  # of padding, which is the last
        return report

    def save(self, folder: str, policy_version: int | None) -> None:
        """Write the model."""
        self._policy.save(Path(folder), policy_version)

    def export(self, folder: str, policy_version: int) -> str:
        """Lay this rank's part out; what all of them laid, as JSON."""
        try:
            laid = _Laid(self._policy.export(Path(folder), policy_version))
        except NoRoom as error:  # told by all, since none may miss the gathering
            laid = _Laid(refused=str(error))
        all_laid = [
            msgspec.json.decode(each, type=_Laid) for each in gather(msgspec.json.encode(laid))
        ]
        parts = tuple(part for each in all_laid for part in each.parts)
        refused = next((each.refused for each in all_laid if each.refused), "")
        return msgspec.json.encode(_Laid(parts, refused)).decode()

    def snapshot(self, folder: str) -> None:
        """Copy this rank's part, and write it beside what comes next."""
        self._policy.snapshot(Path(folder))

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have."""
        return self._policy.is_snapshot_written()

    def restore(self, folder: str) -> None:
        """Read this rank's part of what any number of them wrote."""
        self._policy.restore(Path(folder))

    def is_finite(self) -> bool:
        """Whether no weight of any rank is NaN or infinite."""
        return self._policy.is_finite()

    def set_policy_version(self, policy_version: int | None) -> None:
        """Name the weights held now."""
        self._policy.set_policy_version(policy_version)

    def probe(self) -> dict[str, Any]:
        """What the weights say of a fixed text."""
        probe: dict[str, Any] = msgspec.to_builtins(self._policy.probe())
        return probe


def room_bytes() -> int:
    """How much the room may hold."""
    try:
        shared = os.statvfs(SHARED_MEMORY)
    except OSError:
        return MAX_ROOM_BYTES
    return min(shared.f_blocks * shared.f_frsize or MAX_ROOM_BYTES, MAX_ROOM_BYTES)  # 0 is no bound


def _made(samples: Sequence[Sample], step_of_version: Mapping[int, int]) -> list[tuple[int, int]]:
    """After how many steps each version that sampled something of them was made."""
    versions = {run.policy_version for sample in samples for run in sample.runs}
    return sorted((each, step_of_version[each]) for each in versions & step_of_version.keys())


def _plain(sample: Sample) -> Any:
    plain = msgspec.convert(sample, _SampleFields, from_attributes=True)
    runs = tuple([SampledRun(run.num_tokens, run.policy_version) for run in sample.runs])
    return msgspec.to_builtins(msgspec.structs.replace(plain, runs=runs))


def _sample(row: Mapping[str, Any]) -> Sample:
    """The inverse: a sample whose arrays are those that were fetched, read-only."""
    memory: Tensor = row["arrays"]
    plain = msgspec.convert(row["plain"], _SampleFields)
    return Sample(**arrays_in(memory.numpy())._asdict(), **msgspec.structs.asdict(plain))
