"""Which part of a request's messages the session already holds as exact tokens.

Owns a trie of messages: each Spot (spot.py) is a history up to one message and knows the graph node
whose tokens end there, if one does. A request walks down it (walk.py); an array of units that
begins like one seen before is not even split (stretches.py). Codex shows a cut answer and the next
one as adjacent items, which are one message: that leads to the newer's spot too. Invariants: each
distinct message is stored once, in the common shape, whatever dialect brought it, a long one as a
blob; further spellings are remembered by hash alone, at most ALIASES_PER_SPOT of them per spot.
`match` changes nothing, so that it may run twice, or only to count. Driven by holdings.py.
"""

import bisect
from typing import NamedTuple

import msgspec

from rollmesh.core.memo import Memo
from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import ChatMessage, Rotating, read_held, read_tools
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.match import Match, conclude, read_chat
from rollmesh.runtime.openings import Line, Link
from rollmesh.runtime.readings import Readings
from rollmesh.runtime.spot import BARE, Spot
from rollmesh.runtime.stretches import Stretches, split_array
from rollmesh.runtime.turns import Turn
from rollmesh.runtime.walk import Walk

ALIASES_PER_SPOT = 4
LONG_BYTES = 16 * 1024
"""Messages from here on are blobs, which siblings share."""
SPOT_BYTES = 500
"""What a spot takes beside its message: itself, its children and the keys that lead to it, as
tracemalloc counts them (487 over 1,000 spots with an alias to every second)."""


class _LateAnswer(NamedTuple):
    """A sampled message on its way into the trie."""

    context: Spot
    message: ChatMessage
    node: int
    is_void: bool


