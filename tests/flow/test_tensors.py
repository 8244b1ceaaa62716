"""Owners and consumers of tensors are killed: typed errors at once, and nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import OwnerGone
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.handles import Content, RTensor, pack, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

PROGRAM = Path(__file__).with_name("tensor_process.py")
NUM_BYTES = 2**20
PROMPT_S = 25.0
"""Shorter than the timeout of a line."""
ROOT = Path(__file__).parents[2]


class Child:
    """A process of tensor_process.py."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def line(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it as the kernel does when memory is short."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self) -> str:
        """Close its stdin and wait for its end; return the rest of its output."""
        output, _ = self.process.communicate()
        return output.strip()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start children; the ones that the test leaves running are killed."""
    children: list[Child] = []

    def start(*argv: str) -> Child:
        children.append(Child(*argv))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def store() -> Iterator[OwnerStore]:
    """This process's own store, served."""
    store = OwnerStore(StoreSettings(max_bytes=2**27), SystemClock())
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    yield store
    server.stop()
    store.close()


def put(store: OwnerStore) -> RTensor:
    (handle,) = store.put([Content("uint8", (NUM_BYTES,), np.ones(NUM_BYTES, np.uint8))])
    return handle


def started_owner(start: Callable[..., Child], kind: str) -> tuple[Child, RTensor]:
    owner = start("owner", kind, str(NUM_BYTES))
    (handle,) = unpack(bytes.fromhex(owner.line()))
    return owner, handle


def soon(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PROMPT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it never was"
        threading.Event().wait(0.005)


@pytest.mark.parametrize("kind", ["shared", "private"])
@pytest.mark.parametrize("has_child", [False, True], ids=["alone", "forked"])
def test_a_fetch_from_an_owner_that_is_killed_fails_at_once(
    start: Callable[..., Child], kind: str, has_child: bool
) -> None:
    owner, handle = started_owner(start, kind)
    errors: list[Exception] = []
    with closing(Peers()) as peers:
        peers.fetch(handle.owner, [handle])
        if has_child:  # the child lingers, with its part of the connection
            owner.line()
            owner.send("fork")
            assert owner.line() == "forked"

        def fetch() -> None:
            try:
                peers.fetch(handle.owner, [handle])
            except OwnerGone as error:
                errors.append(error)

        owner.stop()
        fetching = threading.Thread(target=fetch)
        fetching.start()
        owner.kill()
        fetching.join(PROMPT_S)
        assert not fetching.is_alive()
    assert len(errors) == 1


def test_lent_memory_outlives_its_killed_owner(start: Callable[..., Child]) -> None:
    owner, handle = started_owner(start, "shared")
    path = Path(owner.line())
    expected = np.arange(NUM_BYTES).astype(np.uint8)
    with closing(Peers()) as peers:
        (content,) = peers.fetch(handle.owner, [handle])
        owner.kill()
        with pytest.raises(OwnerGone):
            peers.fetch(handle.owner, [handle])
    assert path.exists()
    OwnerStore(StoreSettings(max_bytes=2**20), SystemClock()).close()  # the new store sweeps
    assert not path.exists()
    assert np.array_equal(content.data, expected)


def test_memory_that_a_killed_consumer_held_is_freed(
    start: Callable[..., Child], store: OwnerStore
) -> None:
    handle = put(store)
    consumer = start("consumer")
    consumer.send(pack([handle]).hex())
    assert consumer.line() == str(NUM_BYTES)
    assert store.clear([handle.shard_id]) == 1
    assert store.stats().retained_bytes == NUM_BYTES
    consumer.kill()
    soon(lambda: store.stats().retained_bytes == 0)


def test_memory_that_a_stopped_consumer_holds_is_unchanged(
    start: Callable[..., Child], store: OwnerStore
) -> None:
    handle = put(store)
    consumer = start("consumer")
    consumer.send(pack([handle]).hex())
    assert consumer.line() == str(NUM_BYTES)
    consumer.stop()
    store.clear([handle.shard_id])
    for _ in range(12):
        other = Content("uint8", (NUM_BYTES,), np.zeros(NUM_BYTES, np.uint8))
        store.put([other])
    consumer.process.send_signal(signal.SIGCONT)
    assert consumer.end() == str(NUM_BYTES)
    soon(lambda: store.stats().retained_bytes == 0)


def test_all_consumers_of_a_host_share_one_copy(
    start: Callable[..., Child], store: OwnerStore
) -> None:
    handle = put(store)
    consumers = [start("consumer") for _ in range(3)]
    for consumer in consumers:
        consumer.send(pack([handle]).hex())
    assert [consumer.line() for consumer in consumers] == [str(NUM_BYTES)] * 3
    assert store.stats().total_bytes == NUM_BYTES
    assert [consumer.end() for consumer in consumers] == [str(NUM_BYTES)] * 3


def test_a_neighbour_that_is_killed_while_it_fetches_for_others_is_bypassed(
    start: Callable[..., Child],
) -> None:
    arena = Arena(2**24, None)  # as on another machine: no process here sees the owner's memory
    store = OwnerStore(StoreSettings(max_bytes=2**24), SystemClock(), arena)
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    carrier = start("carrier")
    carrier.send(pack([put(store)]).hex())
    assert carrier.line() == str(NUM_BYTES)
    fetched: list[tuple[int, bool]] = []
    with closing(Peers(landing_bytes=2**22, is_shared=True)) as peers:
        peers.lend_at("tcp://later")

        def fetch() -> None:
            handle = put(store)
            (content,) = peers.fetch(handle.owner, [handle])
            is_own = peers.range_of(content) is not None
            fetched.append((int(content.data.sum()), is_own))

        fetch()
        carrier.stop()
        fetching = threading.Thread(target=fetch)
        fetching.start()
        carrier.kill()
        fetching.join(PROMPT_S)
        assert not fetching.is_alive()
    assert fetched == [(NUM_BYTES, False), (NUM_BYTES, True)]
    server.stop()


@pytest.mark.parametrize("seed", [0, 1])
def test_many_processes_see_intact_shards_and_killed_ones_leave_nothing(
    start: Callable[..., Child], store: OwnerStore, seed: int
) -> None:
    rng = random.Random(seed)
    crowd = [start("crowd", str(number)) for number in range(3)]
    known: list[RTensor] = []
    num_fetched = 0
    for turn in range(40):
        known += put_bytes(store, [rng.choice([0, 1, 4096, 100_000]) for _ in range(4)])
        for child in crowd:
            child.send(pack(rng.sample(known, min(len(known), 6))).hex())
        if turn == 20:
            crowd.pop().kill()
        rng.shuffle(known)
        store.clear([handle.shard_id for handle in known[20:]])  # while they fetch it
        del known[20:]
        num_fetched += sum(int(child.line()) for child in crowd)
    assert num_fetched > 100
    assert [child.end() for child in crowd] == ["0", "0"]
    store.clear([handle.shard_id for handle in known])
    soon(lambda: store.stats().retained_bytes == 0)
    assert store.stats().total_bytes == 0


def put_bytes(store: OwnerStore, sizes: list[int]) -> list[RTensor]:
    """Shards that are full of the last byte of their ids, which are consecutive."""
    before = put(store).shard_id
    store.clear([before])
    return store.put(
        [
            Content("uint8", (size,), np.full(size, (before + 1 + place) % 256, np.uint8))
            for place, size in enumerate(sizes)
        ]
    )
