"""The owners that this process fetches from, each over one connection that is kept.

    peer:  APART --a call connects--> CONNECTED --the connection fails, or a call is cut--> APART

- Calls to one owner take turns: raw bytes saturate a connection anyway, and an answer that lends is
  short. Concurrent calls would cost a second thread each and gain nothing.
- A call ends in its answer or in a typed error. If the connection had ended unnoticed, the call is
  repeated once over a new one.
- The end of a loan is reported with the next call, or soon by one thread for all owners.
- If a remote owner redirects to a peer on this machine and that fails, the owner is asked again.
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
from rollmesh.tensors.connection import ConnectionState, OwnerConnection, Redirected, connect
from rollmesh.tensors.framed_socket import loss_reason
from rollmesh.tensors.frames import MAX_IDS
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.receive_buffer import ReceiveBuffer
from rollmesh.tensors.segment import SharedRange
from rollmesh.wire.keys import Keys

log = get_logger()

GATHER_S: Final = 0.05
"""Delay before ended loans are reported, since mostly many end together."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_LoanQueue = queue.SimpleQueue["Peer | None"]
"""Fed also when a view ends, which may be in the middle of anything that a thread does."""


_Dial = Callable[[str, Callable[[], None]], OwnerConnection]
"""Connects to an owner; the callback is called when a loan has ended."""


class _StaleConnection(Exception):
    """The connection had ended before the call, so the owner has not received it."""


class Peer:
    """The link to one owner."""

    def __init__(self, owner: str, dial: _Dial, loan_queue: _LoanQueue) -> None:
        """Start a link that puts itself on `loan_queue` when `report_ended` has to be called."""
        self._owner = owner
        self._dial = dial
        self._loan_queue = loan_queue
        self._is_queued = False
        self._is_closed = False
        self._connection: OwnerConnection | None = None
        self._call_lock = threading.Lock()

    def call(self, request: Callable[[OwnerConnection], _Result]) -> _Result:
        """Return the result of `request`, or raise its TensorError; OwnerGone if the connection
        fails, AddressError if there can be none."""
        with self._call_lock:
            if self._connection is not None:
                with contextlib.suppress(_StaleConnection):
                    return self._run_on(self._connection, request)
            return self._run_on(self._connect(), request, is_fresh=True)

    def report_ended(self) -> None:
        """Report ended loans to the owner; later, if a call is in progress."""
        if not self._between_calls(OwnerConnection.report_ended):
            self._loan_queue.put(self)

    def settle(self) -> None:
        """Report ended loans and wait until the owner knows; a call in progress has reported
        them."""
        self._between_calls(OwnerConnection.settle)

    def close(self) -> None:
        """Fail a call in progress; what was fetched stays valid."""
        self._is_closed = True
        if (connection := self._connection) is not None:
            connection.interrupt()
        with self._call_lock:
            self._retire()

    def _between_calls(self, report: Callable[[OwnerConnection], None]) -> bool:
        """Run unless a call is in progress; return whether it ran. An owner that is gone holds
        nothing."""
        if not self._call_lock.acquire(blocking=False):
            return False
        try:
            self._is_queued = False  # first, so that a loan that ends from now on is queued again
            if self._connection is not None:
                with contextlib.suppress(TensorError, _StaleConnection):
                    self._run_on(self._connection, report)
        finally:
            self._call_lock.release()
        return True

    def _run_on(
        self,
        connection: OwnerConnection,
        request: Callable[[OwnerConnection], _Result],
        is_fresh: bool = False,
    ) -> _Result:
        num_before = connection.num_received
        try:
            return request(connection)
        except (OSError, WireError) as error:
            is_received = is_fresh or connection.num_received > num_before
            if not is_received and isinstance(error, ConnectionError):
                raise _StaleConnection from None
            raise OwnerGone(self._owner, loss_reason(error)) from None
        finally:
            if connection.state is not ConnectionState.READY:
                self._retire()

    def _connect(self) -> OwnerConnection:
        if self._is_closed:
            raise TensorError(f"{self._owner} is not asked any more: this process is closing")
        try:
            self._connection = self._dial(self._owner, self._enqueue)
        except (OSError, WireError) as error:
            raise OwnerGone(self._owner, loss_reason(error)) from None
        return self._connection

    def _retire(self) -> None:
        if self._connection is not None:
            self._connection.retire()
            self._connection = None

    def _enqueue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._loan_queue.put(self)


