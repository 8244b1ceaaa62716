"""The owner's server: a listening socket, and a thread for each admitted consumer.

    server:    start --> SERVES --stop--> STOPPED
    consumer:  ADMITTED --> ANSWERED --closes, dies, sends nonsense, does not read--> LEFT
                            LEFT --it holds no loans, or has closed--> its pins are removed

- Consumers are as many as ranks and calls are short or one long copy, so blocking threads suffice.
- An address that other machines can reach is served with keys only.
- A faulty consumer only ends its own connection. What it was lent stays pinned until it returns it,
  or its end of the connection is closed, which its kernel does if it dies.
- After `stop` no thread and no descriptor is left. Without free descriptors, new consumers wait.
"""

import itertools
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from rollmesh.core.addresses import advertised, with_host
from rollmesh.core.errors import AddressError, ShardMissing, TensorError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import close_in_children, listen
from rollmesh.core.secret_files import admin_token
from rollmesh.tensors.acceptor import ConnectionAcceptor, answer_page
from rollmesh.tensors.framed_socket import FramedSocket, loss_reason
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Clear,
    Cleared,
    EndStep,
    Fetch,
    FetchElsewhere,
    FetchForPeer,
    KeyProof,
    Lent,
    Missing,
    Refused,
    Request,
    Returned,
    Sent,
    ShardsTaken,
    TakeShards,
    decode_request,
    frame,
    pack_numbers,
    unpack_numbers,
)
from rollmesh.tensors.handles import RTensor, unpack
from rollmesh.tensors.handshake import memory_id
from rollmesh.tensors.relay import PeerIndex, TensorRelay
from rollmesh.tensors.segment import SharedRange
from rollmesh.tensors.store import OwnerStore
from rollmesh.wire.keys import Keys, check_bind

log = get_logger()

_Item = TypeVar("_Item")


class ServerContext(msgspec.Struct, frozen=True):
    """State that all connections of a server share."""

    store: OwnerStore
    relay: TensorRelay | None
    """Lends what the owner itself has fetched."""
    peer_index: PeerIndex
    admitted: Admitted


class ConsumerConnection:
    """The owner's side of one consumer's connection, and its thread."""

    def __init__(
        self, name: str, framed: FramedSocket, context: ServerContext, proof: KeyProof
    ) -> None:
        """`name` identifies the consumer's pins; `proof` is its message of admission."""
        self._proof = proof
        self.name = name
        self._framed = framed
        self._store = context.store
        self._relay = context.relay
        self._peer_index = context.peer_index
        self._admitted = context.admitted
        self._lends = "", ""
        """The memory in which it lends what it fetches, and the address."""
        self._num_lent = 0

    def serve(self) -> None:
        """Serve until the consumer has left; raises nothing."""
        try:
            self._register(self._proof)
            while self._framed.wait_for_frame():
                self._answer(decode_request(self._framed.receive()))
        except (OSError, WireError) as error:
            log.info("consumer.lost", consumer=self.name, why=loss_reason(error))
        except Exception:  # door: one consumer's request must not end the thread unlogged
            log.exception("consumer.failed", consumer=self.name)
        finally:
            self._clean_up()

    def cut(self) -> None:
        """End the connection; from any thread."""
        self._framed.cut()

    def _register(self, proof: KeyProof) -> None:
        # A consumer that sees our own memory is lent it, and needs no peer.
        if proof.memory and proof.memory != self._admitted.memory:
            self._lends = proof.memory, proof.relay
            if proof.relay:
                self._peer_index.add(*self._lends)

    def _answer(self, request: Request) -> None:
        match request:
            case Fetch(ids, True, returned):
                self._end_loans(returned)
                self._answer_or_refuse(partial(self._lend_own, _ids(ids)))
            case Fetch(ids, False, returned, may_redirect):
                self._end_loans(returned)
                self._answer_or_refuse(partial(self._send, _ids(ids), may_redirect))
            case FetchForPeer(handles, returned):
                self._end_loans(returned)
                self._answer_or_refuse(partial(self._lend_carried, _check_number(unpack(handles))))
            case TakeShards(ids, step, returned):
                self._end_loans(returned)
                self._answer_or_refuse(partial(self._take, _ids(ids), step))
            case EndStep(step, returned):
                self._end_loans(returned)
                self._framed.send(frame(Cleared(self._store.end_step(step))))
            case Clear(ids, returned):
                self._end_loans(returned)
                self._framed.send(frame(Cleared(self._store.clear(_ids(ids)))))
            case Returned(ids):
                self._end_loans(ids)
            case _:
                raise WireError(f"{type(request).__name__} after the handshake")

    def _answer_or_refuse(self, give: Callable[[], None]) -> None:
        try:
            give()
        except ShardMissing as error:
            self._framed.send(frame(Missing(error.shard_id, error.reason)))
        except (TensorError, AddressError) as error:
            self._framed.send(frame(Refused(str(error))))

    def _lend_own(self, ids: list[int]) -> None:
        self._lend(self._store.pins.places(ids, self.name))

    def _lend_carried(self, handles: list[RTensor]) -> None:
        if self._relay is None:
            raise TensorError("nothing is fetched for others here")
        if any(each.owner == self._store.owner for each in handles):
            raise TensorError("its owner is this process: fetch it, instead of having it carried")
        self._lend(self._relay.places(handles, self.name))

    def _lend(self, places: list[SharedRange]) -> None:
        if not self._num_lent:
            self._framed.share_machine()
        self._num_lent += len(places)
        paths: dict[str, int] = {}
        segments = pack_numbers([paths.setdefault(each.path, len(paths)) for each in places])
        offsets = pack_numbers([each.offset for each in places])
        sizes = pack_numbers([each.num_bytes for each in places])
        self._framed.send(frame(Lent([*paths], segments, offsets, sizes)))

    def _send(self, ids: list[int], may_redirect: bool) -> None:
        sizes, windows = self._store.pins.windows(ids, self.name)
        peer = self._peer_index.preferred(*self._lends) if may_redirect else ""
        try:
            if peer:
                self._framed.send(frame(FetchElsewhere(peer)))
            else:
                self._framed.send(frame(Sent(pack_numbers(sizes))), windows)
        finally:
            self._store.pins.unpin(ids, self.name)

    def _take(self, ids: list[int], step: int) -> None:
        self._store.renew()
        self._store.take(ids, step)
        self._framed.send(frame(ShardsTaken()))

    def _end_loans(self, returned: bytes) -> None:
        ids = _ids(returned)
        if ids:
            self._num_lent -= len(ids)
            self._store.pins.unpin(ids, self.name)
            if self._relay is not None:
                self._relay.unpin(ids, self.name)

    def _clean_up(self) -> None:
        if self._lends[1]:
            self._peer_index.remove(*self._lends)
        if self._num_lent > 0:
            self._framed.stop_sending()
            self._framed.wait_for_end()
        self._store.pins.drop_peer(self.name)
        if self._relay is not None:
            self._relay.drop_peer(self.name)
        self._framed.close()


