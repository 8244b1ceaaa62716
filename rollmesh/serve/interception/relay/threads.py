"""What a relay session keeps of its requests: each distinct message once, in a tree of histories.

A request is taken apart into its messages and the rest (settings, tools, system text), which is
interned whole, since agents send it again and again. What a tip (tips.py) says already is not read
again; behind it messages are found by the hash of their bytes, and what is known is neither copied
nor looked into. Long stretches (images, long texts) are blobs apart from the message around them,
so that a moved cache marker keeps no image twice, and sessions share them. Invariant: memory is
linear in distinct messages, and every request can be told again. Driven by session.py.
"""

import codecs
import re
import secrets
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.engine.pieces import size_of
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ROLES
from rollmesh.runtime.forks import ForkCause
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES, Piece, cut, held, joined, says
from rollmesh.serve.interception.relay.tips import Following, Tip

MAX_TIPS = 4
"""Histories that are known by their bytes: the main line, a sub-agent or two, a title."""
TIPPED_BYTES = 4096
"""A shorter body is sooner read than compared."""
MAX_JOINED_BYTES = 64 * 1024
"""A body up to this is forwarded in one piece, which is cheaper than many short ones."""
SPOT_BYTES = 600
"""What a message takes beside its bytes: the spot, its place in two tables."""

STEP_BYTES = 2**20
"""Text is checked in such steps, since Python needs up to four bytes for each of it."""

_MAX_LINES = 16
"""Held lines that a request is compared with for the cause of its fork."""

_HISTORIES = ("messages", "input", "prompt")
_BLANKS = b" \t\r\n"
_GAP = re.compile(rb"[ \t\r\n]*,?[ \t\r\n]*")
_FIRST = b"[%d" % secrets.randbits(62)
"""Stands for the messages that a tip has already: what follows reads as it does behind them. A
body that has its history twice does not know it."""

Place = tuple[bytes, int, int]
"""A message, as a text and where it begins and ends there."""
Message = bytes | memoryview
"""A view of one that is long, so that what is known is not copied."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Spot:
    """A history up to and with one message."""

    __slots__ = ("asked", "children", "depth", "is_continued", "number", "parent", "pieces")

    def __init__(self, parent: "Spot | None", pieces: tuple[Piece, ...]) -> None:
        self.parent = parent
        self.pieces = pieces
        """The message as JSON."""
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[int, Spot] | None = None
        """By the hash of their messages."""
        self.asked: Request | None = None
        """The newest request that ended here."""
        self.is_continued = False
        """A later request went on from here."""
        self.number = -1
        """Of those that deeds have told."""

    def messages(self) -> list[tuple[Piece, ...]]:
        """The history, message by message."""
        found: list[tuple[Piece, ...]] = []
        spot = self
        while spot.parent is not None:
            found.append(spot.pieces)
            spot = spot.parent
        return found[::-1]


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request as it is kept."""

    spot: Spot
    settings: Piece
    """A JSON object: all keys but the history's, tools and system text."""
    tools: Piece
    system: Piece
    fork: str
    """Why it did not go on from an earlier request; '' if it did, or is the first."""

    def asks_the_same(self, other: "Request") -> bool:
        """Whether both would be one body, but for the order of keys and white space."""
        mine = (self.settings, self.tools, self.system)
        return self.spot is other.spot and mine == (other.settings, other.tools, other.system)


class Taken(NamedTuple):
    """A body that came in."""

    request: Request | None
    """None where it is no JSON object."""
    pieces: Sequence[Piece]
    """The same bytes, to be forwarded; of a long one, what the session holds anyway."""


class _Role(msgspec.Struct):
    role: str = ""


class _Read(NamedTuple):
    """A body, as far as it had to be read."""

    fields: dict[str, msgspec.Raw]
    """All but the history."""
    joint: Spot
    """The last spot of the history that was there before."""
    spot: Spot
    """Its end."""
    tip: Tip | None
    """Stands for its history from now on."""
    rest: bytes
    """Of the body behind that; all of it without a tip."""


