"""Every error that rollmesh raises on purpose, as one small tree.

    RollmeshError
      UserError            the user's mistake: one clear line, exit code 2 (also a ValueError)
        ConfigError        an unknown, mistyped or contradictory setting
        EnvError           an environment that cannot be imported or does not keep to the interface
        ModelError         a model folder that is not one, or of a type we do not run
          NoRoom           one that its disk has no room for, now
        NotFinite          weights or gradients that are not finite
        AddressError       an address in use, not reachable, or not allowed
        DispatchError      a call whose rows do not divide, or whose answers do not add up
        PublishError       no engine accepts the new weights
        CheckpointError    a checkpoint that is damaged, or was written by another model
      WireError            a frame that does not parse; counted and answered, never fatal
      EngineError          an engine refused, failed or vanished
        EngineUnavailable  no engine is READY, or it did not answer
          EngineOverloaded its queue is full
          EngineBroke      it took the request and failed at it
          RequestLost      the request cannot be read to be sent; no engine is at fault
        EngineRefused      the engine answered that this request is wrong
      SessionError         what the HTTP edge turns into a reply in the caller's dialect
        ContentLost        an image or long text was on disk, which does not give it back
      TrajectoryEnded      a rollout is asked for whose scope has ended, or was never opened
      JournalError         a journal that cannot be written
        JournalDamaged     what stands there is not what was written, or of another format
      Overloaded           a bounded queue is full; `retry_after_s` says when to come back
      ClientClosed         a client that has left is asked for more
      GroupError           a group of rollouts that was asked for ended without a result
        GroupCancelled     its client, or whoever stopped that, no longer wanted it
        DeadlineExceeded   it was not there in time
        EnvFailedError     no worker could load its environment
        AttemptsExhausted  worker after worker died that had it
        Quarantined        workers died that had it, as if it were why; it will not run again
        GroupIncomplete    it ran, but not all of its rollouts came to an outcome
      TensorError          a tensor of the data plane cannot be had, or cannot be kept
        ShardMissing       its owner answers, and does not hold it
        OwnerGone          its owner does not answer, or hung up in mid-fetch
        StoreFull          the byte budget of a store leaves no room for it
        FetchMismatch      a backend gave other shards, or other sizes, than were asked for
      RankError            the ranks of a trainer did not do what they were called for
        RankGone           one ended, or is silent, and all stop with it
        CallFailed         a call's arguments could not be had, or it raised
      InfraError           a rollout failed for reasons that are not the agent's
      AgentFailed          a rollout failed and the agent itself is at fault
        ContextFull        the conversation is longer than the model's context, or than may be held

Invariant: a message names the key, address or file and says what to do. `assert` is for our own
mistakes. Driven by everyone.
"""

import errno
import traceback
from copy import copy
from typing import Any, Literal, Self

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they are decoded as."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk that is full, and may have room again."""

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
    "expired": "its lease ran out before a batch took it, or anybody renewed it",
    "owner_restarted": "its owner was started anew, and what it held before is gone",
    "never_seen": "its owner never gave out this id",
}


def remedy_of(error: OSError) -> str:
    """Return the remedy for a write that the system refused."""
    return _REMEDIES.get(error.errno or 0, "fix that")


class RollmeshError(Exception):
    """Root of the tree. Each goes from process to process, as pools of them and Ray have it do."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not made anew: few are made of their message alone.
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[RollmeshError], args: tuple[Any, ...], fields: dict[str, Any]
) -> RollmeshError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def kind_and_place(error: BaseException) -> str:
    """Return the error's kind and where it was raised, the same each time that it happens: without
    its message, which may hold addresses or times."""
    if isinstance(error, CallFailed):  # it was raised at a rank, which says so in one line
        return f"CallFailed: {error.call}: {error.error.partition(':')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}{place}"


class UserError(RollmeshError, ValueError):
    """The user can mend this; the message is one line that says how."""


class ConfigError(UserError):
    """A setting is unknown, mistyped or contradicts another."""


class EnvError(UserError):
    """An environment cannot be imported or does not keep to the interface."""


class ModelError(UserError):
    """A model folder is not one, or holds an architecture that we do not run."""


class NoRoom(ModelError):
    """A model folder cannot be written, since its disk is full; once it is not, another try may."""


class NotFinite(UserError):
    """Weights that hold NaN or infinity, which are never published or saved, or gradients that
    were not finite in too many steps in a row."""


class AddressError(UserError):
    """An address is in use, does not answer, or is not allowed without keys."""


class DispatchError(UserError):
    """The rows of a call do not divide by the heads, or what these answer cannot become one."""


class PublishError(UserError):
    """No engine accepts the weights that are published."""


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
    """The engine took the request and failed before its first token; perhaps the request is why."""


class RequestLost(EngineUnavailable):
    """Not all of the request could be read to be sent, so no engine has it, or is to be blamed."""


class LocalShortage(EngineUnavailable):
    """No connection to an engine could be opened for want of descriptors, ports or memory in this
    process or on this machine; it says nothing about the engine."""


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong; a retry would fail alike."""


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
        """The same to raise: one that is kept and raised keeps all its callers' frames alive."""
        return copy(self)


