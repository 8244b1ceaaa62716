"""The policy on several ranks: what a train loop calls, and the role that the ranks have for it.

    loop > RankedPolicy > controller > PolicyRole at each rank > Policy, with the others as its team

A step's samples are stored here and dealt by length, siblings together; ranks fetch their own, and
when the step has ended they are gone everywhere. Invariants: those of the policy, whose losses are
the same for any number of ranks as long as a step is one minibatch (more are dealt rank by rank);
what a sample is of plain values travels with the call, its arrays are handles. Driven by the train
loop; the role by rank.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.core.ids import RolloutId
from rollmesh.core.types import Branch, Json
from rollmesh.serve.client.samples import Sample
from rollmesh.tensors.handles import Content
from rollmesh.tensors.plane import use
from rollmesh.tensors.store import OwnerStore
from rollmesh.trainer.controller.controller import Call, RankPlan, TrainController
from rollmesh.trainer.controller.dispatch import Rule
from rollmesh.trainer.controller.household import Household
from rollmesh.trainer.controller.meeting import Place
from rollmesh.trainer.controller.spec import PlaneSpec, RoleSpec
from rollmesh.trainer.controller.topology import Topology
from rollmesh.trainer.policy import Policy, StepReport
from rollmesh.trainer.publisher import Probe
from rollmesh.trainer.team import Team
from rollmesh.wire.keys import Keys

ARRAYS = ("token_ids", "logprobs", "loss_mask", "policy_versions")
"""Of a sample."""
ROLE = "actor"


class _Plain(msgspec.Struct, frozen=True):
    """What a sample is besides its arrays."""

    rollout_id: RolloutId
    branch: Branch
    reward: float
    weight: float
    temperature: float
    images: tuple[str, ...]


class RankedPolicy:
    """See the module; what Policy has, on as many ranks as `settings.num_ranks` says."""

    def __init__(
        self, path: str, settings: TrainerConfig, folder: Path, keys: Keys | None = None
    ) -> None:
        """Start the ranks; RankGone where one cannot load the model."""
        actor = RoleSpec(
            make="rollmesh.trainer.ranked:PolicyRole",
            settings={"path": path, "trainer": msgspec.to_builtins(settings)},
        )
        plan = RankPlan(
            topology=Topology(settings.num_ranks),
            roles={ROLE: actor},
            device=settings.device,
            num_threads=settings.num_threads,
            folder=str(folder),
        )
        self._home = Household(PlaneSpec(), keys)
        self._controller = TrainController(plan, self._home, keys)
        self._before = use(self._home.plane)
        """The process's plane before ours."""
        try:
            self._controller.start()
        except BaseException:
            self._leave()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, samples: Sequence[Sample], step: int) -> StepReport:
        """As Policy has it; RankError where a rank fails or is gone."""
        store = self._home.plane.store
        assert store is not None
        rule = Rule(groups=[sample.group_id for sample in samples], uneven="pad")
        told = self._controller.call(
            Call(f"{ROLE}.step", rule=rule), _rows(samples, store, step), step
        )
        self._controller.end_step(step)
        return msgspec.convert(told, StepReport)

    def save(self, folder: Path, policy_version: int | None = None) -> None:
        """As Policy has it; written by the first rank."""
        self._controller.call(f"{ROLE}.save", str(folder.absolute()), policy_version)

    def probe(self) -> Probe:
        """As Policy has it."""
        told = self._controller.call(f"{ROLE}.probe")
        return msgspec.convert(told, Probe)

    def close(self) -> None:
        """End the ranks."""
        self._controller.close()
        self._leave()

    def _leave(self) -> None:
        use(self._before)
        self._home.close()


class PolicyRole:
    """One rank's policy."""

    def __init__(self, place: Place, path: str, trainer: Mapping[str, Json]) -> None:
        settings = msgspec.convert(trainer, TrainerConfig)
        self._policy = Policy(path, settings, Team(place.mesh["data"]))

    def step(
        self, rows: Sequence[dict[str, Any]], step: int, row_weights: Sequence[float]
    ) -> dict[str, Any]:
        """Train on this rank's samples; what all ranks report."""
        own = [_sample(row) for row, weight in zip(rows, row_weights, strict=True) if weight]
        report: dict[str, Any] = msgspec.to_builtins(self._policy.step(own, step))
        return report

    def save(self, folder: str, policy_version: int | None) -> None:
        """Write the model."""
        self._policy.save(Path(folder), policy_version)

    def probe(self) -> dict[str, Any]:
        """What the weights say of a fixed text."""
        probe: dict[str, Any] = msgspec.to_builtins(self._policy.probe())
        return probe


def _rows(samples: Sequence[Sample], store: OwnerStore, step: int) -> list[dict[str, Any]]:
    """What travels of the samples: their arrays as handles of `step`."""
    arrays = [getattr(sample, name) for sample in samples for name in ARRAYS]
    handles = iter(store.put([_content(array) for array in arrays], step))
    return [
        {
            "plain": msgspec.to_builtins(msgspec.convert(sample, _Plain, from_attributes=True)),
            "arrays": {name: next(handles) for name in ARRAYS},
        }
        for sample in samples
    ]


def _content(array: np.ndarray) -> Content:
    data = np.ascontiguousarray(array).view(np.uint8)
    return Content(str(array.dtype), array.shape, data)


def _sample(row: Mapping[str, Any]) -> Sample:
    """The inverse: a sample whose arrays are those that were fetched, read-only."""
    arrays: dict[str, Tensor] = row["arrays"]
    plain = msgspec.convert(row["plain"], _Plain)
    fields: dict[str, Any] = {name: arrays[name].numpy() for name in ARRAYS}
    return Sample(**fields | msgspec.structs.asdict(plain))
