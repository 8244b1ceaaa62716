"""Every error that rollmesh raises on purpose, as one small tree.

    RollmeshError
      UserError            the user's mistake: one clear line, exit code 2 (also a ValueError)
        ConfigError        an unknown, mistyped or contradictory setting
        EnvError           an environment that cannot be imported or violates the interface
        ModelError         a model folder that is not one, or of a type we do not run
          NoRoom           its disk is full
        NotFinite          weights or gradients that are not finite
        AddressError       an address in use, not reachable, or not allowed
        DispatchError      a call whose rows do not divide, or whose answers do not combine
        PublishError       no engine accepts the new weights
        CheckpointError    a checkpoint that is damaged, or was written by another model
      WireError            a frame that does not parse; counted and answered, never fatal
      EngineError          an engine refused, failed or vanished
        EngineUnavailable  no engine is READY, or it did not answer
          EngineOverloaded its queue is full
          EngineBroke      it accepted the request and failed
          RequestLost      the request cannot be read to be sent; not the engine's fault
        EngineRefused      the engine rejected the request
      SessionError         becomes an HTTP reply in the caller's dialect
        ContentLost        an image or long text cannot be read back from disk
      TrajectoryEnded      a rollout's scope has ended, or was never opened
      JournalError         a journal that cannot be written
        JournalDamaged     its content is damaged, or of another format
      Overloaded           a bounded queue is full; retry after `retry_after_s`
      ClientClosed         a closed client was asked for a group
      GroupError           a group of rollouts ended without a result
        GroupCancelled     it was cancelled
        DeadlineExceeded   its deadline passed
        EnvFailedError     no worker could load its environment
        AttemptsExhausted  all workers that ran it died
        Quarantined        it seems to kill workers, and will not run again
        GroupIncomplete    not all of its rollouts have an outcome
      TensorError          a tensor of the data plane cannot be fetched or stored
        ShardMissing       its owner does not hold it
        OwnerGone          its owner does not answer
        StoreFull          the store's byte budget is used up
        FetchMismatch      a backend returned other shards or sizes than requested
      RankError            a trainer's ranks failed a call
        RankGone           a rank ended or is silent; all stop
        CallFailed         a call's arguments could not be fetched, or it raised
      InfraError           a rollout failed for reasons that are not the agent's
      AgentFailed          a rollout failed and the agent itself is at fault
        ContextFull        the conversation is longer than the model's context, or than may be held

A message names the key, address or file and says what to do. `assert` is for bugs.
"""

import errno
import traceback
from copy import copy
from typing import Any, Literal, Self

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed bytes."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that is full, and may have room again."""

_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "mount that file system writable, or name a folder elsewhere",
    errno.EPERM: "allow writing there (owner, mode, `lsattr`), or name a folder elsewhere",
    errno.EACCES: "allow writing there (owner, mode, `lsattr`), or name a folder elsewhere",
    errno.EIO: "check the disk (`dmesg`)",
}

MissReason = Literal["cleared", "expired", "owner_restarted", "never_seen"]

_MISSES: dict[MissReason, str] = {
    "cleared": "it was cleared, or the step that took it has ended",
    "expired": "its lease expired before a batch took it or a process renewed it",
    "owner_restarted": "its owner was restarted, and its earlier shards are lost",
    "never_seen": "its owner never gave out this id",
}


def remedy_of(error: OSError) -> str:
    """Return the remedy for a write that the system refused."""
    return _REMEDIES.get(error.errno or 0, "fix that")


class RollmeshError(Exception):
    """Root of the tree. Instances can be pickled between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not called again: few errors are built from their message alone.
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[RollmeshError], args: tuple[Any, ...], fields: dict[str, Any]
) -> RollmeshError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def kind_and_place(error: BaseException) -> str:
    """Return the error's kind and where it was raised, without its message, which may hold
    addresses or times.
    """
    if isinstance(error, CallFailed):  # it was raised at a rank, which reports it in one line
        return f"CallFailed: {error.call}: {error.error.partition(':')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"


class UserError(RollmeshError, ValueError):
    """The user can fix this; the message is one line that says how."""


class ConfigError(UserError):
    """A setting is unknown, mistyped or contradicts another."""


class EnvError(UserError):
    """An environment cannot be imported or does not keep to the interface."""


class ModelError(UserError):
    """A model folder is not one, or holds an architecture that we do not run."""


class NoRoom(ModelError):
    """A model folder cannot be written because its disk is full; a later try may succeed."""


class NotFinite(UserError):
    """Weights that hold NaN or infinity, which are never published or saved, or gradients that
    were not finite in too many steps in a row."""


class AddressError(UserError):
    """An address is in use, does not answer, or is not allowed without keys."""


class DispatchError(UserError):
    """The rows of a call do not divide by the data-parallel ranks, or their answers do not
    combine.
    """


class PublishError(UserError):
    """No engine accepts the published weights."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or was written by another model."""


class WireError(RollmeshError):
    """A message does not parse: wrong frame count, unknown tag, wrong protocol version."""


class EngineError(RollmeshError):
    """An engine refused, failed or vanished."""


class EngineUnavailable(EngineError):
    """No engine is READY, or the chosen one did not answer; worth a retry."""


class EngineOverloaded(EngineUnavailable):
    """The engine's queue is full; worth a retry elsewhere, or later."""


class EngineBroke(EngineUnavailable):
    """The engine took the request and failed before its first token; the request may be the
    cause.
    """


class RequestLost(EngineUnavailable):
    """The request could not be read completely, so it was not sent; the engine is not at fault."""


