"""A history up to and with one message: the node of the trie that history.py owns.

    root --system--> . --user--> [context node] --assistant--> [sampled node] --tool--> [context]

Invariants: a spot knows the graph node whose tokens end with its message, if one does; a request
that ends with the model's own answer gets a bare spot behind it, without a message, so that the
answer's spot keeps its node, and lookups see through it. A long message is a blob, which other
spots and sessions may share. Driven by history.py and walk.py.
"""

from collections.abc import Iterable

from rollmesh.runtime.blobs import Blob

NO_NODE = -1
NO_NUMBER = -1
"""Of a root, and of a spot that is not in the trie yet."""
BARE = hash("asked with nothing new after an answer")


class Spot:
    """A history up to and with one message."""

    __slots__ = (
        "__weakref__", "children", "continued", "depth", "node", "number", "parent", "said",
        "sampled",
    )  # fmt: skip

    def __init__(self, parent: "Spot | None", said: bytes | Blob) -> None:
        self.follow(parent, said)
        self.children: dict[int, Spot] | None = None
        """By meanings, and by the hashes of units that lead there or further down."""
        self.node = NO_NODE
        """The graph node that ends with this message (a context's also ends the prompt)."""
        self.number = NO_NUMBER
        """Of the spots of its session, in the order in which they were made."""
        self.sampled = False
        """This message is one that the model sampled here."""
        self.continued = False
        """The model has answered a request that went on from this answer."""

    def follow(self, parent: "Spot | None", said: bytes | Blob) -> None:
        """Stand behind `parent`, for one message more."""
        self.parent = parent
        self.depth: int = (parent.depth if parent else 0) + bool(said)
        """Messages up to and with this one."""
        self.said = said
        """The message in the common shape; empty at a root and at a bare spot."""

    @property
    def raw(self) -> bytes:
        """The same, read."""
        return self.said if isinstance(self.said, bytes) else self.said.read()

    def child(self, key: int) -> "Spot | None":
        if not self.children:
            return None
        found = self.children.get(key)
        if found is None and (bare := self.children.get(BARE)) is not None:
            return bare.child(key)
        return found

    def find(self, keys: Iterable[int]) -> "Spot | None":
        """The child under the first key that has one."""
        if not self.children:
            return None
        return next((found for key in keys if (found := self.child(key)) is not None), None)

    def adopt(self, spot: "Spot", keys: Iterable[int]) -> None:
        """Make `spot` a child under each key; a newer sibling of the same meaning wins."""
        if self.children is None:
            self.children = {}
        for key in keys:
            self.children[key] = spot

    def line(self) -> "list[Spot]":
        """The spots of this history that have a message, in order."""
        spots: list[Spot] = []
        spot: Spot | None = self
        while spot is not None:
            if spot.said:
                spots.append(spot)
            spot = spot.parent
        spots.reverse()
        return spots

    def anchor(self) -> "Spot":
        """The last sampled message of this history, else its root."""
        spot = self
        while not spot.sampled and spot.parent is not None:
            spot = spot.parent
        return spot

    def asked(self) -> "Spot | None":
        """The spot whose node a request that ends with this message was sampled after."""
        spot = self.child(BARE) if self.sampled else self
        return spot if spot is not None and spot.node != NO_NODE else None