class Threads:
    """One per session."""

    def __init__(self, tipped_bytes: int = TIPPED_BYTES) -> None:
        """Shorter bodies than `tipped_bytes` are read whole."""
        self.num_blob_bytes = 0
        """Of the blobs held, which other sessions may hold, too."""
        self.root = Spot(None, ())
        self._tips: deque[Tip] = deque(maxlen=MAX_TIPS)
        self._messages: dict[int, tuple[Piece, ...]] = {}
        """By the hash of their bytes."""
        self._kept: dict[bytes, bytes] = {}
        """Settings, tools and system texts."""
        self._blobs: set[Blob] = set()
        self._num_text_bytes = 0
        self._tipped_bytes = tipped_bytes
        self._is_first = True
        self._kinds: set[tuple[Piece, Piece]] = set()
        """Tools and system texts of all requests."""

    @property
    def num_bytes(self) -> int:
        """Held beside the blobs."""
        return self._num_text_bytes + sum([tip.num_text_bytes for tip in self._tips])

    def follow(self, num_bytes: int = sys.maxsize) -> Following:
        """Of the next body, of which so many bytes are all there is."""
        return Following(self._tips if num_bytes >= self._tipped_bytes else ())

    def hold(self, body: Following) -> Taken:
        """Keep what is new in a body that has come in."""
        try:
            read = self._read_on(body) or self._read(body)
        except DECODE_ERRORS:
            return Taken(None, body.pieces())
        fields, spot = read.fields, read.spot
        tools, system = (self._keep(bytes(fields.pop(key, b""))) for key in ("tools", "system"))
        settings = b",".join([b"%b:%b" % (_encode(k), bytes(v)) for k, v in fields.items()])
        cause = self._fork(read.joint, spot, tools, system)
        spot.asked = Request(spot, self._keep(b"{%b}" % settings), tools, system, cause)
        self._is_first = False
        if body.whole is not None and len(body.whole) <= MAX_JOINED_BYTES:
            return Taken(spot.asked, (body.whole,))
        before = read.tip.pieces if read.tip else []
        if sum(map(size_of, before)) <= MAX_JOINED_BYTES:
            return Taken(spot.asked, (joined([*before, read.rest]),))
        return Taken(spot.asked, [*before, read.rest])

    def hold_again(
        self, spot: Spot, messages: Sequence[bytes], rest: Sequence[bytes], fork: str
    ) -> tuple[Request, list[Spot]]:
        """A request that another process held: these messages behind `spot`, with settings, tools
        and system text; and the spots of the messages."""
        joint, end = self._go(spot, [(text, 0, len(text)) for text in messages])
        settings, tools, system = map(self._keep, rest)
        self._fork(joint, end, tools, system)
        end.asked = Request(end, settings, tools, system, fork)
        self._is_first = False
        return end.asked, _line(end, len(messages))

    def forget(self) -> None:
        """Let go of everything, at once and without the garbage collector."""
        spots = [self.root]
        while spots:
            spot = spots.pop()
            spots += (spot.children or {}).values()
            spot.parent = spot.children = spot.asked = None
        self._tips.clear()
        self._messages.clear()
        self._kept.clear()
        self._kinds.clear()
        self._blobs.clear()
        self._num_text_bytes = self.num_blob_bytes = 0

    def _read_on(self, body: Following) -> _Read | None:
        """A body that begins with a tip's: only the rest is read, as if nothing were held."""
        tip = body.tip
        if tip is None:
            return None
        num_messages = tip.ends_before(body.num_matched)
        for num_same in range(num_messages, max(0, num_messages - 2), -1):
            rest = body.since(tip.stop_of(num_same))
            if rest.lstrip(_BLANKS)[:1] in (b",", b"]"):
                break
        else:
            return None
        _check_text(rest)
        fields = _fields.decode(b"%b%b%b" % (tip.opening, _FIRST, rest))
        history = fields.pop(tip.key)
        if bytes(memoryview(history)[: len(_FIRST)]) != _FIRST:
            return None
        if num_same < len(tip.spots):
            tip = tip.up_to(num_same)
        elif tip in self._tips:
            self._tips.remove(tip)
        return self._walk(tip, rest, 0, _elements.decode(history)[1:], fields)

    def _read(self, body: Following) -> _Read:
        raw = body.since(0)
        _check_text(raw)
        fields = _fields.decode(raw)
        key = next((key for key in _HISTORIES if key in fields), "")
        history = fields.pop(key) if key else msgspec.Raw(b"[]")
        if bytes(memoryview(history)[:1]) != b"[":
            joint, spot = self._go(self.root, [_alone(history)])
            return _Read(fields, joint, spot, None, raw)
        elements = _elements.decode(history)
        is_long = len(raw) >= self._tipped_bytes and elements
        opened = re.search(rb'"%b"\s*:\s*\[' % key.encode(), raw) if is_long else None
        at = opened.end() - 1 if opened else 0
        if not opened or not raw.startswith(history, at):
            joint, spot = self._go(self.root, map(_alone, elements))
            return _Read(fields, joint, spot, None, raw)
        tip = Tip(raw[:at], key)
        return self._walk(tip, raw, at + 1, elements, fields)

    def _walk(
        self,
        tip: Tip,
        text: bytes,
        at: int,
        elements: Sequence[msgspec.Raw],
        fields: dict[str, msgspec.Raw],
    ) -> _Read:
        """These messages behind those of `tip`, which is the newest then; `text` has them from
        byte `at` on."""
        start = tip.spots[-1] if tip.spots else self.root
        joint = spot = start
        if elements:
            spans = _spans(text, at, elements)
            joint, spot = self._go(start, [(text, *span) for span in spans])
            tip.grow(text, spans, _line(spot, len(spans)))
            at = spans[-1][1]
        self._tips.append(tip)
        return _Read(fields, joint, spot, tip, text[at:])

    def _go(self, spot: Spot, places: Iterable[Place]) -> tuple[Spot, Spot]:
        """The last spot of the history that was there before, and its end, from `spot` on."""
        joint = None
        for place in places:
            message = _seen(place)
            key = at = hash(message)
            children = spot.children = {} if spot.children is None else spot.children
            while (child := children.get(at)) is not None and not says(child.pieces, message):
                at += 1
            if child is None:
                joint = joint or spot
                child = children[at] = Spot(spot, self._pieces(key, message, place))
                self._num_text_bytes += SPOT_BYTES
            spot = child
        return joint or spot, spot

    def _pieces(self, key: int, message: Message, place: Place) -> tuple[Piece, ...]:
        """Of a message, which may be known from another history."""
        known = self._messages.get(key)
        if known is not None and says(known, message):
            return known
        pieces = self._messages[key] = cut(*place)
        for piece in pieces:
            self._count(piece)
        return pieces

    def _keep(self, raw: bytes) -> Piece:
        if (kept := self._kept.get(raw)) is not None:
            return kept
        piece = held(raw)
        if isinstance(piece, bytes):
            self._kept[piece] = piece
        self._count(piece)
        return piece

    def _count(self, piece: Piece) -> None:
        if isinstance(piece, bytes):
            self._num_text_bytes += len(piece)
        elif piece not in self._blobs:
            self._blobs.add(piece)
            self.num_blob_bytes += piece.num_bytes

    def _fork(self, joint: Spot, spot: Spot, tools: Piece, system: Piece) -> str:
        """Fork cause (docs/explanation/forks.md) by requests alone; answers are not parsed yet."""
        base = joint
        while base.asked is None and base.parent is not None:
            base = base.parent
        was_continued = base.is_continued
        base.is_continued = was_continued or base is not spot
        is_known_kind = (tools, system) in self._kinds
        self._kinds.add((tools, system))
        if base.asked is None:
            if self._is_first:
                return ""
            return _cause_of_new_talk(joint, spot) if is_known_kind else ForkCause.OTHER_CHAT
        if tools != base.asked.tools:
            return ForkCause.TOOLS_CHANGED
        if system != base.asked.system:
            return ForkCause.SYSTEM_CHANGED
        if not was_continued or base is spot:
            return ""
        if cause := _cause_of_echo(joint, spot):
            return cause
        is_dropped = joint is base and _role(_new(joint, spot)[0]) == "user"
        return ForkCause.COMPACTED if is_dropped else ForkCause.REWOUND