class Peers:
    """The fetching side of the data plane; our implementation of TensorBackend."""

    def __init__(
        self, keys: Keys | None = None, landing_bytes: int = 0, is_shared: bool = False
    ) -> None:
        """Owners beyond loopback are only contacted with `keys`, and must prove the same ones. Data
        that is sent is received into up to `landing_bytes` of reused memory, which peers can map if
        it is shared; see `lend_at`."""
        self._keys = keys
        self._receive_buffer = ReceiveBuffer(landing_bytes, is_shared)
        self._relay = ""
        self._peers: dict[str, Peer] = {}
        """Never shrinks: as many as there were owners in this process's lifetime."""
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._pid = os.getpid()
        self._loan_queue: _LoanQueue = queue.SimpleQueue()
        self._reporter = threading.Thread(target=self._report, name="tensor-loans", daemon=True)
        self._reporter.start()

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """Implement TensorBackend."""
        return [content for each in _parts(handles) for content in self._fetch(owner, each)]

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """Implement TensorBackend."""
        peer = self._peer(owner)
        for each in _parts(shard_ids):
            peer.call(partial(OwnerConnection.take, shard_ids=each, step=step))

    def end_step(self, owner: str, step: int) -> int:
        """Implement TensorBackend."""
        return self._peer(owner).call(partial(OwnerConnection.end_step, step=step))

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """Implement TensorBackend."""
        peer = self._peer(owner)
        requests = (partial(OwnerConnection.clear, shard_ids=each) for each in _parts(shard_ids))
        return sum(peer.call(request) for request in requests)

    def lend_at(self, address: str) -> None:
        """Announce to remote owners that peers can fetch from this process, at `address`, what it
        fetched."""
        self._relay = address

    def range_of(self, content: Content) -> SharedRange | None:
        """Return where peers can map a content that was sent; None if they cannot."""
        return self._receive_buffer.range_of(content.data)

    def abandon(self) -> None:
        """Remove the shared memory's name, for a process that exits at once."""
        self._receive_buffer.close()

    def settle(self) -> None:
        """Report all ended loans and wait, so that what owners hold can be counted."""
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            peer.settle()

    def close(self) -> None:
        """Close all connections; calls in progress fail."""
        if os.getpid() != self._pid:
            return
        self._is_closing.set()
        self._loan_queue.put(None)
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            peer.close()
        self._reporter.join()
        self._receive_buffer.close()

    def _peer(self, owner: str) -> Peer:
        with self._lock:
            if self._is_closing.is_set():
                raise TensorError(f"{owner} is not asked any more: this process is closing")
            if os.getpid() != self._pid:
                raise TensorError("connections that were made before a fork are the parent's")
            if owner not in self._peers:
                self._peers[owner] = Peer(owner, self._dial, self._loan_queue)
            return self._peers[owner]

    def _dial(self, owner: str, on_loan_end: Callable[[], None]) -> OwnerConnection:
        return connect(owner, self._keys, self._receive_buffer, self._relay, on_loan_end)

    def _fetch(self, owner: str, handles: Sequence[RTensor]) -> list[Content]:
        peer = self._peer(owner)
        try:
            return peer.call(partial(OwnerConnection.fetch, handles=handles, may_redirect=True))
        except Redirected as redirected:
            peer_here = self._peer(redirected.address)
        try:
            return peer_here.call(partial(OwnerConnection.fetch_carried, handles=handles))
        except (TensorError, AddressError) as error:
            log.info("peer.passed_over", owner=owner, why=str(error))
        return peer.call(partial(OwnerConnection.fetch, handles=handles))

    def _report(self) -> None:
        # `close` sets the event before it queues None, which _drain may remove.
        while not self._is_closing.is_set() and (first := self._loan_queue.get()):
            if self._is_closing.wait(GATHER_S):
                return
            for peer in (first, *_drain(self._loan_queue)):
                if peer is not None:
                    peer.report_ended()


def _drain(loan_queue: _LoanQueue) -> list[Peer | None]:
    """Return everything that is queued."""
    rest = []
    with contextlib.suppress(queue.Empty):
        while True:
            rest.append(loan_queue.get_nowait())
    return rest


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), MAX_IDS):
        yield items[start : start + MAX_IDS]
