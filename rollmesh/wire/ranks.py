"""What a train controller and its ranks say to each other.

    rank -> controller   RankHello RankReady RankBeat RankLeft
                         CallStaged CallEnded       (a CallEnded's body: the answer)
                         TensorsTold
    controller -> rank   FormGroup ControllerBeat EndRank
                         StageCall RunCall DropCall (a StageCall's body: the arguments)
                         ReadTensors                (body: ids to be cleared, 8 bytes each)

Bodies of calls are read by trainer/controller/answers.py; tensors do not travel here, their handles
do, packed. Whatever a controller says carries the newest step that has ended, so a rank that missed
one broadcast is told by the next word. Invariant: that of messages.py, whose vocabulary holds these
too. Driven by trainer/controller.
"""

import msgspec

from rollmesh.wire.header import Message


class HeldTensors(msgspec.Struct, frozen=True, array_like=True):
    """What a process holds, as owner or as consumer."""

    num_tensors: int = 0
    total_bytes: int = 0
    retained_bytes: int = 0
    """Freed, and still viewed by somebody."""
    bytes_by_step: tuple[tuple[int, int], ...] = ()
    """(step that took it, or -1; bytes)"""


# a rank's life


class RankHello(Message, frozen=True, tag="rank_hello"):
    rank: int
    pid: int


class RankReady(Message, frozen=True, tag="rank_ready"):
    rank: int
    owner: str
    """Where its tensors are fetched from."""


class RankBeat(Message, frozen=True, tag="rank_beat"):
    rank: int
    ended_step: int
    """Up to which it has freed."""
    num_said: int
    """Messages before this one: who has heard fewer knows that some were lost."""


class RankLeft(Message, frozen=True, tag="rank_left"):
    rank: int
    reason: str


class FormGroup(Message, frozen=True, tag="form_group"):
    ended_step: int


class ControllerBeat(Message, frozen=True, tag="controller_beat"):
    ended_step: int
    num_said: int
    """To this rank, before this one."""


class EndRank(Message, frozen=True, tag="end_rank"):
    ended_step: int
    reason: str


# calls


class StageCall(Message, frozen=True, tag="stage_call"):
    """Have the arguments ready; run nothing yet."""

    ended_step: int
    call_id: int
    role: str
    method: str
    step: int
    """The train step that answers are tagged with; -1 is none."""


class RunCall(Message, frozen=True, tag="run_call"):
    """All ranks have their arguments."""

    ended_step: int
    call_id: int


class DropCall(Message, frozen=True, tag="drop_call"):
    """Some rank has not, so none runs it."""

    ended_step: int
    call_id: int


class CallStaged(Message, frozen=True, tag="call_staged"):
    rank: int
    call_id: int
    error: str = ""
    """Why it cannot be run here."""


class CallEnded(Message, frozen=True, tag="call_ended"):
    rank: int
    call_id: int
    error: str = ""
    """What it raised."""


# tensors


class ReadTensors(Message, frozen=True, tag="read_tensors"):
    """Free what `ended_step` says and what the body names, then say what is held."""

    ended_step: int
    ask_id: int


class TensorsTold(Message, frozen=True, tag="tensors_told"):
    rank: int
    ask_id: int
    ended_step: int
    num_cleared: int
    stored: HeldTensors
    buffered: HeldTensors
    error: str = ""
    """Why not all of it could be cleared."""


RankMessage = (
    RankHello
    | RankReady
    | RankBeat
    | RankLeft
    | FormGroup
    | ControllerBeat
    | EndRank
    | StageCall
    | RunCall
    | DropCall
    | CallStaged
    | CallEnded
    | ReadTensors
    | TensorsTold
)
