"""A group: its rollouts side by side, its score, and the one message with the result.

    rollouts run --all ended--> scored together --> complete
       +--one failed for good, failed_sibling = drop--> the others are cancelled --> incomplete
       +--all failed for good, failed_sibling = score_rest---------------------> incomplete
       +--the deadline is over--> running rollouts are cancelled -------------> incomplete

- Failed for good is an infra_error after its retries; an agent's error is an outcome. An incomplete
  group has a reason and the results that there are.
- Rollouts with a score are scored together when all have ended. While the environment scores, it
  may borrow their transcripts; every loan is back when it is done, and its keys answer 410
  afterwards. A score is recorded only if all are valid.
- At most `max_rollouts` rollouts hold a slot; others wait in order of arrival.
- The scopes of the rollouts end when the group is packed, has failed or was cancelled.
"""

import asyncio
from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, Score, Task
from rollmesh.envs.env import Endpoint, Env, Sibling
from rollmesh.serve.server.rollouts import (
    NO_FAULT,
    EnvFault,
    RolloutResult,
    WorkerContext,
    check_score,
    cut_short,
    fault_of,
    fill,
    give_score,
    play,
    score_limit,
)
from rollmesh.serve.server.worker_machine import Begin
from rollmesh.wire.frames import Buffer, encode_record
from rollmesh.wire.messages import GroupAsk


class Slots:
    """An `async with` per rollout."""

    def __init__(self, max_rollouts: int) -> None:
        self._free = asyncio.Semaphore(max_rollouts)
        self.num_open = 0
        """Rollouts that run or wait for a slot."""
        self.num_finished = 0
        """Rollouts that have ended since the start, cancelled ones not counted."""
        self.num_failed = 0
        """Rollouts of these that ended in an error."""
        self.last_error = ""
        self.last_place: ErrorPlace | None = None
        """Where in environment code `last_error` came from."""
        self.last_task_id = ""
        """The task whose rollout ended in `last_error`."""

    async def __aenter__(self) -> None:
        self.num_open += 1
        with ExitStack() as undo:
            undo.callback(self._close)
            await self._free.acquire()
            undo.pop_all()

    def _close(self) -> None:
        self.num_open -= 1

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free.release()
        self.num_open -= 1
        self.num_finished += kind is None

    def note_failure(self, error: str, place: ErrorPlace | None, task_id: str) -> None:
        """Count a rollout that ended in an error."""
        self.num_failed += 1
        self.last_error, self.last_place, self.last_task_id = error, place, task_id


log = get_logger()


async def score_together(
    context: WorkerContext, group_id: GroupId, task: Task, played: Sequence[RolloutResult]
) -> EnvFault:
    """Let the environment score the siblings that have a score; return NO_FAULT if that worked."""
    env = type(context.env)
    has_children = env.score_siblings is not Env.score_siblings
    scored = [each for each in played if each.score is not None]
    method = "score_siblings" if has_children else "score_group"
    name = f"{env.__name__}.{method}"
    try:
        if has_children:
            found = await _with_children(context, group_id, task, scored)
        elif env.score_group is not Env.score_group:
            scores = [each.score for each in scored if each.score is not None]
            limit = score_limit(context.settings)
            found = await context.calls.call(limit, context.env.score_group, task, scores)
        else:
            return NO_FAULT
        for each, score in zip(scored, _checked(found, len(scored), name), strict=True):
            give_score(each.record, score)
    except Exception as error:  # door: env code may raise anything
        log.exception(f"{method}.failed", task_id=task.id)
        fault = fault_of(error, getattr(context.env, method))
        return fault._replace(text=f"infra_error: {method}: {fault.text}")
    return NO_FAULT


def _checked(found: Any, num: int, name: str) -> list[Score]:
    """Return the scores that the method `name` returned for `num` siblings; EnvError for anything
    else.
    """
    num_found = len(found) if isinstance(found, Sized) else "no"
    if num_found != num:
        raise EnvError(f"{name} returned {num_found} scores for {num} siblings")
    return [check_score(each, name) for each in found]


async def _with_children(
    context: WorkerContext, group_id: GroupId, task: Task, scored: Sequence[RolloutResult]
) -> list[Score]:
    with ExitStack() as loans:
        siblings = list(_siblings(context, group_id, scored, loans))
        # The time includes that of the children: keys that they use expire with it.
        limit = score_limit(context.settings, loans.close)
        return await context.calls.call(limit, context.env.score_siblings, task, siblings)


def _siblings(
    context: WorkerContext, group_id: GroupId, scored: Sequence[RolloutResult], loans: ExitStack
) -> Iterator[Sibling]:
    for each in scored:
        assert each.score is not None
        assert each.transcript is not None
        rollout_id = RolloutId(group_id, each.record.index)

        def borrowed(*, appends: bool, rollout_id: RolloutId = rollout_id) -> Endpoint:
            loan = context.runtime.lend(rollout_id, "score_siblings", appends=appends)
            loans.enter_context(loan)
            return context.endpoint(loan.api_key)

        yield Sibling(
            index=each.record.index,
            score=each.score,
            transcript=each.transcript,
            line=borrowed(appends=True),
            model=borrowed(appends=False),
        )


