"""The owners that this process fetches from, each over one connection that stays.

    peer:  APART --a call dials--> CONNECTED --the line fails, or a call is cut short--> APART

Calls to one owner take turns: raw bytes fill a line anyway, an answer that lends is short, and the
fetch buffer asks at once for all that a batch lacks; several calls on the way at a time would cost
each of them a second thread and gain nothing. Invariants: a call ends in its answer or in a typed
error; one that meets a connection which had ended unseen is made once more, over a fresh one; the
end of a loan is told with the next call, or within a moment by one thread for all owners, which
waits for none of them; an owner elsewhere that points to a neighbour of ours is taken at its word,
and asked itself where that one fails. Driven by the plane, from any thread; it is our Backend.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from rollmesh.core.errors import AddressError, OwnerGone, TensorError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.connection import Connection, ConnectionState, Pointed, connect
from rollmesh.tensors.frames import MAX_IDS
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.landing import Landing
from rollmesh.tensors.line import why_lost
from rollmesh.tensors.pins import Place
from rollmesh.wire.keys import Keys

log = get_logger()

GATHER_S: Final = 0.05
"""Loans mostly end many at a time: the first waits so long for the others."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Bell = queue.SimpleQueue["Peer | None"]
"""Also the end of a view may put to it, in the midst of whatever a thread does."""


_Dial = Callable[[str, Callable[[], None]], Connection]
"""Of an owner, and what to call when a loan has ended."""


class _EndedUnseen(Exception):
    """The connection had ended before the call, so that nobody has heard it."""


