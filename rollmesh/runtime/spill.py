"""Where bytes lie that memory has no room for: one file without a name, in extents.

Owns the file and the map of what in it is free. Invariants: the file never has a name that another
process could see (O_TMPFILE, or unlinked at once where a file system has none), so that nothing is
left of it however its process ends; an extent is given to one owner at a time, and given again
after it was freed; the file ends with its last extent in use. A disk that is full takes nothing and
loses nothing. `write` and `free` are for one thread at a time, `read` is for any. Driven by
blobs.py.
"""

import os
import tempfile
from bisect import bisect
from pathlib import Path

import msgspec

PAGE_BYTES = 4096
"""Extents begin at whole pages, as disks write."""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A place in the file."""

    start: int
    num_bytes: int

    @property
    def stop(self) -> int:
        """Where the next may begin."""
        return self.start + -(-self.num_bytes // PAGE_BYTES) * PAGE_BYTES


class FreeSpace:
    """Which runs of a file are free, the smallest that is large enough being given first."""

    def __init__(self) -> None:
        self.end = 0
        """Of what is in use; behind it all is free."""
        self._runs: list[tuple[int, int]] = []
        """(start, stop), in order; two never touch."""

    def take(self, num_bytes: int) -> Extent:
        """An extent that is nobody's."""
        behind = Extent(self.end, num_bytes)
        wanted = behind.stop - behind.start
        sizes = [(stop - start, n) for n, (start, stop) in enumerate(self._runs)]
        fit = min([each for each in sizes if each[0] >= wanted], default=None)
        if fit is None:
            self.end = behind.stop
            return behind
        start, stop = self._runs.pop(fit[1])
        if stop - start > wanted:
            self._runs.insert(fit[1], (start + wanted, stop))
        return Extent(start, num_bytes)

    def give(self, extent: Extent) -> None:
        """It is nobody's again."""
        start, stop = extent.start, extent.stop
        place = bisect(self._runs, (start, stop))
        if place < len(self._runs) and self._runs[place][0] == stop:
            stop = self._runs.pop(place)[1]
        if place and self._runs[place - 1][1] == start:
            place -= 1
            start = self._runs.pop(place)[0]
        if stop == self.end:
            self.end = start
        else:
            self._runs.insert(place, (start, stop))


class SpillFile:
    """See the module."""

    def __init__(self, folder: Path | None) -> None:
        """In `folder`, by default the system's for temporary files; OSError where that fails."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives on
        self._space = FreeSpace()

    def write(self, content: bytes) -> Extent:
        """Where it lies from now on; OSError where the disk does not take it whole."""
        extent = self._space.take(len(content))
        try:
            rest, at = memoryview(content), extent.start
            while rest:
                num_written = os.pwrite(self.fileno(), rest, at)
                rest, at = rest[num_written:], at + num_written
        except OSError:
            self.free(extent)
            raise
        return extent

    def read(self, extent: Extent, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of what was written there; OSError if the disk lost them."""
        pieces: list[bytes] = []
        at, end = extent.start + start, extent.start + min(stop, extent.num_bytes)
        while at < end:
            piece = os.pread(self.fileno(), end - at, at)
            if not piece:
                raise OSError("the spill file is shorter than what was written to it")
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def free(self, extent: Extent) -> None:
        """Nobody reads it any more."""
        end = self._space.end
        self._space.give(extent)
        if self._space.end < end:
            os.ftruncate(self.fileno(), self._space.end)

    @property
    def num_bytes(self) -> int:
        """The length of the file, what is free between its extents included."""
        return self._space.end

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """All that it holds is gone."""
        self._file.close()
