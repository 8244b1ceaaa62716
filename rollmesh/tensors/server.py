"""Where an owner is reached: the listening socket, and a thread for each admitted consumer.

    start --> SERVES --stop--> STOPPED

There are as many consumers as ranks, and each waits for its answer: a look into a table, or one
long copy in the kernel; so threads that block are all that is needed. Invariants: an address that
other machines reach is served with keys only; no consumer ends the server, or holds up another;
after `stop` no thread and no descriptor of ours is left. Where the process has no descriptor to
spare, whoever dials waits. Driven by the owner's process.
"""

import itertools
import os
import socket
import threading
from typing import Final

from rollmesh.core.process import close_in_children, listen
from rollmesh.core.secret_files import admin_token
from rollmesh.tensors.frames import Admitted, Proof
from rollmesh.tensors.guest import Guest, Host, Page
from rollmesh.tensors.handshake import memory_at
from rollmesh.tensors.line import Line
from rollmesh.tensors.lobby import Lobby
from rollmesh.tensors.neighbours import Neighbours
from rollmesh.tensors.relay import Relay
from rollmesh.tensors.store import OwnerStore
from rollmesh.wire.keys import Keys, check_bind, check_dialable

MAX_GUESTS: Final = 4096
"""Admitted consumers; one more is refused."""


class TensorServer:
    """See the module."""

    def __init__(
        self, store: OwnerStore, bind: str, keys: Keys | None = None, relay: Relay | None = None
    ) -> None:
        """To serve `store`, and neighbours by `relay`, at `bind`, tcp://host:port, where port 0
        picks one. AddressError if it needs keys, or if consumers who are told could not dial it."""
        check_bind(bind, keys)
        check_dialable(bind)
        self._store = store
        self._bind = bind
        admitted = Admitted(memory_at(store.folder), store.folder)
        self._host = Host(store, relay, Neighbours(), admitted)
        self._host_token = admin_token()
        self._lobby = Lobby(self, keys, admitted, self._host_token)
        self._guests: dict[Guest | Page, threading.Thread] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._pid = os.getpid()
        self._listening: socket.socket | None = None
        self._porter: threading.Thread | None = None

    def start(self) -> str:
        """Serve from now on; the address, which the store's handles then name. AddressError if it
        is taken."""
        self._listening = listening = listen(self._bind.removeprefix("tcp://"))
        close_in_children(listening)
        host, port = listening.getsockname()[:2]
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._store.owner = address
        self._porter = threading.Thread(
            target=self._lobby.run, args=(listening, self._is_stopping), daemon=True
        )
        self._porter.name = f"{address} porter"
        self._porter.start()
        return address

    def stop(self) -> None:
        """Hang up on everybody; returns when the last thread has ended."""
        if self._listening is None or self._porter is None or os.getpid() != self._pid:
            return
        self._is_stopping.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the porter
        self._porter.join()
        self._listening.close()
        self._listening = None
        with self._lock:
            guests = [*self._guests.items()]
        for guest, _ in guests:
            guest.cut()
        for _, thread in guests:
            thread.join()

    def seat(self, line: Line, proof: Proof) -> None:
        """Serve an admitted consumer in a thread of its own; RuntimeError where there are too
        many."""
        if len(self._guests) >= MAX_GUESTS:
            raise RuntimeError(f"{MAX_GUESTS} consumers are here")
        name = f"{self._store.owner} guest {next(self._numbers)}"
        guest = Guest(name, line, self._host, proof)
        self._begin(guest, threading.Thread(target=self._serve, args=(guest,), name=name))

    def show(self, line: Line) -> None:
        """Answer a request for a page, whose token was checked, in a thread."""
        name = f"{self._store.owner} guest {next(self._numbers)} page"
        page = Page(line, self._store, self._host_token)
        self._begin(page, threading.Thread(target=self._serve, args=(page,), name=name))

    def _begin(self, guest: Guest | Page, thread: threading.Thread) -> None:
        thread.daemon = True
        with self._lock:
            self._guests[guest] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            with self._lock:
                del self._guests[guest]
            raise

    def _serve(self, guest: Guest | Page) -> None:
        try:
            guest.serve()
        finally:
            with self._lock:
                del self._guests[guest]
