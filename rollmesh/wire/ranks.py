"""Messages between a train controller and its ranks.

    rank -> controller   RankHello RankReady RankBeat RankLeft
                         CallStaged CallEnded   (a CallEnded's body: the answer)
                         TensorsReported
    controller -> rank   FormGroup ControllerBeat EndRank AbortRank
                         StageCall RunCall DropCall (a StageCall's body: the arguments)
                         ReadTensors                (body: ids to be cleared, 8 bytes each)

- Bodies carry packed handles of tensors, never the tensors.
- Each message of a controller carries the newest step that has ended, so a rank that missed a
  broadcast learns it from the next message.
"""

import msgspec

from rollmesh.wire.header import Message


class HeldTensors(msgspec.Struct, frozen=True, array_like=True):
    """Tensor bytes held by a process, as owner or as consumer."""

    num_tensors: int = 0
    total_bytes: int = 0
    retained_bytes: int = 0
    """Freed by the owner, and still in use as a view."""
    bytes_by_step: tuple[tuple[int, int], ...] = ()
    """(step that allocated it, or -1; bytes)"""


# start and end of a rank


class RankHello(Message, frozen=True, tag="rank_hello"):
    rank: int
    pid: int
    host: str = ""
    """Name of its machine, for messages."""
    device: str = ""
    """Type of the device on which it computes."""
    plan: str = ""
    """Digest of its topology and roles, which must be those of the controller."""
    store: str = ""
    """host:port of the store where ranks meet; rank 0 serves it."""


class RankReady(Message, frozen=True, tag="rank_ready"):
    rank: int
    owner: str
    """Address of its tensors."""


class RankBeat(Message, frozen=True, tag="rank_beat"):
    rank: int
    ended_step: int
    """Newest step whose tensors it has freed."""
    num_sent: int
    """Messages before this one: a receiver that got fewer knows that some were lost."""


class RankLeft(Message, frozen=True, tag="rank_left"):
    rank: int
    reason: str


class FormGroup(Message, frozen=True, tag="form_group"):
    ended_step: int
    store: str = ""
    """host:port of the store where ranks meet."""


class ControllerBeat(Message, frozen=True, tag="controller_beat"):
    ended_step: int
    num_sent: int
    """Messages to this rank before this one."""


class EndRank(Message, frozen=True, tag="end_rank"):
    ended_step: int
    reason: str


LATE = "the trainer's ranks are complete, and trained without this one"
"""The reason of AbortRank for a process that may join the trainer's next ranks."""


class AbortRank(Message, frozen=True, tag="abort_rank"):
    """End at once, also within a call: another rank is lost."""

    ended_step: int
    reason: str


# calls


class StageCall(Message, frozen=True, tag="stage_call"):
    """Prepare the arguments; run nothing yet."""

    ended_step: int
    call_id: int
    role: str
    method: str
    step: int
    """Train step that answers are tagged with; -1 is none."""


class RunCall(Message, frozen=True, tag="run_call"):
    """All ranks have their arguments: run."""

    ended_step: int
    call_id: int


class DropCall(Message, frozen=True, tag="drop_call"):
    """Some rank could not be staged, so none runs the call."""

    ended_step: int
    call_id: int


class CallStaged(Message, frozen=True, tag="call_staged"):
    rank: int
    call_id: int
    error: str = ""
    """Why it cannot run here."""


class CallEnded(Message, frozen=True, tag="call_ended"):
    rank: int
    call_id: int
    error: str = ""
    """The error that it raised."""


# tensors


class ReadTensors(Message, frozen=True, tag="read_tensors"):
    """Free tensors up to `ended_step` and those in the body, then report what is held."""

    ended_step: int
    ask_id: int


class TensorsReported(Message, frozen=True, tag="tensors_told"):
    rank: int
    ask_id: int
    ended_step: int
    num_cleared: int
    stored: HeldTensors
    buffered: HeldTensors
    error: str = ""
    """Why some could not be cleared."""


RankMessage = (
    RankHello
    | RankReady
    | RankBeat
    | RankLeft
    | FormGroup
    | ControllerBeat
    | EndRank
    | AbortRank
    | StageCall
    | RunCall
    | DropCall
    | CallStaged
    | CallEnded
    | ReadTensors
    | TensorsReported
)