FAILURES = (Outcome.AGENT_ERROR, Outcome.INFRA_ERROR)


class GroupPayload(msgspec.Struct, frozen=True):
    """The result that a GroupFinished carries."""

    complete: bool
    body: bytes
    buffers: tuple[Buffer, Buffer]
    """int32 token ids and float32 log-probs of all rollouts in order."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


async def run_group(
    context: WorkerContext, slots: Slots, begin: Begin, ask: GroupAsk
) -> GroupPayload:
    """Run all siblings to their outcomes; raises nothing but CancelledError."""
    group = _Group(context, slots, begin, ask)
    try:
        return group.pack(await group.run())
    finally:
        group.forget()
        context.runtime.cleanup_group(begin.group_id)


def empty_payload(reason: str) -> GroupPayload:
    """Return the result of a group that could not be run."""
    record = GroupRecord(task=Task(id=""), reason=reason)
    return GroupPayload(complete=False, body=encode_record(record), buffers=(b"", b""))


class _Group:
    """The siblings of one group while they run."""

    def __init__(self, context: WorkerContext, slots: Slots, begin: Begin, ask: GroupAsk) -> None:
        self._context = context
        self._slots = slots
        self._begin = begin
        self._ask = ask
        self._is_strict = context.settings.failed_sibling == "drop"
        self._tasks: list[asyncio.Task[RolloutResult]] = []

    async def run(self) -> EnvFault:
        """Play and score; return why the group is incomplete, or NO_FAULT."""
        deadline_s = self._begin.deadline_s
        try:
            async with asyncio.timeout(deadline_s or None):
                await self._play_all()
                missing = self._missing()
                return missing if missing.text else await self._score()
        except TimeoutError:
            return EnvFault(f"deadline: the ask's {deadline_s:.3g} s are over", None)

    async def _play_all(self) -> None:
        """Wait until every sibling has an outcome, or is cut short because one has failed."""
        async with asyncio.TaskGroup() as siblings:
            for index in range(self._begin.num_samples):
                self._tasks.append(siblings.create_task(self._play(index)))

    def played(self) -> list[RolloutResult]:
        """Return all siblings in order; those without an outcome were cut short."""
        return [
            task.result() if task.done() and not task.cancelled() else cut_short(index)
            for index, task in enumerate(self._tasks)
        ]

    def _missing(self) -> EnvFault:
        """Return why the group is incomplete; NO_FAULT if it is not."""
        played = self.played()
        failed = [each.record for each in played if each.record.outcome is Outcome.INFRA_ERROR]
        if not failed or (len(failed) < len(played) and not self._is_strict):
            return NO_FAULT
        num_failed = f"{len(failed)} of {len(played)} rollouts"
        return EnvFault(f"infra_error: {num_failed}: {failed[0].error}", failed[0].place)

    async def _score(self) -> EnvFault:
        """Let the environment score the siblings together; return NO_FAULT if that worked."""
        return await score_together(
            self._context, self._begin.group_id, self._ask.task, self.played()
        )

    def pack(self, fault: EnvFault) -> GroupPayload:
        """Return the record and the buffers of all siblings."""
        ask, played = self._ask, self.played()
        token_ids: list[Buffer] = []
        logprobs: list[Buffer] = []
        for each in played:
            if each.is_cut_short:
                continue
            rollout_id = RolloutId(self._begin.group_id, each.record.index)
            self._context.runtime.recall(rollout_id)
            session = self._context.runtime.resolve_trajectory(rollout_id).record()
            fill(each.record, session)
            token_ids.append(session.token_ids)
            logprobs.append(session.logprobs)
        record = GroupRecord(
            task=ask.task,
            rollouts=[each.record for each in played],
            reason=fault.text,
            is_eval=ask.is_eval,
            place=fault.place,
        )
        return GroupPayload(
            complete=not fault.text,
            body=encode_record(record),
            buffers=(b"".join(token_ids), b"".join(logprobs)),
        )

    def forget(self) -> None:
        """Break the cycle of a cancelled task with its frames, which would keep its memory until
        the next collection.
        """
        self._tasks.clear()

    async def _play(self, index: int) -> RolloutResult:
        async with self._slots:
            rollout_id = RolloutId(self._begin.group_id, index)
            played = await play(self._context, rollout_id, self._ask)
        record = played.record
        if record.outcome in FAILURES:
            error = f"{record.outcome}: {record.error}"
            self._slots.note_failure(error, record.place, self._ask.task.id)
        if record.outcome is Outcome.INFRA_ERROR and self._is_strict:
            self._cut_others_short()
        return played

    def _cut_others_short(self) -> None:
        """Cancel the siblings: the group is incomplete already."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
