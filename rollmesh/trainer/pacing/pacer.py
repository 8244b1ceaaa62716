"""Between the client and the train step: asks for groups, books what arrives, hands out batches.

The shell of course.py, which says what becomes of each group: this has the samples. Invariants:
what leaves is booked at once, and once; of what is not trained no samples stay in the policy's
room, and the journal is told that nobody needs it again. Driven by the train loop, on its thread.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.arrivals import Arrival, Dropped, Finished, StoredResult, booked_of
from rollmesh.serve.client.journal_entries import GroupBooked, GroupParted, StepTaken
from rollmesh.serve.client.samples import Sample, lay_plainly
from rollmesh.trainer.books.records import RunRecords, Tally
from rollmesh.trainer.pacing.accounting import FirstFailures, GroupAccounting
from rollmesh.trainer.pacing.lifecycle import (
    UNKNOWN,
    Action,
    DropReplayed,
    GroupLeft,
    GroupLifecycle,
    GroupOutcome,
    ResultArrived,
    ResultMissing,
    RetakeStep,
    StepTrained,
    TakeStep,
    TrainGroups,
    VersionCreated,
    VersionPublished,
)
from rollmesh.trainer.pacing.ready_queue import (
    LocalAllocator,
    ReadyGroup,
    ReadyQueue,
    SampleAllocator,
    cut_group,
)
from rollmesh.trainer.pacing.requester import GroupRequester, GroupSource, RequestSettings
from rollmesh.trainer.pacing.versions import versions_of
from rollmesh.trainer.recovery.plan import Recovery
from rollmesh.trainer.staleness import StalenessManager, StalenessState

BARREN_ROUNDS = 4
"""So many times max_running groups in a row that give nothing to train end the run: an environment
that always fails would be asked for ever, and an engine may be away for a while."""
EVAL_WINDOW = 4096
"""Rollouts of an evaluation that are asked for at the same time: a client's asks are bounded."""


class Batch(msgspec.Struct):
    """What one step trains."""

    step: int
    groups: list[ReadyGroup]
    oldest_step: int = 0
    """Tokens of weights before this step are masked."""

    def group_ids(self) -> list[GroupId]:
        return [group.group_id for group in self.groups]

    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.all_samples()]


