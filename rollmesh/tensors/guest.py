"""One consumer at its owner's door: let in, answered, and cleaned up after.

    ADMITTED --> ANSWERED --hangs up, dies, talks nonsense, does not read--> LEFT
                                   LEFT --it holds no loans, or has hung up--> what it held is free

Owns the connection and its thread. What it asks for is lent out of the store or sent, or it is told
which neighbour of its has it; a neighbour of ours is lent what we fetched ourselves. Invariants:
whatever a consumer says, or leaves unsaid, ends its own connection at most; what it was lent stays
pinned until it says that it is done with it, or its end of the connection is closed, which its
kernel does for the dead; and not before, since one that was told to go may still be looking. Driven
by server.py.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from rollmesh.core.errors import AddressError, ShardMissing, TensorError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Ask,
    Carry,
    Clear,
    Cleared,
    Elsewhere,
    End,
    Fetch,
    Lent,
    Missing,
    Proof,
    Refused,
    Returned,
    Sent,
    Take,
    Taken,
    column,
    decode_ask,
    frame,
    numbers_of,
)
from rollmesh.tensors.handles import RTensor, unpack
from rollmesh.tensors.line import Line, why_lost
from rollmesh.tensors.neighbours import Neighbours
from rollmesh.tensors.page import answer_page
from rollmesh.tensors.pins import Place
from rollmesh.tensors.relay import Relay
from rollmesh.tensors.store import OwnerStore

log = get_logger()

_Item = TypeVar("_Item")


class Host(msgspec.Struct, frozen=True):
    """Where a consumer is a guest."""

    store: OwnerStore
    relay: Relay | None
    """Lends what the owner itself has fetched."""
    neighbours: Neighbours
    admitted: Admitted


class Guest:
    """See the module."""

    def __init__(self, name: str, line: Line, host: Host, proof: Proof) -> None:
        """`name` is that under which the host pins what this one is lent; `proof` is what it sent
        when it was admitted."""
        self._proof = proof
        self.name = name
        self._line = line
        self._store = host.store
        self._relay = host.relay
        self._neighbours = host.neighbours
        self._admitted = host.admitted
        self._lends = "", ""
        """In which memory it lends what it fetches, and where."""
        self._num_lent = 0

    def serve(self) -> None:
        """Until it has left. Raises nothing."""
        try:
            self._let_in(self._proof)
            while self._line.goes_on():
                self._answer(decode_ask(self._line.receive()))
        except (OSError, WireError) as error:
            log.info("guest.lost", guest=self.name, why=why_lost(error))
        except Exception:  # door: what one consumer asks must not end its owner's thread unsaid
            log.exception("guest.failed", guest=self.name)
        finally:
            self._part()

    def cut(self) -> None:
        """It is served no longer; from any thread."""
        self._line.cut()

    def _let_in(self, proof: Proof) -> None:
        # Who sees our own memory is lent it, and needs no neighbour.
        if proof.memory and proof.memory != self._admitted.memory:
            self._lends = proof.memory, proof.relay
            if proof.relay:
                self._neighbours.enter(*self._lends)

    def _answer(self, ask: Ask) -> None:
        match ask:
            case Fetch(ids, True, returned):
                self._take_back(returned)
                self._give(partial(self._lend_own, _ids(ids)))
            case Fetch(ids, False, returned, may_point):
                self._take_back(returned)
                self._give(partial(self._send, _ids(ids), may_point))
            case Carry(handles, returned):
                self._take_back(returned)
                self._give(partial(self._lend_carried, _few(unpack(handles))))
            case Take(ids, step, returned):
                self._take_back(returned)
                self._give(partial(self._take, _ids(ids), step))
            case End(step, returned):
                self._take_back(returned)
                self._line.send(frame(Cleared(self._store.end_step(step))))
            case Clear(ids, returned):
                self._take_back(returned)
                self._line.send(frame(Cleared(self._store.clear(_ids(ids)))))
            case Returned(ids):
                self._take_back(ids)
            case _:
                raise WireError(f"{type(ask).__name__} after the handshake")

    def _give(self, give: Callable[[], None]) -> None:
        try:
            give()
        except ShardMissing as error:
            self._line.send(frame(Missing(error.shard_id, error.reason)))
        except (TensorError, AddressError) as error:
            self._line.send(frame(Refused(str(error))))

    def _lend_own(self, ids: list[int]) -> None:
        self._lend(self._store.pins.places(ids, self.name))

    def _lend_carried(self, handles: list[RTensor]) -> None:
        if self._relay is None:
            raise TensorError("nothing is fetched for others here")
        if any(each.owner == self._store.owner for each in handles):
            raise TensorError("its owner is this process: fetch it, instead of having it carried")
        self._lend(self._relay.places(handles, self.name))

    def _lend(self, places: list[Place]) -> None:
        if not self._num_lent:
            self._line.share_machine()
        self._num_lent += len(places)
        paths: dict[str, int] = {}
        segments = column([paths.setdefault(each.path, len(paths)) for each in places])
        offsets = column([each.offset for each in places])
        sizes = column([each.num_bytes for each in places])
        self._line.send(frame(Lent([*paths], segments, offsets, sizes)))

    def _send(self, ids: list[int], may_point: bool) -> None:
        sizes, windows = self._store.pins.windows(ids, self.name)
        neighbour = self._neighbours.nearest(*self._lends) if may_point else ""
        try:
            if neighbour:
                self._line.send(frame(Elsewhere(neighbour)))
            else:
                self._line.send(frame(Sent(column(sizes))), windows)
        finally:
            self._store.pins.unpin(ids, self.name)

    def _take(self, ids: list[int], step: int) -> None:
        self._store.renew()
        self._store.take(ids, step)
        self._line.send(frame(Taken()))

    def _take_back(self, returned: bytes) -> None:
        ids = _ids(returned)
        if ids:
            self._num_lent -= len(ids)
            self._store.pins.unpin(ids, self.name)
            if self._relay is not None:
                self._relay.unpin(ids, self.name)

    def _part(self) -> None:
        if self._lends[1]:
            self._neighbours.leave(*self._lends)
        if self._num_lent > 0:
            self._line.stop_sending()
            self._line.wait_for_end()
        self._store.pins.drop_peer(self.name)
        if self._relay is not None:
            self._relay.drop_peer(self.name)
        self._line.close()


class Page:
    """One request for a shard over HTTP, whose token was checked."""

    def __init__(self, line: Line, store: OwnerStore, token: str) -> None:
        self._line = line
        self._store = store
        self._token = token

    def serve(self) -> None:
        """Answer it. Raises nothing."""
        try:
            answer_page(self._line, self._store, self._token)
        except (OSError, WireError) as error:
            log.info("page.lost", why=why_lost(error))
        except Exception:  # door: a page must not end its owner's thread without a log line
            log.exception("page.failed")
        finally:
            self._line.close()

    def cut(self) -> None:
        """Stop; from any thread."""
        self._line.cut()


def _ids(column: bytes) -> list[int]:
    return _few(numbers_of(column))


def _few(items: list[_Item]) -> list[_Item]:
    if len(items) > MAX_IDS:
        raise WireError(f"{len(items)} shards in a message; at most {MAX_IDS}")
    return items
