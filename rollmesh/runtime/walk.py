"""One request's way down the trie of what a session holds, unit by unit.

A unit is looked up by its bytes, and only where these are new is it read and looked up by meaning.
Invariants: a walk changes nothing of the trie; what it learned (aliases) is for history.py to hold;
units up to the last answer that is held are let go as it passes them.
Driven by history.py.
"""

from collections.abc import Iterable

import msgspec

from rollmesh.runtime.chat import ChatMessage, Rotating
from rollmesh.runtime.keys import unit_key
from rollmesh.runtime.readings import Readings
from rollmesh.runtime.spot import Spot
from rollmesh.runtime.stretches import Stretch
from rollmesh.runtime.turns import ReadUnit


class Alias(msgspec.Struct, frozen=True):
    """A unit whose bytes were new and whose meaning was not."""

    start: Spot
    unit: bytes
    spot: Spot
    messages: list[ChatMessage]


class Renamed(msgspec.Struct, frozen=True):
    """A unit that another process knew, and what its bytes hash to in this one."""

    start: Spot
    key: int
    spot: Spot


class Walk:
    """One request's way down the trie, unit by unit."""

    __slots__ = (
        "aliases", "anchor", "array", "array_start", "is_stopped", "num_leapt", "pending",
        "read", "readings", "renamed", "rotating", "spot", "stretch", "units",
    )  # fmt: skip

    def __init__(
        self, start: Spot, read: ReadUnit, rotating: Rotating, readings: Readings | None
    ) -> None:
        self.spot = start
        self.anchor: Spot | None = start if start.sampled or start.parent is None else None
        """The last sampled message on the way; None while none is known."""
        self.units: list[bytes] = []
        """Those behind the anchor."""
        self.num_leapt = 0
        """Position of the first of `units`; in an array, elements count from 0."""
        self.pending: dict[int, list[ChatMessage]] = {}
        """What was read on the way, by place in `units`."""
        self.aliases: list[Alias] = []
        self.renamed: list[Renamed] | None = None
        """None where the history was made in this process alone."""
        self.is_stopped = False
        """The next message is not held."""
        self.array = b""
        """The request's array of units, the spot that it follows, and what is known of it."""
        self.array_start: Spot | None = None
        self.stretch: Stretch | None = None
        self.read = read
        self.readings = readings
        self.rotating = rotating

    @property
    def num_units(self) -> int:
        """Of the request, or of its array, up to here."""
        return self.num_leapt + len(self.units)

    def go(self, units: Iterable[bytes]) -> None:
        """Walk on while units are known."""
        for unit in units:
            self.units.append(unit)
            if not self.is_stopped:
                self._step(unit)

    def leap(self, stretch: Stretch, array: bytes) -> "Walk | None":
        """The same walk over a known stretch; None where what lies in it has to be read."""
        walk = Walk(stretch.end, self.read, self.rotating, self.readings)
        walk.aliases = list(self.aliases)
        walk.renamed = None if self.renamed is None else list(self.renamed)
        walk.num_leapt, walk.stretch = stretch.num_units, stretch
        walk.go(stretch.rest(array))
        if walk.anchor is None and (walk.is_stopped or walk.spot.asked() is None):
            return None
        return walk

    def messages_of(self, place: int) -> list[ChatMessage]:
        """The messages of the unit at `place`."""
        found = self.pending.get(place)
        return self._read(place) if found is None else found

    def _read(self, place: int) -> list[ChatMessage]:
        unit = self.units[place]
        found = self.readings.find(self.read, unit) if self.readings else None
        return self.read(unit, self.num_leapt + place) if found is None else found

    def _step(self, unit: bytes) -> None:
        if not self.spot.children:
            self.is_stopped = True
            return
        if child := self.spot.child(hash(unit)):
            return self._arrive(child)
        if self.renamed is not None and (child := self.spot.child(unit_key(unit))):
            self.renamed.append(Renamed(self.spot, hash(unit), child))
            return self._arrive(child)
        place = len(self.units) - 1
        messages = self.pending[place] = self._read(place)
        start = self.spot
        for message in messages:
            found = self.spot.find(message.meanings(self.rotating))
            if found is None:
                self.is_stopped = True
                return
            self.spot = found
        self._arrive(self.spot)
        self.aliases.append(Alias(start, unit, self.spot, messages))

    def _arrive(self, spot: Spot) -> None:
        self.spot = spot
        if spot.sampled:
            self.anchor = spot
            self.num_leapt += len(self.units)
            self.units.clear()
            self.pending.clear()
