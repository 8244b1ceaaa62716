"""Attacks on the port of an owner of tensors: memory, threads and connection slots used by
strangers.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import MAX_HEADER_BYTES, FetchForPeer, Refused, decode_answer, frame
from rollmesh.tensors.handles import pack
from rollmesh.tensors.handshake import greet_owner
from rollmesh.tensors.peers import Peers
from rollmesh.trainer.controller.spec import PlaneSpec
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from tests.unit.tensors.owners import Owned, owned

WAIT_S = 60.0
NUM_STRANGERS = 200
NUM_CLAIMS = 64
CLAIM = (2**23).to_bytes(4, "little") + b"x"
MIB = 2**20


@pytest.fixture
def owner() -> Iterator[Owned]:
    with owned() as owner:
        yield owner


def dial(address: str) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), WAIT_S)


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come"
        threading.Event().wait(0.01)


def is_cut(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return connected.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_silent_strangers_take_no_thread_and_no_connection_slot(owner: Owned) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        strangers = [stack.enter_context(dial(owner.address)) for _ in range(NUM_STRANGERS)]
        until(lambda: is_cut(strangers[0]))
        assert threading.active_count() <= before
        for _ in range(3):
            with closing(Peers(None)) as peers:
                assert len(peers.fetch(owner.address, owner.put([64]))) == 1
        assert not is_cut(strangers[-1]), "the oldest are cut, and not the newest"


def test_a_length_that_is_only_claimed_takes_no_memory(owner: Owned) -> None:
    """Without the limit, 64 connections of 5 bytes each took 512 MiB."""
    handles = owner.put([64])
    before = rss()
    with ExitStack() as stack:
        lines = []
        for _ in range(NUM_CLAIMS):
            connected = stack.enter_context(dial(owner.address))
            line = FramedSocket(connected, WAIT_S)
            greet_owner(line, "owner", None)
            lines.append(line)
        until(lambda: owner.num_consumers() >= NUM_CLAIMS)
        largest = MAX_HEADER_BYTES.to_bytes(4, "little") + b"x"
        for line in lines:
            line.send(largest)
        with closing(Peers(None)) as peers:
            assert len(peers.fetch(owner.address, handles)) == 1
        assert rss() - before < 32 * MIB
    until(lambda: owner.num_consumers() == 0)
    assert rss() - before < 32 * MIB


def test_a_longer_claim_ends_its_connection(owner: Owned) -> None:
    with dial(owner.address) as stranger:
        stranger.sendall(CLAIM)
        until(lambda: is_cut(stranger))
    with dial(owner.address) as member:
        line = FramedSocket(member, WAIT_S)
        greet_owner(line, "owner", None)
        line.send(CLAIM)
        until(lambda: is_cut(member))


def test_an_owner_does_not_forward_its_own_tensors() -> None:
    """The owner would connect to itself, and the connection would not end."""
    spec = PlaneSpec(store_bytes=2**24, buffer_bytes=2**24)
    with ExitStack() as stack:
        home, other = (
            stack.enter_context(closing(TensorRuntime(spec, None))),
            stack.enter_context(owned()),
        )
        with dial(home.address) as connected:
            own = [msgspec.structs.replace(each, owner=home.address) for each in other.put([64])]
            line = FramedSocket(connected, WAIT_S)
            greet_owner(line, "owner", None)
            line.send(frame(FetchForPeer(pack(own))))
            answer = decode_answer(line.receive())
            assert isinstance(answer, Refused)
            assert "this process" in answer.why
