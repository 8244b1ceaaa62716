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
    StateSaved    a durable savepoint, and what it covers
    EndedSoFar    all ended groups as intervals, before older segments are dropped

A field that is added has a default and is the last, so that older journals are read.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, Outcome

NOT_NOTED = -1
"""In a journal of an earlier release, which had no such field."""
Groups = dict[str, list[tuple[int, int]]]
"""By run: half-open intervals of its groups' numbers."""


class Entry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The first frame of a record."""


class Again(msgspec.Struct, frozen=True, array_like=True):
    """What a group is asked for that asks for an earlier one's task."""

    group_id: GroupId
    """The earlier one's, of which came nothing of use."""
    times: int
    """That the task was asked for again, with this one."""


class SeenRollout(msgspec.Struct, frozen=True, array_like=True):
    """A rollout that does not train, for the drop log."""

    index: int
    outcome: Outcome
    length: int
    """Sampled tokens."""
    policy_versions: tuple[int, ...]
    """Theirs, each once, ascending."""
    error: str = ""
    place: ErrorPlace | None = None
    """Where environment code raised `error`."""


class RunBegan(Entry, frozen=True, tag="run_began"):
    run_id: str
    client_id: str = ""
    sink: str = ""
    """Address; a client that goes on for this one listens there again."""


class GroupAsked(Entry, frozen=True, tag="group_asked"):
    group_id: GroupId
    env: str
    num_samples: int
    priority: int
    ends_s: float
    """Unix time; 0 for never."""
    patience_s: float
    asked_step: int = 0
    """Train steps done by the weights that engines had then."""
    num_drawn: int = 0
    """Tasks that its program had drawn by then, this one among them."""
    is_eval: bool = False
    """It does not train."""
    again: Again | None = None
    ticket: bytes = b""
    """Secret of the group; empty in a journal of an earlier release."""


class GroupTried(Entry, frozen=True, tag="group_tried"):
    group_id: GroupId
    attempts: int
    """That have begun."""
    excused: int
    """Of them, those that do not count."""


class GroupKept(Entry, frozen=True, tag="group_kept"):
    group_id: GroupId
    attempt: int
    worker_id: str


class GroupBooked(Entry, frozen=True, tag="group_booked"):
    group_id: GroupId
    reason: str
    step: int = 0
    """The first that was not taken yet."""
    task_id: str = ""
    rollouts: tuple[SeenRollout, ...] = ()
    """Those of it that came."""


class GroupParted(Entry, frozen=True, tag="group_parted"):
    group_id: GroupId
    reason: str
    step: int
    """The first that was not taken yet."""
    times: int = 0
    """As the ask that is to follow will say it; 0 where none is."""


class GroupsTaken(Entry, frozen=True, tag="groups_taken"):
    group_ids: tuple[GroupId, ...]


class StepTaken(Entry, frozen=True, tag="step_taken"):
    step: int
    group_ids: tuple[GroupId, ...]
    oldest_step: int = NOT_NOTED
    """Tokens of weights that fewer steps had made did not train."""


NOT_COUNTED = "not_counted"
"""An end of a step that is no fault of its data: the user can fix it, or a rank was lost."""


class StepBegun(Entry, frozen=True, tag="step_begun"):
    step: int
    launch: int
    """Process id of what started the trainer: deaths under another one do not count together."""


class StepEnded(Entry, frozen=True, tag="step_ended"):
    step: int
    why: str = ""
    """The exception that ended the trainer, its kind and place; '' where the step is done, and
    NOT_COUNTED where the step is not to blame."""


class Published(Entry, frozen=True, tag="published"):
    policy_version: int
    step: int


class StateSaved(Entry, frozen=True, tag="state_saved"):
    """A program's state that is safe on disk; without arguments that of one that never ran."""

    num_steps: int = 0
    """Train steps that it has done."""
    policy_version: int = 0
    """The newest that was ever named then."""
    gone: Groups = {}
    """Groups that had left the program: trained, or dropped with their reason."""
    step_of_version: dict[int, int] = {}
    """Of each version that was published until then: the journal lets go of that, and a savepoint
    before this one, which counts again where this one breaks on the disk, does not know it."""


class EndedSoFar(Entry, frozen=True, tag="ended_so_far"):
    runs: Groups
    num_asked: dict[str, int] = {}
    """By run."""
    num_drawn: int = 0
    """The most that any ask has said."""
    evals: Groups = {}
    """Those that were asked for and do not train."""


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
    """How many these are."""
    return sum(stop - start for each in groups.values() for start, stop in each)


def encode_entry(entry: AnyEntry) -> bytes:
    """The first frame of a record."""
    return _encoder.encode(entry)


def decode_entry(frames: Sequence[bytes]) -> AnyEntry:
    """The entry of a record; JournalError where it is none."""
    try:
        return _decoder.decode(frames[0])
    except (*DECODE_ERRORS, IndexError) as error:
        raise JournalError(f"its entry is unknown: {error}") from None
