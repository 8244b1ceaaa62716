"""What a relay session keeps of its requests: each distinct message once, in a tree of histories.

A request is taken apart into its messages and the rest (settings, tools, system text), which is
interned whole, since agents send it again and again. A history that grows at its end is recognised
by its bytes: only what is new is split. Others are walked message by message. Long runs of base64
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

    head: bytes
    """The array's bytes, without the bracket that closes it."""
    spot: Spot


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
            fields = _fields.decode(body)
            history = next((bytes(fields.pop(key)) for key in _HISTORIES if key in fields), b"[]")
            joint, spot = self._place(history)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        tools, system = (bytes(fields.pop(key, b"")) for key in ("tools", "system"))
        settings = b",".join([b'"%b":%b' % (k.encode(), bytes(v)) for k, v in fields.items()])
        cause = self._fork(joint, spot, tools, system)
        spot.asked = Request(
            spot, self._keep(b"{%b}" % settings), self._keep(tools), self._keep(system), cause
        )
        self._is_first = False
        return spot.asked

    def _place(self, history: bytes) -> tuple[Spot, Spot]:
        """The last spot of the history that was there before, and its end."""
        for tip in reversed(self._tips):
            if history.startswith(tip.head):
                rest = history[len(tip.head) :].lstrip(_BLANKS)
                if rest[:1] in (b",", b"]"):
                    joint, spot = self._walk(tip.spot, b"[" + rest.lstrip(b","))
                    self._tips.remove(tip)
                    break
        else:
            joint, spot = self._walk(self._root, history)
        head = history.rstrip(_BLANKS)[:-1].rstrip(_BLANKS)
        if len(head) > 1 and history.startswith(b"[") and len(head) <= MAX_TIP_BYTES:
            self._tips.append(_Tip(head, spot))
        return joint, spot

    def _walk(self, spot: Spot, history: bytes) -> tuple[Spot, Spot]:
        """As `_place`, from `spot` on."""
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
