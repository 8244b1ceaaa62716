"""The records of a gateway's journal.

    Began      in which format, what the gateway captures, for which model; the first
    Opened     a session: how it is reached, by digests, and what was wished for it
    Grew       what it has done; the second frame has its deeds, as its capture writes them
    Rewarded   it, or one of its turns
    Finished   its account, which from then on stands for all that it has done
    Closed     it was deleted, or forgotten: nothing before this is of use
    Kept       a long text or an image, under a number that others name; the second frame

Invariants: secrets stand here as SHA-256 alone; the entries of a session are numbered from 0 in the
order in which they are true, wherever they stand, since an entry may be moved behind later ones;
what has the number of an earlier one is its copy. Written by archive.py, read by recovery.py.
"""

import msgspec

from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.session_deps import Locks
from rollmesh.runtime.session_log import Text
from rollmesh.serve.interception.report import RewardSlot

FORMAT = 2
"""Raised with every change of an entry or a deed that an older release would read otherwise, or not
at all: tests/golden/gateway_journal.json has what they look like."""


class JournalEntry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The first frame of a record."""


class JournalHeader(JournalEntry, frozen=True, tag="began"):
    """See the module."""

    capture: str
    model: str
    """A digest of what makes its tokens; '' where none are made."""
    chats: str = ""
    """What makes prompts of chats and reads answers: a family, or the digest of a template."""
    format: int = 1
    """FORMAT of the release that wrote it; the first did not say."""


class SessionEntry(JournalEntry, frozen=True):
    """An entry of one session."""

    session_id: str
    number: int


class SessionOpened(SessionEntry, frozen=True, tag="opened"):
    """See the module."""

    created_s: float
    locks: Locks
    metadata: bytes
    seed: int
    sampling: SamplingPolicy | None
    """None: the capture's own."""


class SessionGrew(SessionEntry, frozen=True, tag="grew"):
    """See the module."""


class SessionRewarded(SessionEntry, frozen=True, tag="rewarded"):
    """See the module."""

    reward: float
    node: int | None


class SessionFinished(SessionEntry, frozen=True, tag="finished"):
    """See the module."""

    outcome: Outcome
    text: Text
    inlets: tuple[tuple[int, RewardSlot | Text], ...]
    names: Text
    nodes: tuple[int, ...]
    forks: dict[str, int]
    healed: dict[str, int]
    fault: str
    spent_because: str
    num_calls: int


class SessionClosed(JournalEntry, frozen=True, tag="closed"):
    """See the module."""

    session_id: str


class ContentStored(JournalEntry, frozen=True, tag="kept"):
    """See the module."""

    number: int


AnyEntry = (
    JournalHeader
    | SessionOpened
    | SessionGrew
    | SessionRewarded
    | SessionFinished
    | SessionClosed
    | ContentStored
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyEntry).decode
