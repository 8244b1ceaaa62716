"""Between the client and the train step: asks for groups, books what arrives, hands out batches.

Owns the groups that are asked for and not yet trained, those that are ready by way of its stock,
and the map from policy versions to train steps. Invariants: every group leaves here once, into a
batch or into the drop ledger with its reason, and of what is not trained no samples stay in the
policy's room; how many are under way is the StalenessManager's word. Driven by the train loop, on
its thread.
"""

import random
import threading
from collections.abc import Iterator
from typing import Protocol

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import Branch, GroupRecord, SamplingPolicy, Task
from rollmesh.serve.client.client import Arrival, Dropped, Finished
from rollmesh.serve.client.sample_memory import lay_plainly
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.records import RunRecords, Tally
from rollmesh.trainer.rooms import PlainRoom, Room
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupArrived,
    GroupAsked,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StepPublished,
    TakeBatch,
)
from rollmesh.trainer.stock import ReadyGroup, Stock, cut_group

BARREN_ROUNDS = 4
"""So many times max_running groups in a row that give nothing to train end the run: an environment
that always fails would be asked for ever, and an engine may be away for a while."""

SPARE_VERSIONS = 1000
"""So many more policy versions are known than the age bound needs: of what comes later than that
nobody remembers which step it is of."""
EVAL_WINDOW = 4096
"""Rollouts of an evaluation that are asked for at the same time: a client's asks are bounded."""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What every ask of this run has in common."""

    env: str
    num_samples: int
    sampling: SamplingPolicy
    seed: int
    branches: tuple[Branch, ...]


class Batch(msgspec.Struct):
    """What one step trains."""

    step: int
    groups: list[ReadyGroup]

    def group_ids(self) -> list[GroupId]:
        return [group.group_id for group in self.groups]

    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.all_samples()]


class Client(Protocol):
    """What the pacer needs of a RolloutClient."""

    run_id: str

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
    ) -> GroupId:
        """Ask for a group; its id, at once."""

    def take(self, timeout_s: float) -> list[Arrival]:
        """What has ended since the last call."""


class Pacer:
    """Asks within the bound; `collect` and `take` are called in turn until a batch is there."""

    def __init__(
        self,
        client: Client,
        staleness: StalenessManager,
        tasks: Iterator[Task],
        asking: Asking,
        books: tuple[RunRecords, Tally],
        room: Room | None = None,
    ) -> None:
        """`room` is where the policy wants samples to lie; default: in memory of this process."""
        self._client = client
        self._staleness = staleness
        self._tasks = tasks
        self._asking = asking
        self._records, self._tally = books
        self._stock = Stock(room or PlainRoom())
        self._in_step: Batch | None = None
        self._step_of_version = {0: 0}
        self._num_asked = 0
        self._newest_position = -1
        self._num_barren = 0
        """Groups in a row that gave nothing to train."""

    def ask(self, num_needed: int) -> None:
        """Ask for groups as the bound allows, until `num_needed` are under way to be trained."""
        under_way = self._staleness.num_running + self._staleness.num_ready
        for _ in range(min(self._staleness.capacity, num_needed - under_way)):
            group_id = self._ask_one(self._asking.num_samples)
            self._staleness.step(GroupAsked(group_id))

    def collect(self, timeout_s: float) -> None:
        """Book what has arrived, waiting up to `timeout_s` for the first.

        EnvError where nothing that arrives trains any more.
        """
        for arrival in self._client.take(timeout_s):
            self._book(arrival)

    def take(self, step: int) -> Batch | None:
        """The batch of `step`, or None as long as there is none; ConfigError where it is more than
        the policy's room can hold."""
        batch = None
        for action in self._staleness.step(TakeBatch(step)):
            match action:
                case BatchTaken():
                    batch = Batch(step, self._stock.take(action.group_ids))
                    self._in_step = batch
                case GroupStale():
                    stale = self._stock.give_up(action.group_id)
                    self._drop(stale, f"stale: age {action.age}")
        return batch

    def trained(self, batch: Batch) -> None:
        """Book a batch that its step consumed."""
        self._in_step = None
        for group in batch.groups:
            self._write(group, batch.step)
            for rollout in group.samples:
                self._tally.num_trained += bool(rollout)
                for sample in rollout:
                    self._tally.num_samples += 1
                    self._tally.ages[self.age(sample, batch.step)] += 1
                    self._tally.num_two_versions += spans_versions(sample)

    def publishing(self, policy_version: int, step: int) -> None:
        """`policy_version` holds the weights after `step` steps; some tokens may have it soon."""
        self._step_of_version[policy_version] = step
        if len(self._step_of_version) > self._staleness.settings.max_staleness + SPARE_VERSIONS:
            del self._step_of_version[next(iter(self._step_of_version))]

    def published(self, step: int) -> None:
        """Engines sample with the weights after `step` steps."""
        self._staleness.step(StepPublished(step))

    def age(self, sample: Sample, step: int) -> int:
        """Train steps between the weights of the sample's oldest token and `step`."""
        return step - self._oldest_step([sample])

    def evaluate(self, num_rollouts: int, stop: threading.Event) -> list[float]:
        """Sample `num_rollouts` single rollouts that do not train; their successes."""
        num_left, open_ids = num_rollouts, set[GroupId]()
        successes: list[float] = []
        while (num_left or open_ids) and not stop.is_set():
            num_more = min(num_left, EVAL_WINDOW - len(open_ids))
            open_ids |= {self._ask_one(1, is_eval=True) for _ in range(num_more)}
            num_left -= num_more
            for arrival in self._client.take(timeout_s=1.0):
                if arrival.group_id not in open_ids:
                    self._book(arrival)
                    continue
                open_ids.discard(arrival.group_id)
                if isinstance(arrival, Finished):
                    self._write(cut_group(arrival, self._asking.branches, lay_plainly), None)
                    successes += successes_of(arrival.record)
                else:
                    self._records.drop(arrival.group_id, 1, f"evaluation: {arrival.reason}")
        return successes

    def num_open(self) -> int:
        """Rollouts asked for and neither trained nor dropped."""
        ready = (samples for group in self._held() for samples in group.samples)
        return self._staleness.num_running * self._asking.num_samples + sum(map(bool, ready))

    def oldest_position(self) -> int:
        """Where in the journal the oldest result stands that no step has taken."""
        waiting = (group.position for group in self._stock.waiting())
        return min(waiting, default=self._newest_position + 1)

    def close(self) -> None:
        """The run is over: what is left will not train here."""
        self._stock.clear(self._held())

    def _held(self) -> list[ReadyGroup]:
        return [*self._stock.waiting(), *(self._in_step.groups if self._in_step else ())]

    def _ask_one(self, num_samples: int, is_eval: bool = False) -> GroupId:
        asking, task = self._asking, next(self._tasks)
        seed = random.Random(f"{asking.seed}/{self._num_asked}").getrandbits(63)
        self._num_asked += 1
        if not is_eval:
            self._tally.num_asked += num_samples
        return self._client.ask(
            task,
            env=asking.env,
            num_samples=num_samples,
            sampling=asking.sampling,
            seed=seed,
            is_eval=is_eval,
        )

    def _book(self, arrival: Arrival) -> None:
        match arrival:
            case _ if arrival.group_id.run_id != self._client.run_id:
                self._records.drop(arrival.group_id, 0, "of an earlier run")
            case Dropped():
                self._book_dropped(arrival)
            case Finished():
                self._book_finished(arrival)

    def _book_dropped(self, dropped: Dropped) -> None:
        for rollout in dropped.record.rollouts if dropped.record else ():
            self._tally.outcomes[rollout.outcome] += 1
        num_rollouts = self._asking.num_samples
        self._records.drop(dropped.group_id, num_rollouts, dropped.reason)
        self._tally.num_dropped += num_rollouts
        self._end_barren(dropped.group_id, dropped.reason)

    def _book_finished(self, finished: Finished) -> None:
        self._newest_position = max(self._newest_position, finished.position)
        group, why = self._stock.cut(finished, self._asking.branches), ""
        for rollout, samples in zip(finished.record.rollouts, group.samples, strict=True):
            self._tally.outcomes[rollout.outcome] += 1
            self._tally.add_worker(finished.worker_id)
            if not samples:
                why = f"{rollout.outcome}: {rollout.error or 'nothing in it trains'}"
                self._records.drop(finished.group_id, 1, why, index=rollout.index)
                self._tally.num_dropped += 1
        samples_of_all = group.all_samples()
        if not samples_of_all:
            self._write(group, None)
            self._end_barren(finished.group_id, why)
            return
        foreign = versions_of(samples_of_all) - self._step_of_version.keys()
        if foreign:  # an engine of an earlier run that came back
            self._drop(group, f"foreign: policy version {min(foreign)} is not of this run")
            self._staleness.step(GroupEnded(finished.group_id))
            return
        self._num_barren = 0
        self._stock.keep(group)
        oldest_step = self._oldest_step(samples_of_all)
        self._staleness.step(GroupArrived(finished.group_id, oldest_step))

    def _end_barren(self, group_id: GroupId, why: str) -> None:
        self._staleness.step(GroupEnded(group_id))
        self._num_barren += 1
        if self._num_barren >= BARREN_ROUNDS * self._staleness.settings.max_running:
            raise EnvError(
                f'env = "{self._asking.env}": the last {self._num_barren} groups gave nothing to '
                f"train ({why}); drops.jsonl and the workers' logs in the run folder say more"
            )

    def _oldest_step(self, samples: list[Sample]) -> int:
        return self._step_of_version[min(versions_of(samples))]

    def _drop(self, group: ReadyGroup, reason: str) -> None:
        num_rollouts = sum(1 for rollout in group.samples if rollout)
        self._records.drop(group.group_id, num_rollouts, reason)
        self._tally.num_dropped += num_rollouts
        self._write(group, None)
        self._stock.clear([group])

    def _write(self, group: ReadyGroup, step: int | None) -> None:
        for rollout, samples in zip(group.record.rollouts, group.samples, strict=True):
            self._records.rollout(
                RolloutId(group.group_id, rollout.index),
                group.record,
                rollout,
                samples,
                step=step,
                worker_id=group.worker_id,
            )


def versions_of(samples: list[Sample]) -> set[int]:
    """The policy versions of the trained tokens."""
    return {int(each) for s in samples for each in set(s.policy_versions[s.loss_mask].tolist())}


def spans_versions(sample: Sample) -> bool:
    """Whether more than one policy version sampled its trained tokens."""
    versions = sample.policy_versions[sample.loss_mask]
    return bool(versions.min() != versions.max())


def successes_of(record: GroupRecord) -> list[float]:
    """Per rollout with a reward: the environment's `success` metric, or whether reward > 0."""
    return [
        r.metrics.get("success", float(r.reward > 0))
        for r in record.rollouts
        if r.reward is not None
    ]