def _cause_of_new_talk(joint: Spot, spot: Spot) -> str:
    """The cause of a history that shares no request with what is held, its tools the same."""
    new = _new(joint, spot)
    if not joint.depth and new and _role(new[0]) == "system":
        old = [child for each in _others(joint, new[0]) for child in (each.children or {}).values()]
        is_same_talk = any(child.pieces is after.pieces for after in new[1:2] for child in old)
        return ForkCause.SYSTEM_CHANGED if is_same_talk else ForkCause.OTHER_CHAT
    if cause := _cause_of_echo(joint, spot):
        return cause
    is_cut = any(_role(each) == "user" for each in _line(joint, joint.depth))
    return ForkCause.COMPACTED if is_cut else ForkCause.RESTARTED


def _cause_of_echo(joint: Spot, spot: Spot) -> str:
    """Edited if a message behind `joint` is in its old place on a held line, compacted if an answer
    moved; '' if neither is found."""
    new = _new(joint, spot)
    has_moved = False
    for other_line in _others(joint, new[0]) if new else ():
        old = [other_line]
        while old[-1].children:
            old.append(next(reversed(old[-1].children.values())))
        if any(one.pieces is other.pieces for one, other in zip(old, new, strict=False)):
            return ForkCause.EDITED
        held_pieces = {id(each.pieces) for each in old}
        answers = [each for each in new if id(each.pieces) in held_pieces]
        has_moved = has_moved or any(_role(each) == "assistant" for each in answers)
    return ForkCause.COMPACTED if has_moved else ""


