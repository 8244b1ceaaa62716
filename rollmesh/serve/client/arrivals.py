"""Results that arrive: checked, kept once, and returned as Finished or Dropped.

    open --GroupFinished--> Keep: decode, check and write it --Kept----> ended, acked
       |                                     +---------------Malformed-> open, refused
       |                                     +---------------nothing---> open (sent again)
       +------AskEnded-------------------------------------------------> ended, recorded as a drop

- A result needs the ticket of its group, which only the worker that runs the group has. It is
  compared with its ask in all that a trainer relies on.
- A group ends once, whatever the number of attempts and copies. Ended groups are remembered as
  intervals, so that late copies are acked as duplicates.
- Nothing is acked that was not written. A refused result is not acked: its worker drops it and
  reports the attempt as lost.
- `open_result` never raises: a damaged record of the journal is a drop with that reason.
"""

import hmac
import math
from collections.abc import Callable

import msgspec
import numpy as np

from rollmesh.core.errors import WireError
from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.core.types import ErrorPlace, GroupRecord, RolloutRecord
from rollmesh.serve.client.asks import Asked, AskEnded
from rollmesh.serve.client.journal_entries import GroupBooked, SeenRollout
from rollmesh.serve.client.samples import Float32s, Int32s, check_counts
from rollmesh.wire.frames import Buffer, Packet, decode_record
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import GroupAcked, GroupFinished, ResultRefused

MAX_ROLLOUT_BYTES = 256 * 2**20
"""Limit on the bytes of a result, for each rollout that was asked for."""


