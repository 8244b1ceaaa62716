"""One transfer per machine: peers on it share what one of them fetched from a remote owner.

    consumer --Fetch--> remote owner: FetchElsewhere, the peer that fetches for this machine
    consumer --FetchForPeer--> that peer: Lent, as soon as it has received the shards

- A consumer is only sent to a peer with a smaller address than its own, so no two wait for each
  other; all of a machine are sent to the same one.
- A shard that is here, or on its way, is not fetched again: all requests use the fetch buffer.
- Lent memory stays while it is in use, whatever the buffer drops. Data in private memory is
  refused, and peers fetch it themselves.
"""

import threading
from collections import Counter
from collections.abc import Sequence

from rollmesh.core.errors import TensorError
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.segment import SharedRange


class PeerIndex:
    """The owner's index, by machine, of connected consumers that lend what they fetched; from any
    thread."""

    def __init__(self) -> None:
        self._addresses: dict[str, Counter[str]] = {}
        """By shared memory: the addresses, and how often each is connected."""
        self._lock = threading.Lock()

    def add(self, memory: str, address: str) -> None:
        """Add a consumer that sees `memory` and lends at `address`."""
        with self._lock:
            self._addresses.setdefault(memory, Counter())[address] += 1

    def remove(self, memory: str, address: str) -> None:
        """Remove a consumer that was added."""
        with self._lock:
            addresses = self._addresses[memory]
            addresses[address] -= 1
            if not addresses[address]:
                del addresses[address]
            if not addresses:
                del self._addresses[memory]

    def preferred(self, memory: str, address: str) -> str:
        """Return the address to fetch from, for a consumer that sees `memory` and lends at
        `address` (or ''); '' for none."""
        with self._lock:
            first = min(self._addresses.get(memory, ()), default="")
        return first if not address or first < address else ""


class TensorRelay:
    """Lends to peers on this machine what this process fetched; from any thread."""

    def __init__(self, buffer: FetchBuffer, peers: Peers) -> None:
        self._buffer = buffer
        self._peers = peers
        self._lent: dict[str, dict[int, list[Content]]] = {}
        """By consumer and shard: one entry for each loan."""
        self._lock = threading.Lock()

    def places(self, handles: list[RTensor], consumer: str) -> list[SharedRange]:
        """Return where the shards are, pinned for `consumer`. Raises what the fetch raises, or
        TensorError if they cannot be lent."""
        owner = handles[0].owner if handles else ""
        contents = self._buffer.get_many(handles, lambda some: self._peers.fetch(owner, some))
        places = [self._peers.range_of(content) for content in contents]
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            raise TensorError("what lies in private memory cannot be lent")
        with self._lock:
            lent = self._lent.setdefault(consumer, {})
            for handle, content in zip(handles, contents, strict=True):
                lent.setdefault(handle.shard_id, []).append(content)
        return found

    def unpin(self, shard_ids: Sequence[int], consumer: str) -> None:
        """End loans of `consumer`; shards that it was not lent are ignored."""
        released: list[Content] = []
        with self._lock:
            lent = self._lent.get(consumer, {})
            for shard_id in shard_ids:
                contents = lent.get(shard_id)
                if contents:
                    released.append(contents.pop())
                    if not contents:
                        del lent[shard_id]

    def drop_peer(self, consumer: str) -> None:
        """End all loans of a consumer that is gone."""
        with self._lock:
            released = self._lent.pop(consumer, None)
        del released  # outside the lock: ending loans calls back
