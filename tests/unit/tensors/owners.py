"""Tensor owners for the tests of the transport: a complete one, and one that follows a script."""

import contextlib
import gc
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rollmesh.core.clock import SystemClock
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import Admitted, KeyProof
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.handshake import (
    MAX_GREETING_BYTES,
    HandshakeRefused,
    OwnerHandshake,
)
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.wire.keys import Keys
from rollmesh.wire.sockets import HANDSHAKE_S

PATIENCE_S = 60.0


def content_of(seed: int, num_bytes: int) -> Content:
    """Return content that depends on the seed."""
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return Content("uint8", (num_bytes,), data)


def handles_of(owner: str, sizes: Sequence[int]) -> list[RTensor]:
    """Return handles of shards that no owner holds."""
    return [
        RTensor(7 << 32 | number, owner, 1, "uint8", (num_bytes,), num_bytes)
        for number, num_bytes in enumerate(sizes)
    ]


@contextlib.contextmanager
def scripted(
    script: Callable[[FramedSocket], None], admitted: Admitted | None = None
) -> Iterator[str]:
    """Yield the address of an owner that admits one consumer after the other, follows `script` with
    each, and disconnects. An error of the script fails the test.
    """
    errors: list[BaseException] = []
    admitted = admitted or Admitted("", "")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    framed = FramedSocket(listening.accept()[0], PATIENCE_S)
                except OSError:
                    return
                try:
                    accept_consumer(framed, None, admitted)
                    script(framed)
                except (OSError, AssertionError) as error:
                    errors.append(error)
                finally:
                    framed.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert errors == []


class Owned:
    """A store that is served."""

    def __init__(self, store: OwnerStore, server: TensorServer) -> None:
        self.store = store
        self.server = server
        self.address = server.start()

    def put(self, sizes: Sequence[int]) -> list[RTensor]:
        """Store content_of(0), content_of(1)... of these sizes."""
        return self.store.put([content_of(seed, size) for seed, size in enumerate(sizes)])

    def num_consumers(self) -> int:
        """Return the number of consumers that threads of the server serve."""
        prefix = f"{self.address} consumer"
        return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


@contextlib.contextmanager
def owned(
    bind: str = "tcp://127.0.0.1:0",
    keys: Keys | None = None,
    *,
    is_shared: bool = True,
    max_bytes: int = 2**26,
) -> Iterator[Owned]:
    """A store and its server; one whose memory is private has nothing to lend."""
    folder = SHARED_MEMORY if is_shared else Path("/nowhere")
    settings = StoreSettings(max_bytes=max_bytes)
    store = OwnerStore(settings, SystemClock(), Arena(max_bytes, folder))
    owner = Owned(store, TensorServer(store, bind, keys))
    try:
        yield owner
    finally:
        owner.server.stop()
        store.close()


def opened() -> tuple[int, int]:
    """Return the numbers of open descriptors and threads of this process."""
    gc.collect()  # a mapping is closed with the last array that views it
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def is_closed_since(before: tuple[int, int]) -> bool:
    """Whether everything opened since is closed; threads of earlier tests may have ended too."""
    now = opened()
    return now[0] <= before[0] and now[1] <= before[1]


def soon(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail the test after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "the condition never held"
        threading.Event().wait(0.005)


def accept_consumer(framed: FramedSocket, keys: Keys | None, admitted: Admitted) -> KeyProof:
    """Run the owner's half of the handshake over a socket; return the consumer's proof.

    Raises WireError or OSError if the consumer is not admitted; it has received the reason.
    """
    framed.allow(HANDSHAKE_S)
    admission, proof = OwnerHandshake(keys, admitted), None
    while proof is None:
        try:
            answer, proof = admission.take(framed.receive(MAX_GREETING_BYTES))
        except HandshakeRefused as declined:
            framed.send(declined.answer)
            raise
        framed.send(answer)
    framed.allow(math.inf)
    return proof