class ContentLost(SessionError):
    """What was spilled to disk cannot be read back: a fault of the machine, never the agent's."""

    def __init__(self, num_bytes: int, why: str) -> None:
        what = f"an image or a long text of {num_bytes} bytes was on disk and cannot be read back"
        super().__init__(503, "content_lost", f"{what}: {why}")


class TrajectoryEnded(RollmeshError):
    """A rollout's scope has ended, or there never was one; what it held is gone."""

    def __init__(self, trajectory: str, *, was_here: bool = True) -> None:
        why = "its scope has ended" if was_here else "it was not registered here, or ended long ago"
        super().__init__(f"trajectory {trajectory} is not here: {why}")
        self.trajectory = trajectory


class JournalError(RollmeshError):
    """A journal cannot be written; `remedy` says what people can do about it."""

    def __init__(self, message: str, remedy: str = "fix that") -> None:
        super().__init__(message)
        self.remedy = remedy

    @classmethod
    def at(cls, where: object, error: OSError) -> Self:
        """The error of a system call at this file or folder."""
        return cls(f"{where}: {error.strerror}", remedy_of(error))


class JournalDamaged(JournalError):
    """What stands in a journal is not what was written there, or of another format."""


class Overloaded(RollmeshError):
    """A bounded queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientClosed(RollmeshError):
    """A client was asked for a group after, or while, it was closed."""


class GroupError(RollmeshError):
    """A group ended without a result; the message is the reason with its code."""

    def __init__(self, group_id: GroupId, reason: str, record: GroupRecord | None = None) -> None:
        super().__init__(f"group {group_id}: {reason}")
        self.group_id = group_id
        self.reason = reason
        self.record = record
        """What there is of its rollouts, where it ran."""


class GroupCancelled(GroupError):
    """The group was cancelled: by its client, or because that left."""


class DeadlineExceeded(GroupError):
    """The group's deadline came before its result."""


class EnvFailedError(GroupError):
    """The group's environment does not load on any worker."""


class AttemptsExhausted(GroupError):
    """Every worker that ran the group died, as often as it may run."""


class Quarantined(GroupError):
    """Workers that ran the group died; the reason names them and how they ended."""


class GroupIncomplete(GroupError):
    """Rollouts of the group failed for reasons that are not the agent's; see `record`."""


class RankError(RollmeshError):
    """The ranks of a trainer did not do what they were called for."""


class RankGone(RankError):
    """A rank ended or is silent; its collectives cannot go on, so all ranks end with it."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} is gone: {cause}; all ranks have to start anew")
        self.rank = rank
        self.cause = cause


class CallFailed(RankError):
    """A call failed at a rank: its arguments could not be had, so that none ran, or it raised."""

    def __init__(self, call: str, rank: int, error: str) -> None:
        super().__init__(f"{call} failed at rank {rank}: {error}")
        self.call = call
        self.rank = rank
        self.error = error


class TensorError(RollmeshError):
    """A tensor of the data plane cannot be had, or cannot be kept."""


class ShardMissing(TensorError):
    """Its owner answers, and does not hold the shard; another try would miss it too."""

    def __init__(self, shard_id: int, owner: str, reason: MissReason) -> None:
        whose = f" of {owner}" if owner else ""
        super().__init__(f"shard {shard_id:#x}{whose} is not there ({reason}): {_MISSES[reason]}")
        self.shard_id = shard_id
        self.owner = owner
        self.reason: MissReason = reason


class OwnerGone(TensorError):
    """The owner does not answer, or hung up in mid-fetch; what it held may be gone with it."""

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
    """A backend gave another number of shards, or another size, than asked; none of it is kept."""


class InfraError(RollmeshError):
    """A rollout failed for reasons that are not the agent's; it is retried, never scored zero."""


class AgentFailed(RollmeshError):
    """An agent broke down by its own fault; its rollout ends as `agent_error`."""


class ContextFull(AgentFailed):
    """The conversation has grown past the model's context, or past what a session may hold; an
    environment may end it there."""