def _new(joint: Spot, spot: Spot) -> list[Spot]:
    """The messages behind `joint`."""
    return _line(spot, spot.depth - joint.depth)


def _others(spot: Spot, child: Spot) -> list[Spot]:
    """The newest children of a spot besides `child`."""
    children = list((spot.children or {}).values())[-_MAX_LINES:]
    return [each for each in reversed(children) if each is not child]


def _role(spot: Spot) -> str:
    """The role of a message: system, user, assistant, tool; '' if it has none."""
    try:
        message = msgspec.json.decode(joined(spot.pieces), type=_Role)
    except msgspec.MsgspecError:
        return ""
    return ROLES.get(message.role, message.role)


def _spans(text: bytes, at: int, elements: Iterable[msgspec.Raw]) -> list[tuple[int, int]]:
    """Where a list's elements begin and end in `text`, the first at or behind byte `at`."""
    spans = []
    for raw in elements:
        gap = _GAP.match(text, at)
        assert gap
        start = gap.end()
        at = start + len(memoryview(raw))
        spans.append((start, at))
    return spans


def _alone(raw: msgspec.Raw) -> Place:
    """One that is read out of its body."""
    text = bytes(raw)
    return text, 0, len(text)


def _seen(place: Place) -> Message:
    text, start, stop = place
    return text[start:stop] if stop - start < MIN_BLOB_BYTES else memoryview(text)[start:stop]


def _line(spot: Spot, num_messages: int) -> list[Spot]:
    """The last so many spots of a history."""
    found: list[Spot] = []
    while len(found) < num_messages:
        found.append(spot)
        assert spot.parent
        spot = spot.parent
    return found[::-1]


def _check_text(raw: bytes) -> None:
    """UnicodeDecodeError where it is none: what is kept unopened must come out as text."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(raw), STEP_BYTES):
        decoder.decode(raw[at : at + STEP_BYTES])
    decoder.decode(b"", final=True)
