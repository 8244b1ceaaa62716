"""The entries of the client's journal: the first frame of each record, in msgpack.

    RunBegan      first, once per client                         frames: [entry]
    GroupAsked    an ask that outlives its process               frames: [entry, body]
    GroupTried    more than one attempt of such an ask has begun
    GroupKept     a complete result, before its ack              frames: [entry, body, *buffers]
    GroupBooked   a group that ended without a result
    GroupParted   a result that the program drops; it may ask for its task again
    GroupsTaken   results that are not needed again
    StepTaken     the groups of a train step, before it is taken
    StepBegun     a train step that is redone, before that
    StepEnded     a train step that was redone, or one that raised, and why
    Published     a policy version, before it is published
    StateSaved    a durable checkpoint, and what it covers
    EndedSoFar    all ended groups as intervals, before older segments are dropped

A field that is added has a default and is the last, so that older journals are read.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, Outcome

NOT_NOTED = -1
"""Ticket of an entry in a journal of an earlier release, which had no such field."""
Groups = dict[str, list[tuple[int, int]]]
"""Ended groups by run: half-open intervals of their numbers."""


class Entry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of all entries, each the first frame of a record."""


class Again(msgspec.Struct, frozen=True, array_like=True):
    """Link from a group to the earlier group whose task it repeats."""

    group_id: GroupId
    """The earlier group, which gave nothing of use."""
    times: int
    """How often the task has been asked for again, this time included."""


class SeenRollout(msgspec.Struct, frozen=True, array_like=True):
    """A rollout that does not train, for the drop log."""

    index: int
    outcome: Outcome
    length: int
    """Number of sampled tokens."""
    policy_versions: tuple[int, ...]
    """Policy versions of the tokens, each once, ascending."""
    error: str = ""
    place: ErrorPlace | None = None
    """Where environment code raised `error`."""


class RunBegan(Entry, frozen=True, tag="run_began"):
    run_id: str
    client_id: str = ""
    sink: str = ""
    """Address of the sink; a client that continues this run listens there again."""


class GroupAsked(Entry, frozen=True, tag="group_asked"):
    group_id: GroupId
    env: str
    num_samples: int
    priority: int
    ends_s: float
    """Unix time; 0 for never."""
    patience_s: float
    asked_step: int = 0
    """Train steps done by the weights that engines had at that time."""
    num_drawn: int = 0
    """Tasks that its program had drawn by then, this one included."""
    is_eval: bool = False
    """Whether it is for evaluation and does not train."""
    again: Again | None = None
    ticket: bytes = b""
    """Secret of the group; empty in a journal of an earlier release."""


class GroupTried(Entry, frozen=True, tag="group_tried"):
    group_id: GroupId
    attempts: int
    """Attempts that have begun."""
    excused: int
    """Attempts of these that do not count."""


class GroupKept(Entry, frozen=True, tag="group_kept"):
    group_id: GroupId
    attempt: int
    worker_id: str


class GroupBooked(Entry, frozen=True, tag="group_booked"):
    group_id: GroupId
    reason: str
    step: int = 0
    """The first position that was not taken yet."""
    task_id: str = ""
    rollouts: tuple[SeenRollout, ...] = ()
    """Rollouts of it that arrived."""


class GroupParted(Entry, frozen=True, tag="group_parted"):
    group_id: GroupId
    reason: str
    step: int
    """The first position that was not taken yet."""
    times: int = 0
    """How often the request that follows will say its task is repeated; 0 if none follows."""


class GroupsTaken(Entry, frozen=True, tag="groups_taken"):
    group_ids: tuple[GroupId, ...]


class StepTaken(Entry, frozen=True, tag="step_taken"):
    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int = NOT_NOTED
    """Tokens of weights made by fewer steps did not train."""


NOT_COUNTED = "not_counted"
"""An end of a step that its data did not cause: the user can fix it, or a rank was lost."""


class StepBegun(Entry, frozen=True, tag="step_begun"):
    step: int
    launch: int
    """Process id of the trainer's parent: deaths under different parents do not count together."""


class StepEnded(Entry, frozen=True, tag="step_ended"):
    step: int
    why: str = ""
    """Type and place of the exception that ended the trainer; '' if the step is done, NOT_COUNTED
    if the step did not cause it.
    """


class Published(Entry, frozen=True, tag="published"):
    policy_version: int
    step: int


class StateSaved(Entry, frozen=True, tag="state_saved"):
    """A program's state that is safe on disk; without arguments that of one that never ran."""

    num_steps: int = 0
    """Train steps done."""
    policy_version: int = 0
    """The newest policy version that was named until then."""
    gone: Groups = {}
    """Groups that had left the program: trained, or dropped with their reason."""
    step_of_version: dict[int, int] = {}
    """Train step of each version published until then. The journal releases these, and an earlier
    checkpoint, which counts again if this one is damaged, does not have them.
    """


class EndedSoFar(Entry, frozen=True, tag="ended_so_far"):
    runs: Groups
    num_asked: dict[str, int] = {}
    """By run."""
    num_drawn: int = 0
    """The largest number that any request has given."""
    evals: Groups = {}
    """Groups that were asked for and do not train."""


StepEntry = StepTaken | StepBegun | StepEnded | Published
"""An entry that the train loop waits for."""
AnyEntry = (
    RunBegan
    | GroupAsked
    | GroupTried
    | GroupKept
    | GroupBooked
    | GroupParted
    | GroupsTaken
    | StepTaken
    | StepBegun
    | StepEnded
    | Published
    | StateSaved
    | EndedSoFar
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def num_in(groups: Groups) -> int:
    """Return the number of groups in these intervals."""
    return sum(stop - start for each in groups.values() for start, stop in each)


def encode_entry(entry: AnyEntry) -> bytes:
    """Encode the first frame of a record."""
    return _encoder.encode(entry)


def decode_entry(frames: Sequence[bytes]) -> AnyEntry:
    """Decode the entry of a record; JournalError if it is none."""
    try:
        return _decoder.decode(frames[0])
    except (*DECODE_ERRORS, IndexError) as error:
        raise JournalError(f"its entry is unknown: {error}") from None
