"""What this process fetched from other machines, lent to its neighbours: one transfer per machine.

    consumer --Fetch--> owner elsewhere: Elsewhere, the neighbour that fetches for this machine
    consumer --Carry--> neighbour: Lent, as soon as the shards have landed there

Owns what neighbours look at. Invariants: a shard that is here, or on its way, is not fetched again,
whoever asks, since all go through our buffer; what was lent stays while somebody looks, whatever
the buffer drops meanwhile. What lies where neighbours cannot see it is refused, and they fetch it
themselves. Any thread; driven by guest.py.
"""

import threading
from collections.abc import Sequence

from rollmesh.core.errors import TensorError
from rollmesh.tensors.buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.peer import Peers
from rollmesh.tensors.pins import Place


class Relay:
    """See the module."""

    def __init__(self, buffer: FetchBuffer, peers: Peers) -> None:
        self._buffer = buffer
        self._peers = peers
        self._lent: dict[str, dict[int, list[Content]]] = {}
        """To each guest, as often as he was lent it."""
        self._lock = threading.Lock()

    def places(self, handles: list[RTensor], guest: str) -> list[Place]:
        """Where they lie, pinned for `guest` as by OwnerStore's `places`. What the fetch raises;
        TensorError where they cannot be lent."""
        owner = handles[0].owner if handles else ""
        contents = self._buffer.get_many(handles, lambda some: self._peers.fetch(owner, some))
        places = [self._peers.place_of(content) for content in contents]
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            raise TensorError("what lies in private memory cannot be lent")
        with self._lock:
            lent = self._lent.setdefault(guest, {})
            for handle, content in zip(handles, contents, strict=True):
                lent.setdefault(handle.shard_id, []).append(content)
        return found

    def unpin(self, shard_ids: Sequence[int], guest: str) -> None:
        """`guest` looks at these no longer; what he was not lent is passed over."""
        over: list[Content] = []
        with self._lock:
            lent = self._lent.get(guest, {})
            for shard_id in shard_ids:
                contents = lent.get(shard_id)
                if contents:
                    over.append(contents.pop())
                    if not contents:
                        del lent[shard_id]

    def drop_peer(self, guest: str) -> None:
        """`guest` has gone, and looks at nothing."""
        with self._lock:
            over = self._lent.pop(guest, None)
        del over  # when the lock is open: what ends may ring bells
