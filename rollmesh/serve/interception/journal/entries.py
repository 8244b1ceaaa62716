"""Records of a gateway's journal.

    JournalHeader     format, capture and model; the first record
    SessionOpened     a new session: digests of its secrets, and its sampling rules
    SessionGrew       events of a session; the second frame holds them, in the capture's encoding
    SessionRewarded   a reward of the session or of one of its turns
    SessionFinished   the session's report, which replaces all its events
    SessionClosed     the session was deleted or expired; all earlier records of it are dead
    ContentStored     a long text or an image under a number; the second frame holds it

- Secrets are stored as SHA-256 digests only.
- The entries of a session are numbered from 0 in logical order. Compaction may move an entry
  behind later ones; two entries of one number are copies.
"""

import msgspec

from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.session_deps import KeyDigests
from rollmesh.runtime.session_log import Text
from rollmesh.serve.interception.report import RewardSlot

FORMAT = 2
"""Incremented with every change of an entry or event that an older release would misread;
tests/golden/gateway_journal.json shows the encoding."""


class JournalEntry(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """First frame of a record."""


class JournalHeader(JournalEntry, frozen=True, tag="began"):
    """The first record of a journal."""

    capture: str
    model: str
    """Digest of the tokenizer; '' if the capture makes no tokens."""
    chats: str = ""
    """Chat renderer and parser: a model family, or the digest of a template."""
    format: int = 1
    """FORMAT of the release that wrote the journal; the first format did not record it."""


class SessionEntry(JournalEntry, frozen=True):
    """An entry of one session."""

    session_id: str
    number: int


class SessionOpened(SessionEntry, frozen=True, tag="opened"):
    """A new session."""

    created_s: float
    locks: KeyDigests
    metadata: bytes
    seed: int
    sampling: SamplingPolicy | None
    """None: the capture's default."""


class SessionGrew(SessionEntry, frozen=True, tag="grew"):
    """Events of a session, in the second frame."""


class SessionRewarded(SessionEntry, frozen=True, tag="rewarded"):
    """A reward of the session, or of one turn if `node` is set."""

    reward: float
    node: int | None


class SessionFinished(SessionEntry, frozen=True, tag="finished"):
    """The report of a finished session, which replaces its events."""

    outcome: Outcome
    text: Text
    slots: tuple[tuple[int, RewardSlot | Text], ...]
    names: Text
    nodes: tuple[int, ...]
    forks: dict[str, int]
    healed: dict[str, int]
    fault: str
    spent_because: str
    num_calls: int


class SessionClosed(JournalEntry, frozen=True, tag="closed"):
    """The end of a session."""

    session_id: str


class ContentStored(JournalEntry, frozen=True, tag="kept"):
    """A long text or an image, in the second frame."""

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