class Pacer:
    """Asks within the bound; `collect` and `take` are called in turn until a batch is there."""

    def __init__(
        self,
        client: GroupSource,
        staleness: StalenessManager,
        tasks: Iterator[Task],
        asking: RequestSettings,
        books: tuple[RunRecords, Tally],
        allocator: SampleAllocator | None = None,
    ) -> None:
        """`allocator` allocates samples where the policy wants them (default: in this process)."""
        self._client = client
        self._staleness = staleness
        self._asking = asking
        self.lifecycle = GroupLifecycle(staleness, asking.num_samples)
        """Who is where, and who has left."""
        self._tally = books[1]
        self._exits = GroupAccounting(books, asking.env, self.lifecycle.versions)
        self.asker = GroupRequester(client, tasks, asking, books[1], self.lifecycle)
        """What was asked for."""
        self._stock = ReadyQueue(allocator or LocalAllocator())
        self._first_failures = FirstFailures(asking.env)
        self._in_step: Batch | None = None
        self._step = 0
        """The next one, whose batch is wanted."""

    def go_on(self, recovery: Recovery) -> None:
        """Before anything else: with what earlier lives of this run left."""
        self.asker.go_on(recovery)
        self._first_failures.has_succeeded = self._tally.num_trained > 0
        for leave, booked in zip(self.lifecycle.go_on(recovery), recovery.drops, strict=True):
            self._book_failed(leave, booked)
        for entry in recovery.parted:
            self._book_parted(entry, self._client.open(recovery.results[entry.group_id]))

    def ask(self, num_needed: int) -> None:
        """Ask for groups as the bound allows, until `num_needed` are under way to be trained."""
        while self.lifecycle.may_ask(num_needed):
            self.asker.ask(self._staleness.published_step)

    def collect(self, timeout_s: float) -> None:
        """Book what has arrived, waiting up to `timeout_s` for the first.

        EnvError where nothing that arrives trains any more.
        """
        for arrival in self._client.take(timeout_s):
            self._book(arrival)

    def take(self, step: int) -> Batch | None:
        """The batch of `step`, or None as long as there is none; ConfigError where it is more than
        the policy's room can hold."""
        self._step = step
        return self._carry_out(self.lifecycle.step(TakeStep(step)))

    def retake(self, again: StepTaken, results: Mapping[GroupId, StoredResult]) -> Batch | None:
        """The batch of a step that an earlier life took, of the same groups; None where none of
        them can be read any more."""
        self._step = again.step
        for group_id in again.group_ids:
            self._book(self._client.open(results[group_id]))
        return self._carry_out(self.lifecycle.step(RetakeStep(again)))

    def trained(self, batch: Batch) -> None:
        """Book a batch that its step consumed."""
        self._in_step = None
        self.lifecycle.step(StepTrained())
        for group in batch.groups:
            self._exits.trained(group, batch.step)

    def publishing(self, policy_version: int, step: int) -> None:
        """`policy_version` holds the weights after `step` steps; some tokens may have it soon."""
        self.lifecycle.step(VersionCreated(policy_version, step))

    def published(self, step: int) -> None:
        """Engines sample with the weights after `step` steps."""
        self.lifecycle.step(VersionPublished(step))

    @property
    def pacing(self) -> StalenessState:
        """How much is under way now, and how old it is."""
        return self._staleness.state

    def measure(self, num_rollouts: int) -> bool:
        """Ask for single rollouts that do not train until there are `num_rollouts`, those that
        earlier lives asked for among them; whether all have ended."""
        # Not what was asked for less what was measured: a savepoint that broke may have taken some.
        num_out = self.lifecycle.num_measuring
        num_left = num_rollouts - self._tally.num_evals
        for _ in range(min(num_left, EVAL_WINDOW - num_out)):
            self.asker.evaluate(self._staleness.published_step)
        return num_out <= 0 and num_left <= 0

    def num_to_come(self, num_needed: int) -> int:
        """Rollouts that run, or may be asked for now where the run takes `num_needed` groups more;
        and at least those that the next batch lacks, for which there may be no room yet."""
        staleness, ready, running = self._staleness, self._staleness.ready, self._staleness.running
        most = num_needed * self._asking.num_samples - ready
        num_lacking = staleness.settings.batch - ready
        return max(running, min(most, max(num_lacking, running + staleness.capacity)))

    def cancel_open(self, reason: str) -> None:
        """Nobody will want what is asked for and has not ended."""
        for group_id in [*self.lifecycle.open_ids]:
            self._client.cancel(group_id, reason)

    def num_open(self) -> int:
        """Rollouts asked for and neither trained nor dropped."""
        return self._staleness.running + sum(map(num_undecided, self._held()))

    def close(self) -> None:
        """The run is over: what is left will not train here."""
        self._stock.clear(self._held())

    def _held(self) -> list[ReadyGroup]:
        return [*self._stock.waiting(), *(self._in_step.groups if self._in_step else ())]

    def _carry_out(self, actions: Sequence[Action]) -> Batch | None:
        batch = None
        for action in actions:
            match action:
                case GroupLeft():
                    self._part(self._stock.give_up(action.group_id), action)
                case TrainGroups():
                    batch = self._batch(action)
        return batch

    def _batch(self, train: TrainGroups) -> Batch:
        step, group_ids = train.taken.step, train.taken.group_ids
        if train.stale:
            for group_id in group_ids:
                self._exits.masked(self._stock.mask(group_id, train.stale), step)
        self._in_step = Batch(step, self._stock.take(group_ids), train.taken.oldest_step)
        return self._in_step

    def _book(self, arrival: Arrival) -> None:
        if arrival.record is not None and self.lifecycle.turn(arrival.group_id) is not None:
            self._first_failures.note(arrival.record)
        self._book_arrival(arrival)
        self._first_failures.check()

    def _book_arrival(self, arrival: Arrival) -> None:
        if isinstance(arrival, Dropped):
            [action] = self.lifecycle.step(ResultMissing(arrival.group_id, arrival.reason))
            assert isinstance(action, GroupLeft)
            self._book_failed(action, booked_of(arrival, self._step, action.turn.task.id))
            self._look_for_life(arrival.reason)
        else:
            self._book_finished(arrival)

    def _book_failed(self, leave: GroupLeft, booked: GroupBooked) -> None:
        match leave.fate:
            case GroupOutcome.STRANGE:
                self._exits.strange(booked.group_id)
            case GroupOutcome.UNMEASURED | GroupOutcome.MEASURED:
                self._exits.unmeasured(booked.group_id, booked.task_id, booked.reason)
            case _:
                self._exits.ended(booked, self._asking.num_samples)

    def _book_parted(self, entry: GroupParted, arrival: Arrival) -> None:
        """What an earlier life has dropped: as it did, and no result of it is kept."""
        if isinstance(arrival, Dropped):  # it can be read no more
            task, group, num_rollouts = UNKNOWN, None, 0
        else:
            task, group = (
                arrival.record.task,
                cut_group(arrival, self._asking.branches, lay_plainly),
            )
            num_rollouts = sum(map(bool, group.samples))
        [leave] = self.lifecycle.step(DropReplayed(entry, task, num_rollouts))
        assert isinstance(leave, GroupLeft)
        if group:
            self._see_off(group, leave, entry.step)
        else:
            self._book_failed(leave, GroupBooked(entry.group_id, entry.reason, entry.step))

    def _book_finished(self, finished: Finished) -> None:
        turn, record = self.lifecycle.turn(finished.group_id), finished.record
        if turn is None:
            self._exits.strange(finished.group_id)
            return
        is_eval = turn.is_eval or record.is_eval
        group = (
            cut_group(finished, self._asking.branches, lay_plainly)
            if is_eval
            else self._stock.cut(finished, self._asking.branches)
        )
        versions = tuple(versions_of(samples) for samples in group.samples if samples)
        came = ResultArrived(finished.group_id, record.task, versions, is_eval)
        [action] = self.lifecycle.step(came)
        if isinstance(action, GroupLeft):
            self._part(group, action)
        else:
            self._stock.keep(group)

    def _part(self, group: ReadyGroup, leave: GroupLeft) -> None:
        """With one that came, and does not train."""
        why = leave.why or leave.fate
        self._client.done_with([group.group_id], why, self._step, leave.times)
        why = self._see_off(group, leave, self._step)
        self._stock.clear([group])
        if leave.fate is GroupOutcome.BARREN:
            self._look_for_life(why)

    def _see_off(self, group: ReadyGroup, leave: GroupLeft, step: int) -> str:
        """Book it before `step`; why it does not train."""
        match leave.fate:
            case GroupOutcome.MEASURED:
                self._exits.measured(group)
            case GroupOutcome.BARREN:
                return self._exits.barren(group, step)
            case _:
                self._exits.dropped(group, step, leave.why)
        return leave.why

    def _look_for_life(self, why: str) -> None:
        """Raise EnvError if too many groups in a row gave nothing to train."""
        self._first_failures.check()
        num_barren = self.lifecycle.num_barren
        num_groups = self._staleness.settings.max_concurrent // self._asking.num_samples
        if num_barren >= BARREN_ROUNDS * num_groups:
            raise EnvError(
                f'env = "{self._asking.env}": the last {num_barren} groups gave nothing to '
                f"train ({why}); drops.jsonl and the workers' logs in the run folder say more"
            )


def num_undecided(group: ReadyGroup) -> int:
    """Rollouts of it that are in no book yet: those that masking has emptied are."""
    rows = group.pairs()
    return sum(1 for each, samples in rows if samples or each.index not in group.num_masked)