class RawResult(msgspec.Struct, frozen=True):
    """A result as received, stored in the journal at `position`."""

    group_id: GroupId
    attempt: int
    worker_id: str
    complete: bool
    body: Buffer
    buffers: tuple[Buffer, ...]
    position: int
    record: GroupRecord | None = None
    """The decoded body, if it has been checked already."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + sum(map(len, self.buffers))

    @property
    def held_bytes(self) -> int:
        """Approximate memory: the decoded body is held beside the bytes."""
        return self.num_bytes + (len(self.body) if self.record else 0)

    def filed(self) -> "StoredResult | RawResult":
        """Return its place in the journal, or itself if the journal has only a part."""
        if not self.complete:
            return self
        return StoredResult(
            self.group_id, self.attempt, self.worker_id, self.position, self.num_bytes
        )


class StoredResult(msgspec.Struct, frozen=True):
    """A complete result that is in the journal and not in memory."""

    group_id: GroupId
    attempt: int
    worker_id: str
    position: int
    num_bytes: int


class Finished(msgspec.Struct, frozen=True):
    """A group whose rollouts have all ended."""

    group_id: GroupId
    attempt: int
    worker_id: str
    record: GroupRecord
    token_ids: Int32s
    """[all tokens of all rollouts], in the order of the record."""
    logprobs: Float32s
    """[all sampled tokens of all rollouts]."""
    position: int
    """Its place in the journal."""


class Dropped(msgspec.Struct, frozen=True):
    """A group that ended and does not train."""

    group_id: GroupId
    reason: str
    """Begins with a code; see wire/messages.py."""
    record: GroupRecord | None = None
    """The known part of an incomplete group."""
    retry_after_s: float = 0.0
    """For `overloaded`: seconds until a new request is useful."""


Arrival = Finished | Dropped
Unopened = RawResult | StoredResult | Dropped
"""The form in which the intake hands an arrival over."""


def without_tokens(group_id: GroupId, record: GroupRecord) -> Finished:
    """A group that ran outside a mesh, where no tokens were recorded."""
    return Finished(
        group_id=group_id,
        attempt=1,
        worker_id="",
        record=record,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        position=0,
    )


def check_result(asked: Asked, message: GroupFinished, packet: Packet) -> GroupRecord:
    """Decode the result of `asked`; raise a one-line WireError if a trainer could not use it.

    Its rollouts must be those that were asked for, its counts must add up to its buffers, and its
    arrays may hold only token ids and finite numbers. For an incomplete result only the rollouts
    are checked.
    """
    num_bytes = len(packet.body) + sum(map(len, packet.buffers))
    if num_bytes > asked.num_samples * MAX_ROLLOUT_BYTES:
        raise WireError(f"{num_bytes} bytes for {asked.num_samples} rollouts")
    record = decode_record(packet.body)
    indices = {rollout.index for rollout in record.rollouts}
    if len(indices) < len(record.rollouts):
        raise WireError("two of its rollouts have the same index")
    if not indices <= set(range(asked.num_samples)):
        raise WireError(f"its rollouts have other indices than 0 to {asked.num_samples - 1}")
    if not message.complete:
        return record
    if len(indices) != asked.num_samples:
        raise WireError(f"{len(indices)} rollouts where {asked.num_samples} were asked for")
    if record.is_eval and not asked.is_eval:
        raise WireError("it is marked as an evaluation, and the ask is none")
    token_ids, logprobs = _arrays(packet.buffers)
    check_counts(record, len(token_ids), len(logprobs))
    if len(token_ids) and token_ids.min() < 0:
        raise WireError("one of its token ids is negative")
    if math.isnan(np.dot(logprobs, logprobs)):  # without an array of its own
        raise WireError("one of its log-probs is not a number")
    return record


def open_result(raw: RawResult) -> Arrival:
    """Decode a result; return a Dropped with its reason if it is incomplete or malformed."""
    try:
        record = raw.record or decode_record(raw.body)
        if not raw.complete:
            return Dropped(raw.group_id, record.reason or "infra_error: incomplete", record)
        token_ids, logprobs = _arrays(raw.buffers)
        if raw.record is None:
            check_counts(record, len(token_ids), len(logprobs))
    except WireError as error:
        return Dropped(raw.group_id, f"malformed: {error}")
    return Finished(
        group_id=raw.group_id,
        attempt=raw.attempt,
        worker_id=raw.worker_id,
        record=record,
        token_ids=token_ids,
        logprobs=logprobs,
        position=raw.position,
    )


def booked_of(dropped: Dropped, step: int, task_id: str = "") -> GroupBooked:
    """Return its journal entry if it is dropped before `step`; `task_id` is used if the result
    names no task.
    """
    record = dropped.record
    rollouts = record.rollouts if record else []
    # No rollout failed, so the environment failed to score the group.
    place = record.place if record and not any(each.place for each in rollouts) else None
    seen = tuple(seen_of(each, place) for each in rollouts)
    return GroupBooked(
        dropped.group_id, dropped.reason, step, record.task.id if record else task_id, seen
    )


def seen_of(rollout: RolloutRecord, place: ErrorPlace | None = None) -> SeenRollout:
    """Return the part of a rollout's record that the drop log keeps; `place` is used if it has no
    index.
    """
    runs = (run for node in rollout.nodes for run in node.policy_versions)
    versions = tuple(sorted({run.policy_version for run in runs}))
    return SeenRollout(
        rollout.index,
        rollout.outcome,
        rollout.num_logprobs,
        versions,
        rollout.error,
        rollout.place or place,
    )


def _arrays(buffers: tuple[Buffer, ...]) -> tuple[Int32s, Float32s]:
    if len(buffers) != 2:
        raise WireError(f"{len(buffers)} buffers where token ids and log-probs belong")
    try:
        return np.frombuffer(buffers[0], np.int32), np.frombuffer(buffers[1], np.float32)
    except ValueError as error:
        raise WireError(str(error)) from None


NOT_ASKED = "its group is not an open ask of this client"
NO_TICKET = "it does not carry the ticket of its group"


class ResultKept(msgspec.Struct, frozen=True):
    """Event: the result that `Keep` named is safe."""

    keep: "Keep"


class Malformed(msgspec.Struct, frozen=True):
    """Event: the result that `Keep` named does not fit its ask."""

    keep: "Keep"
    reason: str


class Keep(msgspec.Struct, frozen=True):
    """Action: check this result against its ask, write it, and step Kept or Malformed.

    Without either step the result counts as not received.
    """

    route: bytes
    message: GroupFinished
    body: Buffer
    asked: Asked


class RecordDrop(msgspec.Struct, frozen=True):
    """Action: the group ended without a result; journal that and hand it out."""

    group_id: GroupId
    reason: str
    retry_after_s: float = 0.0


Event = Received | ResultKept | Malformed | AskEnded
Action = Send | Keep | RecordDrop


class ResultSink:
    """The ended groups of each run; `runs` restores what the journal remembers."""

    def __init__(
        self, runs: dict[str, IntervalSet], find: Callable[[GroupId], Asked | None]
    ) -> None:
        """`find` returns the open ask of a group, if there is one."""
        self.ended = runs
        self._find = find
        self.num_duplicates = 0
        self.num_refused = 0

    def has_ended(self, group_id: GroupId) -> bool:
        """Return whether the group's result was kept or its drop recorded."""
        return group_id.seq in self.ended.get(group_id.run_id, ())

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions for `event`; total and deterministic."""
        del now_s
        match event:
            case Received(route, GroupFinished() as message, body):
                return self._arrived(route, message, body)
            case Received():
                return []
            case ResultKept(keep):
                ended = self.ended[keep.message.group_id.run_id]
                is_first = ended.add(keep.message.group_id.seq)
                return [_ack(keep.route, keep.message, duplicate=not is_first)]
            case Malformed(keep, reason):
                return [self._refuse(keep.route, keep.message, reason)]
            case AskEnded(group_id, reason, retry_after_s):
                known = self.ended.get(group_id.run_id)
                fresh = known is not None and known.add(group_id.seq)
                return [RecordDrop(group_id, reason, retry_after_s)] if fresh else []

    def _arrived(self, route: bytes, message: GroupFinished, body: Buffer) -> list[Action]:
        if self.has_ended(message.group_id):
            self.num_duplicates += 1
            return [_ack(route, message, duplicate=True)]
        asked = self._find(message.group_id)
        if asked is None:
            return [self._refuse(route, message, NOT_ASKED)]
        if not hmac.compare_digest(message.ticket, asked.ticket):
            return [self._refuse(route, message, NO_TICKET)]
        return [Keep(route, message, body, asked)]

    def _refuse(self, route: bytes, message: GroupFinished, reason: str) -> Send:
        self.num_refused += 1
        return Send(route, ResultRefused(message.group_id, message.attempt, reason))


def _ack(route: bytes, message: GroupFinished, *, duplicate: bool) -> Send:
    return Send(route, GroupAcked(message.group_id, message.attempt, duplicate))
