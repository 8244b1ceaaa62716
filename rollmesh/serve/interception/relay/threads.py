"""What a relay session keeps of its requests: each distinct message once, in a tree of histories.

A request is taken apart into its messages and the rest (settings, tools, system text), which is
interned whole, since agents send it again and again. A body that begins as an earlier one did, up
to the end of its messages, is read from there on: one comparison, whatever the history's length.
Others are walked message by message. Long runs of base64
(images) are interned apart from the message around them, so that a moved cache marker does not keep
an image twice. Invariant: memory is linear in distinct messages, and every request can be told
again. Driven by session.py.
"""

import re
from collections import deque

import msgspec

MAX_TIPS = 4
"""Histories that are recognised by their bytes: the main line, a sub-agent or two, a title."""
MAX_TIP_BYTES = 2**20
"""Longer histories (images) are walked: they are not kept a second time."""
MIN_BLOB_BYTES = 1024

_HISTORIES = ("messages", "input", "prompt")
_BLOB = re.compile(rb"([A-Za-z0-9+/=_-]{%d,})" % MIN_BLOB_BYTES)
_BLANKS = b" \t\r\n"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Spot:
    """A history up to and with one message."""

    __slots__ = ("asked", "children", "depth", "is_continued", "parent", "pieces")

    def __init__(self, parent: "Spot | None", pieces: tuple[bytes, ...]) -> None:
        self.parent = parent
        self.pieces = pieces
        """The message as JSON; odd pieces are blobs."""
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[tuple[bytes, ...], Spot] | None = None
        self.asked: Request | None = None
        """The newest request that ended here."""
        self.is_continued = False
        """A later request went on from here."""

    def messages(self) -> list[bytes]:
        """The history as JSON, message by message."""
        found: list[bytes] = []
        spot = self
        while spot.parent is not None:
            found.append(b"".join(spot.pieces))
            spot = spot.parent
        return found[::-1]


class Request(msgspec.Struct, frozen=True, eq=False):
    """A request as it is kept."""

    spot: Spot
    settings: bytes
    """A JSON object: all keys but the history's, tools and system text."""
    tools: bytes
    system: bytes
    fork: str
    """Why it did not go on from an earlier request; '' if it did, or is the first."""

    def asks_the_same(self, other: "Request") -> bool:
        """Whether both would be one body, but for the order of keys and white space."""
        mine = (self.settings, self.tools, self.system)
        return self.spot is other.spot and mine == (other.settings, other.tools, other.system)


class _Tip(msgspec.Struct, frozen=True, eq=False):
    """The newest request of a history that grows."""

    start: bytes
    """Its body up to where the history's array opens."""
    head: bytes
    """Its body up to the end of the array's last element."""
    key: str
    spot: Spot


class _Read(msgspec.Struct, frozen=True, eq=False):
    """A body, as far as it had to be read."""

    fields: dict[str, msgspec.Raw]
    """All but the history."""
    joint: Spot
    """The last spot of the history that was there before."""
    spot: Spot
    """Its end."""


class Threads:
    """One per session."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Held."""
        self._root = Spot(None, ())
        self._tips: deque[_Tip] = deque(maxlen=MAX_TIPS)
        self._kept: dict[bytes, bytes] = {}
        self._is_first = True

    def hold(self, body: bytes) -> Request | None:
        """Keep what is new in a request; None where its body is no JSON object."""
        try:
            if not body.isascii():
                body.decode()  # what is kept unopened must come out as text
            read = self._read_on(body) or self._read(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        fields, spot = read.fields, read.spot
        tools, system = (bytes(fields.pop(key, b"")) for key in ("tools", "system"))
        settings = b",".join([b"%b:%b" % (_encode(k), bytes(v)) for k, v in fields.items()])
        cause = self._fork(read.joint, spot, tools, system)
        spot.asked = Request(
            spot, self._keep(b"{%b}" % settings), self._keep(tools), self._keep(system), cause
        )
        self._is_first = False
        return spot.asked

    def forget(self) -> None:
        """Let go of everything, at once and without the garbage collector."""
        spots = [self._root]
        while spots:
            spot = spots.pop()
            spots += (spot.children or {}).values()
            spot.parent = spot.children = spot.asked = None
        self._tips.clear()
        self._kept.clear()

    def _read_on(self, body: bytes) -> _Read | None:
        """A body that begins with a held one's: only the rest is read, as if nothing were held."""
        for tip in reversed(self._tips):
            if not body.startswith(tip.head):
                continue
            rest = body[len(tip.head) :]
            new = rest.lstrip(_BLANKS)
            if new[:1] not in (b",", b"]"):
                continue
            new = new[1:] if new[:1] == b"," else new
            fields = _fields.decode(tip.start + b"[" + new)
            history = bytes(fields.pop(tip.key))
            joint, spot = self._walk(tip.spot, history)
            self._tips.remove(tip)
            end = len(body) - len(new) + len(history) - len(b"[]")
            self._add_tip(_Tip(tip.start, body[:end].rstrip(_BLANKS), tip.key, spot))
            return _Read(fields, joint, spot)
        return None

    def _read(self, body: bytes) -> _Read:
        fields = _fields.decode(body)
        key = next((key for key in _HISTORIES if key in fields), "")
        history = bytes(fields.pop(key)) if key else b"[]"
        joint, spot = self._walk(self._root, history)
        opened = re.search(rb'"%b"\s*:\s*\[' % key.encode(), body) if spot.depth else None
        if opened is not None:
            at = opened.end() - 1
            if body[at : at + len(history)] == history:
                head = body[: at + len(history) - 1].rstrip(_BLANKS)
                self._add_tip(_Tip(body[:at], head, key, spot))
        return _Read(fields, joint, spot)

    def _add_tip(self, tip: _Tip) -> None:
        if len(tip.head) <= MAX_TIP_BYTES:
            self._tips.append(tip)

    def _walk(self, spot: Spot, history: bytes) -> tuple[Spot, Spot]:
        """The last spot of the history that was there before, and its end, from `spot` on."""
        is_list = history.startswith(b"[")
        joint = None
        for raw in _elements.decode(history) if is_list else [msgspec.Raw(history)]:
            pieces = self._cut(bytes(raw))
            child = (spot.children or {}).get(pieces)
            if child is None:
                joint = joint or spot
                child = Spot(spot, tuple([self._keep(piece) for piece in pieces]))
                spot.children = spot.children or {}
                spot.children[child.pieces] = child
            spot = child
        return joint or spot, spot

    def _cut(self, raw: bytes) -> tuple[bytes, ...]:
        return tuple(_BLOB.split(raw)) if len(raw) > MIN_BLOB_BYTES else (raw,)

    def _keep(self, raw: bytes) -> bytes:
        kept = self._kept.setdefault(raw, raw)
        if kept is raw:
            self.num_bytes += len(raw)
        return kept

    def _fork(self, joint: Spot, spot: Spot, tools: bytes, system: bytes) -> str:
        """An answer that the agent edited is not seen here: nobody has read the answers yet."""
        base = joint
        while base.asked is None and base.parent is not None:
            base = base.parent
        was_continued = base.is_continued
        base.is_continued = was_continued or base is not spot
        if base.asked is None:
            return "" if self._is_first else "history_changed" if joint.depth else "restarted"
        if tools != base.asked.tools:
            return "tools_changed"
        if system != base.asked.system:
            return "system_changed"
        return "rewound" if was_continued and base is not spot else ""