class Peer:
    """One owner, as seen from here."""

    def __init__(self, owner: str, dial: _Dial, bell: _Bell) -> None:
        """It puts itself on `bell` where it wants `tell_ended` called."""
        self._owner = owner
        self._dial = dial
        self._bell = bell
        self._has_rung = False
        self._is_closed = False
        self._connection: Connection | None = None
        self._turn = threading.Lock()

    def call(self, ask: Callable[[Connection], _Result]) -> _Result:
        """What `ask` returns, or the TensorError that it raises; OwnerGone where the line fails,
        AddressError where there can be none."""
        with self._turn:
            if self._connection is not None:
                with contextlib.suppress(_EndedUnseen):
                    return self._over(self._connection, ask)
            return self._over(self._dialled(), ask, is_fresh=True)

    def tell_ended(self) -> None:
        """Tell the owner which loans have ended; where a call is under way, later."""
        if not self._in_between(Connection.tell_ended):
            self._bell.put(self)

    def settle(self) -> None:
        """The same, and it knows when this returns; where a call is under way, that has told it."""
        self._in_between(Connection.settle)

    def close(self) -> None:
        """A call that is under way fails; what was fetched stays valid."""
        self._is_closed = True
        if (connection := self._connection) is not None:
            connection.interrupt()
        with self._turn:
            self._retire()

    def _in_between(self, tell: Callable[[Connection], None]) -> bool:
        """Do it unless a call is under way, which is said. An owner that has gone holds nothing."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._has_rung = False  # before we look: what ends from now on rings again
            if self._connection is not None:
                with contextlib.suppress(TensorError, _EndedUnseen):
                    self._over(self._connection, tell)
        finally:
            self._turn.release()
        return True

    def _over(
        self, connection: Connection, ask: Callable[[Connection], _Result], is_fresh: bool = False
    ) -> _Result:
        heard = connection.num_received
        try:
            return ask(connection)
        except (OSError, WireError) as error:
            is_heard = is_fresh or connection.num_received > heard
            if not is_heard and isinstance(error, ConnectionError):
                raise _EndedUnseen from None
            raise OwnerGone(self._owner, why_lost(error)) from None
        finally:
            if connection.state is not ConnectionState.READY:
                self._retire()

    def _dialled(self) -> Connection:
        if self._is_closed:
            raise TensorError(f"{self._owner} is not asked any more: this process is closing")
        try:
            self._connection = self._dial(self._owner, self._ring)
        except (OSError, WireError) as error:
            raise OwnerGone(self._owner, why_lost(error)) from None
        return self._connection

    def _retire(self) -> None:
        if self._connection is not None:
            self._connection.retire()
            self._connection = None

    def _ring(self) -> None:
        if not self._has_rung:
            self._has_rung = True
            self._bell.put(self)


class Peers:
    """See the module."""

    def __init__(
        self, keys: Keys | None = None, landing_bytes: int = 0, is_shared: bool = False
    ) -> None:
        """Owners beyond loopback are dialled with `keys` alone, and have to prove the same. What
        is sent is received into up to `landing_bytes` of memory that is kept and used again;
        neighbours see it too where it is shared, see `lend_at`."""
        self._keys = keys
        self._landing = Landing(landing_bytes, is_shared)
        self._relay = ""
        self._peers: dict[str, Peer] = {}
        """None ever leaves: there are as many as owners, and starts of them, in our life."""
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._pid = os.getpid()
        self._bell: _Bell = queue.SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="tensor-loans", daemon=True)
        self._teller.start()

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """As Backend has it."""
        return [content for each in _parts(handles) for content in self._fetch(owner, each)]

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """As Backend has it."""
        peer = self._peer(owner)
        for each in _parts(shard_ids):
            peer.call(partial(Connection.take, shard_ids=each, step=step))

    def end_step(self, owner: str, step: int) -> int:
        """As Backend has it."""
        return self._peer(owner).call(partial(Connection.end_step, step=step))

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """As Backend has it."""
        peer = self._peer(owner)
        asks = (partial(Connection.clear, shard_ids=each) for each in _parts(shard_ids))
        return sum(peer.call(ask) for ask in asks)

    def lend_at(self, address: str) -> None:
        """From now on owners elsewhere are told that neighbours may have there, from a Relay, what
        we fetched."""
        self._relay = address

    def place_of(self, content: Content) -> Place | None:
        """Where neighbours see what was sent; None where they do not."""
        return self._landing.place_of(content.data)

    def abandon(self) -> None:
        """For a process that ends at once: neighbours find nothing here any more."""
        self._landing.close()

    def settle(self) -> None:
        """Owners know which loans have ended, when this returns: what they hold can be counted."""
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            peer.settle()

    def close(self) -> None:
        """As Backend has it; calls that are under way fail."""
        if os.getpid() != self._pid:
            return
        self._is_closing.set()
        self._bell.put(None)
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            peer.close()
        self._teller.join()
        self._landing.close()

    def _peer(self, owner: str) -> Peer:
        with self._lock:
            if self._is_closing.is_set():
                raise TensorError(f"{owner} is not asked any more: this process is closing")
            if os.getpid() != self._pid:
                raise TensorError("connections that were made before a fork are the parent's")
            if owner not in self._peers:
                self._peers[owner] = Peer(owner, self._dial, self._bell)
            return self._peers[owner]

    def _dial(self, owner: str, on_loan_end: Callable[[], None]) -> Connection:
        return connect(owner, self._keys, self._landing, self._relay, on_loan_end)

    def _fetch(self, owner: str, handles: Sequence[RTensor]) -> list[Content]:
        peer = self._peer(owner)
        try:
            return peer.call(partial(Connection.fetch, handles=handles, may_point=True))
        except Pointed as pointed:
            neighbour = self._peer(pointed.address)
        try:
            return neighbour.call(partial(Connection.fetch_carried, handles=handles))
        except (TensorError, AddressError) as error:
            log.info("neighbour.passed_over", owner=owner, why=str(error))
        return peer.call(partial(Connection.fetch, handles=handles))

    def _tell(self) -> None:
        while (first := self._bell.get()) and not self._is_closing.wait(GATHER_S):
            for peer in (first, *_rest(self._bell)):
                if peer is not None:
                    peer.tell_ended()


def _rest(bell: _Bell) -> list[Peer | None]:
    """Who else has rung by now."""
    rest = []
    with contextlib.suppress(queue.Empty):
        while True:
            rest.append(bell.get_nowait())
    return rest


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), MAX_IDS):
        yield items[start : start + MAX_IDS]
