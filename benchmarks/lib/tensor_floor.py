"""Baselines of the tensor benchmark: memcpy into warm memory, and a bare socket.

- A publish copies each array into one existing block; a fetch sends eight bytes that name a run of
  arrays, and receives their bytes in place.
- Nothing is framed, counted, matched or freed. `raw` receives into new memory, as a consumer that
  keeps the data must; `raw_warm` into the same block in each step.
"""

import itertools
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.lib.tensor_protocol import BLOCK_BYTES, Bytes, HeldBytes, Piece, Stored, sum_of

RUN = struct.Struct("<II")
"""Number of the first array, and the number of arrays."""


class Item(NamedTuple):
    """One array."""

    number: int
    num_bytes: int


class RawOwner:
    """A warm block of memory and a socket."""

    def __init__(self) -> None:
        self._pieces: Sequence[Piece] = ()
        self._block = np.empty(0, np.uint8)
        self._ends: list[int] = [0]
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="floor", daemon=True).start()

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Allocate and touch a block that is large enough."""
        self._pieces = pieces
        self._ends = [0, *itertools.accumulate(each.data.nbytes for each in pieces)]
        if self._block.nbytes < self._ends[-1]:
            self._block = np.zeros(self._ends[-1], np.uint8)
            self._block[:] = 1

    def publish(self) -> None:
        """Copy the arrays into the block."""
        block = self._block
        for piece, start, end in zip(self._pieces, self._ends, self._ends[1:], strict=False):
            np.copyto(block[start:end], piece.data)

    def take(self, step: int) -> Stored:
        """Return the array sizes as handles."""
        del step
        sizes = msgspec.json.encode([each.data.nbytes for each in self._pieces])
        return Stored(str(self._listening.getsockname()[1]), sizes)

    def end_step(self, step: int) -> None:
        """Free nothing."""

    def held(self) -> HeldBytes:
        """Count nothing."""
        return HeldBytes()

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            peer, _ = self._listening.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=[peer], daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            while len(run := peer.recv(RUN.size, socket.MSG_WAITALL)) == RUN.size:
                first, num = RUN.unpack(run)
                peer.sendall(self._block[self._ends[first] : self._ends[first + num]].data)


class RawConsumer:
    """A socket, and new memory for each call."""

    def __init__(self) -> None:
        self._peer: socket.socket | None = None

    def prepare(self, stored: Stored) -> list[Item]:
        """Connect on the first call."""
        if self._peer is None:
            self._peer = socket.create_connection(("127.0.0.1", int(stored.address)))
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sizes = msgspec.json.decode(stored.handles, type=list[int])
        return [Item(number, size) for number, size in enumerate(sizes)]

    def fetch(self, items: list[Item]) -> list[Bytes]:
        """Fetch a run of consecutive arrays."""
        assert self._peer is not None
        ends = [0, *itertools.accumulate(each.num_bytes for each in items)]
        block = self._room(ends[-1])
        self._peer.sendall(RUN.pack(items[0].number, len(items)))
        room = block.data
        while room.nbytes:
            got = self._peer.recv_into(room)
            assert got, "the floor's owner hung up"
            room = room[got:]
        return [block[start:end] for start, end in itertools.pairwise(ends)]

    def sum_of(self, array: Bytes) -> int:
        """Sum of the 64-bit words."""
        return sum_of(array)

    def end_step(self, step: int) -> None:
        """Free nothing."""

    def held(self) -> HeldBytes:
        """Count nothing."""
        return HeldBytes()

    def close(self) -> None:
        """Close the connection."""
        if self._peer is not None:
            self._peer.close()

    def _room(self, num_bytes: int) -> Bytes:
        return np.empty(num_bytes, np.uint8)


class RawWarmConsumer(RawConsumer):
    """A consumer that reuses the same memory in each step and overwrites the previous step's
    arrays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._block = np.empty(BLOCK_BYTES, np.uint8)
        self._used = 0

    def end_step(self, step: int) -> None:
        """Start at the beginning of the block again."""
        self._used = 0

    def _room(self, num_bytes: int) -> Bytes:
        start, self._used = self._used, self._used + num_bytes
        return self._block[start : self._used]
