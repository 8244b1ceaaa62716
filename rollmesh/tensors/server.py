"""Where an owner is reached: the listening socket, and a thread for each consumer that dials.

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

from rollmesh.core.forks import close_in_children
from rollmesh.core.logs import get_logger
from rollmesh.core.process import listen
from rollmesh.core.secret_file import admin_token
from rollmesh.tensors.frames import Admitted
from rollmesh.tensors.guest import Guest, Host
from rollmesh.tensors.handshake import memory_at
from rollmesh.tensors.line import Line, why_lost
from rollmesh.tensors.neighbours import Neighbours
from rollmesh.tensors.relay import Relay
from rollmesh.tensors.store import OwnerStore
from rollmesh.wire.keys import Keys, check_bind, check_told

log = get_logger()

MAX_GUESTS: Final = 4096
"""Who dials beyond these is hung up on."""
NO_ROOM_S: Final = 0.2
"""Between two tries to let somebody in, where there is no descriptor."""


class TensorServer:
    """See the module."""

    def __init__(
        self, store: OwnerStore, bind: str, keys: Keys | None = None, relay: Relay | None = None
    ) -> None:
        """To serve `store`, and neighbours by `relay`, at `bind`, tcp://host:port, where port 0
        picks one. AddressError if it needs keys, or if consumers who are told could not dial it."""
        check_bind(bind, keys)
        check_told(bind)
        self._store = store
        self._bind = bind
        admitted = Admitted(memory_at(store.folder), store.folder)
        self._host = Host(store, relay, Neighbours(), keys, admitted, admin_token())
        self._guests: dict[Guest, threading.Thread] = {}
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
        self._porter = threading.Thread(target=self._let_in, args=(listening,), daemon=True)
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

    def _let_in(self, listening: socket.socket) -> None:
        while not self._is_stopping.is_set():
            try:
                connected, _ = listening.accept()
            except ConnectionError:  # it has gone again
                continue
            except OSError as error:
                if not self._is_stopping.wait(NO_ROOM_S):
                    log.warning("server.full", address=self._store.owner, why=why_lost(error))
                continue
            try:
                self._seat(Line(connected))
            except (OSError, RuntimeError) as error:  # it has gone again, or is one too many
                log.warning("guest.refused", address=self._store.owner, why=why_lost(error))
                connected.close()

    def _seat(self, line: Line) -> None:
        if len(self._guests) >= MAX_GUESTS:
            raise RuntimeError(f"{MAX_GUESTS} consumers are here")
        guest = Guest(f"{self._store.owner} guest {next(self._numbers)}", line, self._host)
        thread = threading.Thread(target=self._serve, args=(guest,), name=guest.name, daemon=True)
        with self._lock:
            self._guests[guest] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            with self._lock:
                del self._guests[guest]
            raise

    def _serve(self, guest: Guest) -> None:
        try:
            guest.serve()
        finally:
            with self._lock:
                del self._guests[guest]