class History:
    """One per session."""

    __slots__ = (
        "_begun", "_late", "_long", "_num_aliases", "_num_late_bytes",
        "_num_short_bytes", "_num_spots", "_numbered", "_readings", "_stretches", "blob_bytes",
        "images", "roots", "rotating", "sampled",
    )  # fmt: skip

    def __init__(self, rotating: Rotating = None) -> None:
        self.rotating = rotating
        self.roots: dict[int, Spot] = {}
        """By the meaning of the tools on offer."""
        self.sampled: list[Spot] = []
        """Answers of the model, in order."""
        self.images: dict[str, ImageRef] = {}
        """Those that held messages show, by digest."""
        self.blob_bytes = 0
        """Of images and long messages, each counted once, though other sessions may hold it too."""
        self._long: set[Blob] = set()
        self._num_short_bytes = 0
        self._begun: tuple[Line, Spot] | None = None
        """The opening and its end, while nothing has asked for more than that."""
        self._late: list[_LateAnswer] = []
        """Answers that nothing has asked for yet."""
        self._num_late_bytes = 0
        self._stretches = Stretches()
        self._readings: Readings | None = None
        """Made for the first unit that shows an image."""
        self._num_aliases = 0
        self._num_spots = 0
        self._numbered: list[Spot] | None = None
        """By their numbers, where it is made again of what another process did."""

    def match(self, turn: Turn, start: Spot | None = None) -> Match:
        """Find the deepest held history that `turn` begins with; SessionError 400 if unreadable.

        From `start` on where it is given, else from the root of the turn's tools.
        """
        self.catch_up()
        tools_key = tools_key_of(turn.tools)
        root = start or self.roots.get(tools_key) or Spot(None, b"")
        walk = self._walk_from(root, turn)
        walk.go(turn.messages)
        if turn.messages_raw:
            walk = self._walk_array(walk, turn.messages_raw)
        return conclude(walk, tools_key)

    def from_root(self, match: Match, turn: Turn) -> Match:
        """The same request on no held history at all."""
        root = self.roots.get(match.tools_key) or Spot(None, b"")
        walk = self._walk_from(root, turn)
        walk.is_stopped = True
        walk.go(turn.messages)
        if turn.messages_raw:
            walk.go(split_array(turn.messages_raw))
        walk.array, walk.array_start = match.walk.array, match.walk.array_start
        walk.stretch = match.walk.stretch
        again = conclude(walk, match.tools_key)
        again.deepest = match.deepest
        return again

    def hold(self, match: Match, node: int) -> Spot:
        """Hold the matched request's new messages; `node` ends with the last of them."""
        for alias in match.walk.aliases:
            self._add_alias(alias.start, hash(alias.unit), alias.spot)
        for each in match.walk.renamed or ():
            each.start.adopt(each.spot, [each.key])
        if match.is_held:
            self._remember(match, match.deepest)
            return match.spot
        spot = match.spot
        if spot.parent is None:
            spot = self.roots.setdefault(match.tools_key, spot)
        at = 0
        for unit_key, end in match.ends:
            start = spot
            spots: list[Spot] = []
            for n in range(at, end):
                spot = self._hold_message(spot, match.new[n], match.raws[n])
                spots.append(spot)
            if spot is not start.child(unit_key):
                self._add_alias(start, unit_key, spot)
            if self.images and match.walk.array:
                self._remember_reading(match, unit_key, match.new[at:end], spots)
            at = end
        self._remember(match, spot)
        if spot.sampled:
            spot = spot.child(BARE) or self._new_spot(spot, b"", [BARE])
        spot.node = node
        return spot

    def add_sampled(
        self, context: Spot, message: ChatMessage, node: int, is_void: bool = False
    ) -> None:
        """Hold the message that the model sampled after `context`.

        Void, it is no answer, and never stands for one that says the same.
        """
        self._late.append(_LateAnswer(context, message, node, is_void))
        self._num_late_bytes += len(message.text())

    def answer_at(self, node: int) -> Spot | None:
        """The answer that was sampled as `node`; None if it is no message of a chat."""
        self.catch_up()
        at = bisect.bisect_left(self.sampled, node, key=lambda spot: spot.node)
        found = self.sampled[at] if at < len(self.sampled) else None
        return found if found and found.node == node else None

    def raws_to(self, context: Spot) -> list[bytes]:
        """The messages down to and with `context`, in the common shape."""
        if self._begun and self._begun[1] is context:
            return list(self._begun[0].raws)
        return [spot.raw for spot in context.line()]

    @property
    def num_bytes(self) -> int:
        """Of the messages held, but for blobs."""
        begun = self._begun[0].num_bytes if self._begun else 0
        texts = self._num_short_bytes + self._num_late_bytes
        return texts + begun + SPOT_BYTES * self._num_spots

    def begin(self, line: Line, node: int) -> Spot:
        """Hold a whole line, before anything else; `node` ends with the last of its messages."""
        end = Spot(None, b"")
        end.node = node
        for image in line.images.values():
            self._hold_image(image)
        self._begun = line, end
        return end

    def catch_up(self) -> None:
        """Enter into the trie what is held already; most rollouts of one turn never need it."""
        if self._begun:
            self._link(*self._begun)
            self._begun = None
        if self._late:
            late, self._late, self._num_late_bytes = self._late, [], 0
            for answer in late:
                self._add_answer(answer)

    def line(self, match: Match, spot: Spot) -> Line:
        """The line down to `spot`, which is all that there is; `match` made it."""
        spots = [self.roots[match.tools_key], *spot.line()]
        places = {each: place for place, each in enumerate(spots)}
        links = [
            Link(place, key, places[child])
            for place, each in enumerate(spots)
            for key, child in (each.children or {}).items()
        ]
        stretch = self._stretches.newest
        return Line(
            tools_key=match.tools_key,
            raws=tuple([each.raw for each in spots[1:]]),
            links=tuple(links),
            segments=stretch.segments if stretch else (),
            num_units=stretch.num_units if stretch else 0,
            ends=match.unit_ends(),
            images=dict(self.images),
        )

    def regain(self) -> list[Spot]:
        """It is made again, of what another process did: its spots, which come by their numbers."""
        self._numbered = []
        return self._numbered

    def add_way(self, start: Spot, key: int, spot: Spot) -> None:
        """A unit of this key (keys.py) leads from `start` to `spot`, as another process found."""
        self._add_alias(start, key, spot)

    def forget(self) -> None:
        """Cut the ties between spots, which hold each other."""
        spots = list(self.roots.values())
        while spots:
            spot = spots.pop()
            spots += dict.fromkeys((spot.children or {}).values())
            spot.children = None
        self.roots.clear()
        self.sampled.clear()
        self._numbered = None
        self._stretches = Stretches()
        self._readings = None
        self._late.clear()
        self._num_late_bytes = 0
        self._begun = None

    def read(self, spot: Spot) -> ChatMessage:
        """The message of a spot that has one."""
        return read_held(spot.raw, self.images)

    def _walk_from(self, root: Spot, turn: Turn) -> Walk:
        walk = Walk(root, turn.read or read_chat, self.rotating, self._readings)
        walk.renamed = None if self._numbered is None else []
        return walk

    def _walk_array(self, walk: Walk, array: bytes) -> Walk:
        start = None if walk.is_stopped else walk.spot
        walk.num_leapt = -len(walk.units)
        known = self._stretches.find(start, array) if start else None
        onward = walk.leap(known, array) if known else None
        if onward is None:
            onward = walk
            walk.go(split_array(array))
        onward.array, onward.array_start = array, start
        return onward

    def _remember(self, match: Match, end: Spot) -> None:
        walk = match.walk
        start = walk.array_start
        if start is None or (start.parent is None and start is not self.roots.get(match.tools_key)):
            return
        self._stretches.add(walk.stretch, start, walk.array, end, walk.num_units)

    def _remember_reading(
        self, match: Match, unit_key: int, messages: list[ChatMessage], spots: list[Spot]
    ) -> None:
        self._readings = self._readings or Readings(self.images)
        self._readings.keep(match.walk.read, unit_key, messages, [spot.said for spot in spots])

    def _link(self, line: Line, end: Spot) -> None:
        spots = [self.roots.setdefault(line.tools_key, Spot(None, b""))]
        for raw in line.raws[:-1]:
            spots.append(self._new_spot(spots[-1], raw, []))
        end.follow(spots[-1], self._kept(line.raws[-1]))
        spots.append(self._counted(end))
        for link in line.links:
            spots[link.start].adopt(spots[link.end], (link.key,))
        if line.segments:
            self._stretches.begin(spots[0], line.segments, end, line.num_units)

    def _add_answer(self, answer: "_LateAnswer") -> None:
        context, message = answer.context, answer.message
        keys = message.meanings()
        if answer.is_void:
            keys = [key for key in keys if context.child(key) is None]
        spot = self._new_spot(context, message.as_json(), keys)
        spot.node, spot.sampled = answer.node, True
        if not answer.is_void:
            self.sampled.append(spot)
            before = context.anchor()
            before.continued = before.sampled
        self._join(context, message, spot)

    def _hold_message(self, spot: Spot, message: ChatMessage, raw: bytes) -> Spot:
        keys = message.meanings(self.rotating) if spot.children else ()
        if child := spot.child(hash(raw)) or spot.find(keys):
            return child
        for image in message.images():
            self._hold_image(image)
        own = message.meanings(self.rotating, is_ours=False)
        return self._new_spot(spot, raw, [hash(raw), *own])

    def _join(self, spot: Spot | None, message: ChatMessage, answer: Spot) -> None:
        """Know `answer` too where it is shown as one with the assistant's messages before it."""
        while spot is not None and spot.parent is not None:
            if spot.said:
                before = self.read(spot) if b'"assistant"' in spot.raw else None
                if before is None or not before.is_text_of_assistant:
                    return
                message, above = before.joined(message), spot.parent
                keys = message.meanings(is_ours=False)
                above.adopt(answer, [key for key in keys if above.child(key) is None])
            spot = spot.parent

    def _hold_image(self, image: ImageRef) -> None:
        if image.digest not in self.images:
            self.images[image.digest] = image
            self.blob_bytes += image.num_bytes

    def _kept(self, raw: bytes) -> bytes | Blob:
        """A message as its spot holds it."""
        if len(raw) < LONG_BYTES:
            return raw
        blob = blobs.hold(raw)
        if blob not in self._long:
            self._long.add(blob)
            self.blob_bytes += blob.num_bytes
        return blob

    def _new_spot(self, parent: Spot, raw: bytes, keys: list[int]) -> Spot:
        spot = Spot(parent, self._kept(raw))
        parent.adopt(spot, keys)
        return self._counted(spot)

    def _counted(self, spot: Spot) -> Spot:
        spot.number = self._num_spots
        self._num_spots += 1
        if self._numbered is not None:
            self._numbered.append(spot)
        if isinstance(spot.said, bytes):
            self._num_short_bytes += len(spot.said)
        return spot

    def _add_alias(self, start: Spot, key: int, spot: Spot) -> None:
        if self._num_aliases < ALIASES_PER_SPOT * self._num_spots:
            self._num_aliases += 1
            start.adopt(spot, [key])


@Memo
def tools_key_of(raw: bytes) -> int:
    """The meaning of tools; 0 for none, and for an empty list."""
    tools = read_tools(raw) if raw else []
    return hash(msgspec.json.encode(tools, order="deterministic")) if tools else 0
