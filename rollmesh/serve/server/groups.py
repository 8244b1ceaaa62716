"""One group: its siblings side by side, the group's score, and the one message they become.

    siblings run --all ended--> scored together --> complete
       +--one failed for good, failed_sibling = drop--> the others are cut short --> incomplete
       +--all failed for good, failed_sibling = score_rest---------------------> incomplete
       +--the ask's deadline is over--> those that still run are cut short ------> incomplete

Invariants: an incomplete group says why and carries what there is; the siblings that have a score
are scored together only when all are terminal, and what they hold is read only behind that, since
child tasks may add to it; no sibling goes on whose group is incomplete already; when the group is
packed, or has failed or been cancelled, the scopes of its rollouts end. Failed for good is an
infra_error after its retries: an agent's error is an outcome like others. Driven by worker.py, as
one task per group.
"""

import asyncio

import msgspec

from rollmesh.core.ids import RolloutId
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.serve.server.duties import Begin
from rollmesh.serve.server.rollouts import (
    NO_FAULT,
    Fault,
    Played,
    Stage,
    cut_short,
    fill,
    play,
)
from rollmesh.serve.server.scoring import score_together
from rollmesh.serve.server.slots import Slots
from rollmesh.wire.bodies import encode_record
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupAsk

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
        return group.pack(await group.run())
    finally:
        group.forget()
        stage.runtime.cleanup_group(begin.group_id)


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

    async def run(self) -> Fault:
        """Play and score; why the group is incomplete, or NO_FAULT."""
        deadline_s = self._begin.deadline_s
        try:
            async with asyncio.timeout(deadline_s or None):
                await self._play_all()
                missing = self._missing()
                return missing if missing.text else await self._score()
        except TimeoutError:
            return Fault(f"deadline: the ask's {deadline_s:.3g} s are over", None)

    async def _play_all(self) -> None:
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

    def _missing(self) -> Fault:
        """Why the group is incomplete; NO_FAULT if it is not."""
        played = self.played()
        failed = [each.record for each in played if each.record.outcome is Outcome.INFRA_ERROR]
        if not failed or (len(failed) < len(played) and not self._is_strict):
            return NO_FAULT
        num_failed = f"{len(failed)} of {len(played)} rollouts"
        return Fault(f"infra_error: {num_failed}: {failed[0].error}", failed[0].place)

    async def _score(self) -> Fault:
        """Let the environment score the siblings together; NO_FAULT if that worked."""
        return await score_together(
            self._stage, self._begin.group_id, self._ask.task, self.played()
        )

    def pack(self, fault: Fault) -> Payload:
        """All that the siblings left."""
        ask, played = self._ask, self.played()
        token_ids: list[Buffer] = []
        logprobs: list[Buffer] = []
        for each in played:
            if each.is_cut_short:
                continue
            rollout_id = RolloutId(self._begin.group_id, each.record.index)
            self._stage.runtime.call_in(rollout_id)
            session = self._stage.runtime.resolve_trajectory(rollout_id).record()
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
        return Payload(
            complete=not fault.text,
            body=encode_record(record),
            buffers=(b"".join(token_ids), b"".join(logprobs)),
        )

    def forget(self) -> None:
        """A task that was cancelled refers to its frames, and they to us: it would wait for the
        collector with all that they hold."""
        self._tasks.clear()

    async def _play(self, index: int) -> Played:
        async with self._slots:
            rollout_id = RolloutId(self._begin.group_id, index)
            played = await play(self._stage, rollout_id, self._ask)
        record = played.record
        if record.outcome in FAILURES:
            error = f"{record.outcome}: {record.error}"
            self._slots.note_failure(error, record.place, self._ask.task.id)
        if record.outcome is Outcome.INFRA_ERROR and self._is_strict:
            self._cut_others_short()
        return played

    def _cut_others_short(self) -> None:
        """Nobody will want what they do: the group is incomplete already."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
