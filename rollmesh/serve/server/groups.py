"""One group: its siblings side by side, the group's score, and the one message they become.

    siblings run --all ended--> scored together --> complete
       +--one failed for good, failed_sibling = drop--> the others are cut short --> incomplete
       +--all failed for good, failed_sibling = score_rest---------------------> incomplete
       +--the ask's deadline is over--> those that still run are cut short ------> incomplete

Invariants: an incomplete group says why and carries what there is; `score_group` sees the scores of
all siblings that have one, only when all siblings are terminal; no sibling goes on whose group is
incomplete already. Failed for good is an infra_error after its retries: an agent's error is an
outcome like others. Driven by worker.py, as one task per group.
"""

import asyncio

import msgspec

from rollmesh.core.ids import RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.envs.env import Env
from rollmesh.serve.server.duties import Begin
from rollmesh.serve.server.rollouts import (
    Played,
    Stage,
    check_score,
    cut_short,
    give_score,
    one_line,
    play,
    score_limit,
)
from rollmesh.serve.server.slots import Slots
from rollmesh.wire.bodies import encode_record
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupAsk

log = get_logger()

FAILURES = (Outcome.AGENT_ERROR, Outcome.INFRA_ERROR)


class Payload(msgspec.Struct, frozen=True):
    """What a GroupFinished carries."""

    complete: bool
    body: bytes
    buffers: tuple[Buffer, Buffer]
    """int32 token ids and float32 log-probs of all rollouts in order."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


async def run_group(stage: Stage, slots: Slots, begin: Begin, ask: GroupAsk) -> Payload:
    """Run all siblings to their outcomes; raises nothing but CancelledError."""
    group = _Group(stage, slots, begin, ask)
    try:
        async with asyncio.timeout(begin.deadline_s or None):
            await group.play_all()
            reason = group.missing() or await _score_group(stage, ask.task, group.played())
    except TimeoutError:
        reason = f"deadline: the ask's {begin.deadline_s:.3g} s are over"
    return _pack(ask, group.played(), reason)


def empty_payload(reason: str) -> Payload:
    """A group that could not be run at all."""
    record = GroupRecord(task=Task(id=""), reason=reason)
    return Payload(complete=False, body=encode_record(record), buffers=(b"", b""))


class _Group:
    """The siblings of one group while they run."""

    def __init__(self, stage: Stage, slots: Slots, begin: Begin, ask: GroupAsk) -> None:
        self._stage = stage
        self._slots = slots
        self._begin = begin
        self._ask = ask
        self._is_strict = stage.settings.failed_sibling == "drop"
        self._tasks: list[asyncio.Task[Played]] = []

    async def play_all(self) -> None:
        """Until every sibling has come to an outcome, or is cut short since one has failed."""
        async with asyncio.TaskGroup() as siblings:
            for index in range(self._begin.num_samples):
                self._tasks.append(siblings.create_task(self._play(index)))

    def played(self) -> list[Played]:
        """All siblings, in order; cut short are those that have not come to an outcome."""
        return [
            task.result() if task.done() and not task.cancelled() else cut_short(index)
            for index, task in enumerate(self._tasks)
        ]

    def missing(self) -> str:
        """Why the group is incomplete; '' if it is not."""
        played = self.played()
        failed = [each.record for each in played if each.record.outcome is Outcome.INFRA_ERROR]
        if not failed or (len(failed) < len(played) and not self._is_strict):
            return ""
        return f"infra_error: {len(failed)} of {len(played)} rollouts: {failed[0].error}"

    async def _play(self, index: int) -> Played:
        async with self._slots:
            rollout_id = RolloutId(self._begin.group_id, index)
            played = await play(self._stage, rollout_id, self._ask)
        record = played.record
        if record.outcome in FAILURES:
            self._slots.note_failure(f"{record.outcome}: {record.error}")
        if record.outcome is Outcome.INFRA_ERROR and self._is_strict:
            self._cut_others_short()
        return played

    def _cut_others_short(self) -> None:
        """Nobody will want what they do: the group is incomplete already."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()


async def _score_group(stage: Stage, task: Task, played: list[Played]) -> str:
    """Let the environment score the siblings together; why that failed, or ''."""
    if type(stage.env).score_group is Env.score_group:
        return ""
    scored = [each for each in played if each.score is not None]
    scores = [each.score for each in scored if each.score is not None]
    try:
        limit = score_limit(stage.settings)
        found = await stage.calls.call(limit, stage.env.score_group, task, scores)
        if len(found) != len(scored):
            raise ValueError(f"score_group gave {len(found)} scores for {len(scored)}")
        for each, score in zip(scored, map(check_score, found), strict=True):
            give_score(each.record, score)
    except Exception as error:  # door: env code may raise anything
        log.exception("score_group.failed", task_id=task.id)
        return f"infra_error: score_group: {one_line(error)}"
    return ""


def _pack(ask: GroupAsk, played: list[Played], reason: str) -> Payload:
    record = GroupRecord(
        task=ask.task,
        rollouts=[each.record for each in played],
        reason=reason,
        is_eval=ask.is_eval,
    )
    return Payload(
        complete=not reason,
        body=encode_record(record),
        buffers=(
            b"".join(each.session.token_ids for each in played if each.session),
            b"".join(each.session.logprobs for each in played if each.session),
        ),
    )
