"""The disk under a simulated trainer's journal: its segments, which outlive the process.

- A record is whole or absent. A process may be killed just before or after each of its writes.
- Each write is reported at once to the checks, which thus know it even if its writer dies.
"""

from collections.abc import Callable, Iterator, Sequence

from rollmesh.core.errors import JournalError
from rollmesh.testing.mesh_sim.kernel import Killed, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Buffer

SEGMENT_BYTES = 1500
HEAD_BYTES = 16
"""Overhead of a record, beside its frames and four bytes for each."""


class _Segment:
    def __init__(self, start: int) -> None:
        self.start = start
        self.records: dict[int, list[bytes]] = {}


class SimDisk:
    """A disk with the methods of core/journal.py's Journal."""

    def __init__(self, owner: Node, network: Network) -> None:
        self.on_write: Callable[[list[bytes]], None] = lambda _frames: None
        self._owner = owner
        self._network = network
        self._segments: list[_Segment] = []
        self._end = 0
        self.most_bytes = 0
        """Largest number of bytes at one time."""

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._end - (self._segments[0].start if self._segments else self._end)

    @property
    def end(self) -> int:
        """Position of the next record."""
        return self._end

    def append(self, frames: Sequence[Buffer]) -> int:
        """Write one record, or be killed, or raise because the disk is full."""
        if self._network.strikes("killed_before_write"):
            raise Killed(self._owner)
        if self._network.strikes("disk_full"):
            raise JournalError("the disk is full")
        if not self._segments or self._end - self._segments[-1].start >= SEGMENT_BYTES:
            self._segments.append(_Segment(self._end))
        written = [bytes(frame) for frame in frames]
        position = self._end
        self._segments[-1].records[position] = written
        self._end += HEAD_BYTES + sum(4 + len(frame) for frame in written)
        self.most_bytes = max(self.most_bytes, self.size_bytes)
        self.on_write(written)
        if self._network.strikes("killed_after_write"):
            raise Killed(self._owner)
        return position

    def replay(self) -> Iterator[tuple[int, list[bytes]]]:
        """Return every record with its position."""
        for segment in self._segments:
            yield from segment.records.items()

    def read(self, position: int) -> list[bytes]:
        """Return the record at `position`; JournalError if it was removed."""
        for segment in self._segments:
            if position in segment.records:
                return segment.records[position]
        raise JournalError(f"of position {position} nothing is left")

    def can_drop_before(self, position: int) -> bool:
        """Return whether a segment holds only records before `position`."""
        return len(self._segments) > 1 and self._segments[1].start <= position

    def drop_before(self, position: int) -> None:
        """Remove the segments that hold only records before `position`."""
        while self.can_drop_before(position):
            del self._segments[0]

    def close(self) -> None:
        """The process that writes it has ended."""
