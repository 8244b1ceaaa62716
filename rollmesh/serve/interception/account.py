"""What a sealed session says of itself: JSON in which rewards are put when it is asked for.

Made once, when the session is finished; from then on it stands for the session, of which nothing
else is kept. All but what lies in blobs anyway is one text, which is a blob too where it is long:
accounts that nobody asks for are the first to be spilled. Invariants: with the same rewards it is
the same each time; it is never joined, but told piece by piece. Made by the captures, driven by
book.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollmesh.core.types import Outcome
from rollmesh.serve.interception.pieces import Piece, held, joined

NO_REWARDS: dict[int, float] = {}

_encode = msgspec.json.Encoder().encode


class Rewards(msgspec.Struct):
    """What was given so far."""

    whole: float | None = None
    """The session's."""
    by_node: dict[int, float] = NO_REWARDS
    """Of single sampled turns, by their node; the newest on a sample's path is the sample's."""


class Hole(msgspec.Struct, frozen=True):
    """Where a reward is put."""

    path: tuple[int, ...]
    """Nodes, the newest last; its reward counts."""
    has_default: bool
    """Without one, the session's reward stands here."""

    def reward(self, rewards: Rewards) -> float | None:
        """What to put here."""
        given = (rewards.by_node[node] for node in reversed(self.path) if node in rewards.by_node)
        return next(given, rewards.whole if self.has_default else None)


class Account(msgspec.Struct, frozen=True):
    """See the module. Made by a Writer."""

    session_id: str
    text: Piece
    inlets: list[tuple[int, Hole | Piece]]
    """What is put into the text, and before which of its bytes, in order."""
    names: Piece
    """Nodes by the ids of their responses, a JSON object."""
    nodes: tuple[int, ...]
    """That a reward may be given to."""

    def told(self, rewards: Rewards, **fields: Any) -> list[Piece]:
        """Its JSON, which begins with these fields."""
        text = memoryview(joined([self.text]))
        pieces: list[Piece] = [_encode({"session_id": self.session_id, **fields})[:-1]]
        start = 0
        for stop, inlet in self.inlets:
            pieces.append(bytes(text[start:stop]))
            pieces.append(_encode(inlet.reward(rewards)) if isinstance(inlet, Hole) else inlet)
            start = stop
        return [*pieces, bytes(text[start:]), b"}"]

    def node_of(self, name: int | str) -> int:
        """See CapturedSession."""
        if isinstance(name, int):
            if name not in self.nodes:
                raise LookupError(name)
            return name
        names: dict[str, int] = msgspec.json.decode(joined([self.names]))
        # Each dialect puts its own prefix before the ids that we make.
        return names[name[max(0, name.find(self.session_id)) :]]

    @property
    def num_bytes(self) -> int:
        """Beside the blobs."""
        return sum([len(each) for each in (self.text, self.names) if isinstance(each, bytes)])


class Finished(msgspec.Struct, frozen=True):
    """What is left of a session once it is finished."""

    outcome: Outcome
    account: Account
    forks: Mapping[str, int]
    healed: Mapping[str, int]
    fault: str
    spent_because: str


class Writer:
    """Writes an account, field by field."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._inlets: list[tuple[int, Hole | Piece]] = []

    def field(self, name: str, value: Any) -> None:
        """One whose value is short."""
        self._text += b",%b:%b" % (_encode(name), _encode(value))

    def ready(self, name: str, pieces: Iterable[Piece]) -> None:
        """One whose value is JSON already."""
        self._open(name, b"")
        self._put(pieces)

    def rows(self, name: str, rows: Iterable[tuple[Hole, dict[str, Any]]]) -> None:
        """A list of objects, each of which gets a `reward`."""
        self._open(name, b"[")
        for number, (hole, row) in enumerate(rows):
            self._text += b',{"reward":' if number else b'{"reward":'
            self._inlets.append((len(self._text), hole))
            rest = _encode(row)
            self._text += b"," + rest[1:] if len(rest) > 2 else b"}"
        self._text += b"]"

    def listed(self, name: str, values: Iterable[Iterable[Piece]]) -> None:
        """A list of values that are JSON already."""
        self._open(name, b"[")
        for number, pieces in enumerate(values):
            self._text += b"," if number else b""
            self._put(pieces)
        self._text += b"]"

    def named(self, name: str, values: Iterable[tuple[str, Iterable[Piece]]]) -> None:
        """An object of values that are JSON already."""
        self._open(name, b"{")
        for number, (key, pieces) in enumerate(values):
            self._text += b"%b%b:" % (b"," if number else b"", _encode(key))
            self._put(pieces)
        self._text += b"}"

    def account(self, session_id: str, names: dict[str, int], nodes: Iterable[int]) -> Account:
        """What was written; for `names` and `nodes` see Account."""
        text = held(bytes(self._text))
        return Account(session_id, text, self._inlets, held(_encode(names)), tuple(nodes))

    def _open(self, name: str, bracket: bytes) -> None:
        self._text += b",%b:%b" % (_encode(name), bracket)

    def _put(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, bytes):
                self._text += piece
            else:
                self._inlets.append((len(self._text), piece))
