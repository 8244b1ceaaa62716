"""One group: its siblings side by side, the group's score, and the one message they become.

Invariants: a group is complete if every sibling came to an outcome that is not the infrastructure's
fault; an incomplete one says why and carries what there is; `score_group` sees the scores of all
siblings that have one, only when all siblings are terminal and none is missing. Driven by
worker.py, as one task per group.
"""

import asyncio

import msgspec

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.envs.env import Env
from rollmesh.serve.server.calls import call_env
from rollmesh.serve.server.rollouts import (
    Played,
    Stage,
    check_score,
    give_score,
    one_line,
    play,
)
from rollmesh.serve.server.slots import Slots
from rollmesh.wire.bodies import encode_record
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupAsk

log = get_logger()


class Payload(msgspec.Struct, frozen=True):
    """What a GroupFinished carries."""

    complete: bool
    body: bytes
    buffers: tuple[Buffer, Buffer]
    """int32 token ids and float32 log-probs of all rollouts in order."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(len(buffer) for buffer in self.buffers)


async def run_group(
    stage: Stage, slots: Slots, group_id: GroupId, num_samples: int, ask: GroupAsk
) -> Payload:
    """Run all siblings to their outcomes; raises nothing but CancelledError."""

    async def sibling(index: int) -> Played:
        async with slots:
            return await play(stage, RolloutId(group_id, index), ask)

    async with asyncio.TaskGroup() as siblings:
        tasks = [siblings.create_task(sibling(index)) for index in range(num_samples)]
    played = [task.result() for task in tasks]
    reason = _missing(played) or await _score_group(stage, ask.task, played)
    return _pack(ask, played, reason)


def empty_payload(reason: str) -> Payload:
    """A group that could not be run at all."""
    record = GroupRecord(task=Task(id=""), reason=reason)
    return Payload(complete=False, body=encode_record(record), buffers=(b"", b""))


def _missing(played: list[Played]) -> str:
    """Why the group is incomplete; '' if it is not."""
    failed = [p.record for p in played if p.record.outcome is Outcome.INFRA_ERROR]
    if not failed:
        return ""
    return f"infra_error: {len(failed)} of {len(played)} rollouts: {failed[0].error}"


async def _score_group(stage: Stage, task: Task, played: list[Played]) -> str:
    """Let the environment score the siblings together; why that failed, or ''."""
    if type(stage.env).score_group is Env.score_group:
        return ""
    scored = [each for each in played if each.score is not None]
    scores = [each.score for each in scored if each.score is not None]
    timeout_s = stage.settings.score_timeout_s
    try:
        found = await call_env(timeout_s, stage.env.score_group, task, scores)
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
            b"".join(each.session.token_ids for each in played),
            b"".join(each.session.logprobs for each in played),
        ),
    )