class LocalShortage(EngineUnavailable):
    """No connection to an engine could be opened for lack of descriptors, ports or memory here; not
    the engine's fault.
    """


class EngineRefused(EngineError):
    """The engine rejects the request itself; a retry would fail the same way."""


class SessionError(RollmeshError):
    """A request to a session fails with `status` and a machine-readable `code`."""

    def __init__(
        self, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def again(self) -> Self:
        """Return a copy to raise: raising one stored instance keeps all its callers' frames
        alive.
        """
        return copy(self)


class ContentLost(SessionError):
    """Spilled data cannot be read back: a fault of the machine, never the agent's."""

    def __init__(self, num_bytes: int, why: str) -> None:
        what = f"an image or a long text of {num_bytes} bytes was on disk and cannot be read back"
        super().__init__(503, "content_lost", f"{what}: {why}")


class TrajectoryEnded(RollmeshError):
    """A rollout's scope has ended, or never existed; its data is gone."""

    def __init__(self, trajectory: str, *, was_here: bool = True) -> None:
        why = "its scope has ended" if was_here else "it was not registered here, or ended long ago"
        super().__init__(f"trajectory {trajectory} is not here: {why}")
        self.trajectory = trajectory


class JournalError(RollmeshError):
    """A journal cannot be written; `remedy` is for users."""

    def __init__(self, message: str, remedy: str = "fix that") -> None:
        super().__init__(message)
        self.remedy = remedy

    @classmethod
    def at(cls, where: object, error: OSError) -> Self:
        """Build the error of a failed system call at this file or folder."""
        return cls(f"{where}: {error.strerror}", remedy_of(error))


class JournalDamaged(JournalError):
    """A journal holds something else than was written, or another format."""


class Overloaded(RollmeshError):
    """A bounded queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientClosed(RollmeshError):
    """A closed client was asked for a group."""


class GroupError(RollmeshError):
    """A group ended without a result; the message is the reason with its code."""

    def __init__(self, group_id: GroupId, reason: str, record: GroupRecord | None = None) -> None:
        super().__init__(f"group {group_id}: {reason}")
        self.group_id = group_id
        self.reason = reason
        self.record = record
        """The record of its rollouts, if it ran."""


class GroupCancelled(GroupError):
    """The group was cancelled: by its client, or because the client left."""


class DeadlineExceeded(GroupError):
    """The group's deadline passed before its result."""


class EnvFailedError(GroupError):
    """The group's environment does not load on any worker."""


class AttemptsExhausted(GroupError):
    """All workers that ran the group died, up to its limit of attempts."""


class Quarantined(GroupError):
    """Workers that ran the group died; the reason names them and their exits."""


class GroupIncomplete(GroupError):
    """Rollouts of the group failed for reasons that are not the agent's; see `record`."""


class RankError(RollmeshError):
    """A trainer's ranks failed a call."""


class RankGone(RankError):
    """A rank ended or is silent; collectives cannot continue, so all ranks end."""

    def __init__(self, rank: int, cause: str, host: str = "") -> None:
        """`host` is the name of its machine; '' if it is the trainer's or unknown."""
        place = f" on {host}" if host else ""
        super().__init__(f"rank {rank}{place} is gone: {cause}; all ranks have to restart")
        self.rank = rank
        self.cause = cause
        self.host = host


class CallFailed(RankError):
    """A call failed at a rank: its arguments could not be fetched, so no rank ran it, or it
    raised.
    """

    def __init__(self, call: str, rank: int, error: str) -> None:
        super().__init__(f"{call} failed at rank {rank}: {error}")
        self.call = call
        self.rank = rank
        self.error = error


class TensorError(RollmeshError):
    """A tensor of the data plane cannot be had, or cannot be kept."""


class ShardMissing(TensorError):
    """The owner answers, but does not hold the shard; a retry would fail the same way."""

    def __init__(self, shard_id: int, owner: str, reason: MissReason) -> None:
        whose = f" of {owner}" if owner else ""
        super().__init__(f"shard {shard_id:#x}{whose} is not there ({reason}): {_MISSES[reason]}")
        self.shard_id = shard_id
        self.owner = owner
        self.reason: MissReason = reason


class OwnerGone(TensorError):
    """The owner does not answer, or closed the connection during a fetch; its data may be gone."""

    def __init__(self, owner: str, why: str) -> None:
        super().__init__(f"{owner} is gone: {why}; is its process alive, and reachable from here?")
        self.owner = owner
        self.why = why


class StoreFull(TensorError):
    """The byte budget of a store, or the memory under it, leaves no room."""

    def __init__(self, wanted_bytes: int, held_bytes: int, max_bytes: int, why: str = "") -> None:
        room = f"{wanted_bytes} bytes do not fit: {held_bytes} of {max_bytes} are held"
        remedy = "end steps or clear batches sooner, or raise the budget"
        super().__init__(f"{room}{why and f', {why}'}; {remedy}")
        self.wanted_bytes = wanted_bytes
        self.held_bytes = held_bytes
        self.max_bytes = max_bytes
        self.why = why


class FetchMismatch(TensorError):
    """A backend returned another number or size of shards than requested; nothing is kept."""


class InfraError(RollmeshError):
    """A rollout failed for reasons that are not the agent's; it is retried, never scored zero."""


class AgentFailed(RollmeshError):
    """The agent failed by its own fault; its rollout ends as `agent_error`."""


class ContextFull(AgentFailed):
    """The conversation is longer than the model's context, or than a session may hold; an
    environment may end it there.
    """