class PageRequest:
    """One request for a shard over HTTP, whose token was checked."""

    def __init__(self, framed: FramedSocket, store: OwnerStore, token: str) -> None:
        self._framed = framed
        self._store = store
        self._token = token

    def serve(self) -> None:
        """Answer the request; raises nothing."""
        try:
            answer_page(self._framed, self._store, self._token)
        except (OSError, WireError) as error:
            log.info("page.lost", why=loss_reason(error))
        except Exception:  # door: one page must not end the thread unlogged
            log.exception("page.failed")
        finally:
            self._framed.close()

    def cut(self) -> None:
        """End the connection; from any thread."""
        self._framed.cut()


def _ids(packed: bytes) -> list[int]:
    return _check_number(unpack_numbers(packed))


def _check_number(items: list[_Item]) -> list[_Item]:
    if len(items) > MAX_IDS:
        raise WireError(f"{len(items)} shards in a message; at most {MAX_IDS}")
    return items


MAX_CONSUMERS: Final = 4096
"""Limit of admitted consumers; one more is refused."""


class TensorServer:
    """Serves an OwnerStore to other processes."""

    def __init__(
        self,
        store: OwnerStore,
        bind: str,
        keys: Keys | None = None,
        relay: TensorRelay | None = None,
        advertise: str = "",
    ) -> None:
        """Serve `store`, and peers by `relay`, at `bind` (tcp://host:port; port 0 picks one).
        `advertise` is the host that consumers are given. AddressError if it needs keys."""
        check_bind(bind, keys)
        self._advertise = advertise
        self._store = store
        self._bind = bind
        admitted = Admitted(memory_id(store.folder), store.folder)
        self._context = ServerContext(store, relay, PeerIndex(), admitted)
        self._token = admin_token()
        self._acceptor = ConnectionAcceptor(self, keys, admitted, self._token)
        self._served: dict[ConsumerConnection | PageRequest, threading.Thread] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._pid = os.getpid()
        self._listening: socket.socket | None = None
        self._accept_thread: threading.Thread | None = None

    def start(self) -> str:
        """Start to serve; return the address, which the store's handles then contain. AddressError
        if it is taken."""
        self._listening = listening = listen(self._bind.removeprefix("tcp://"))
        close_in_children(listening)
        host, port = listening.getsockname()[:2]
        address = advertised(with_host(f"tcp://:{port}", host), self._advertise)
        self._store.owner = address
        self._accept_thread = threading.Thread(
            target=self._acceptor.run, args=(listening, self._is_stopping), daemon=True
        )
        self._accept_thread.name = f"{address} acceptor"
        self._accept_thread.start()
        return address

    def stop(self) -> None:
        """Close all connections; return when the last thread has ended."""
        if self._listening is None or self._accept_thread is None or os.getpid() != self._pid:
            return
        self._is_stopping.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._accept_thread.join()
        self._listening.close()
        self._listening = None
        with self._lock:
            served = [*self._served.items()]
        for consumer, _ in served:
            consumer.cut()
        for _, thread in served:
            thread.join()

    def serve_consumer(self, framed: FramedSocket, proof: KeyProof) -> None:
        """Serve an admitted consumer in a thread of its own; RuntimeError if there are too many."""
        if len(self._served) >= MAX_CONSUMERS:
            raise RuntimeError(f"{MAX_CONSUMERS} consumers are here")
        name = f"{self._store.owner} consumer {next(self._numbers)}"
        consumer = ConsumerConnection(name, framed, self._context, proof)
        self._begin(consumer, threading.Thread(target=self._serve, args=(consumer,), name=name))

    def serve_page(self, framed: FramedSocket) -> None:
        """Answer a request whose token was checked, in a thread of its own."""
        name = f"{self._store.owner} consumer {next(self._numbers)} page"
        page = PageRequest(framed, self._store, self._token)
        self._begin(page, threading.Thread(target=self._serve, args=(page,), name=name))

    def _begin(self, consumer: ConsumerConnection | PageRequest, thread: threading.Thread) -> None:
        thread.daemon = True
        with self._lock:
            self._served[consumer] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            with self._lock:
                del self._served[consumer]
            raise

    def _serve(self, consumer: ConsumerConnection | PageRequest) -> None:
        try:
            consumer.serve()
        finally:
            with self._lock:
                del self._served[consumer]
