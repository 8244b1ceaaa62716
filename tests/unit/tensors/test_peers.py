"""Shards of other owners come over one connection each; lost ones are typed errors."""

import gc
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.errors import AddressError, OwnerGone, ShardMissing, TensorError
from rollmesh.tensors import peers as peers_module
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import Fetch, Sent, decode_request, frame, pack_numbers
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.peers import Peer, Peers
from tests.unit.tensors.fetches import ThreadCall
from tests.unit.tensors.owners import (
    PATIENCE_S,
    Owned,
    content_of,
    handles_of,
    is_closed_since,
    opened,
    owned,
    scripted,
    soon,
)

SIZES = [64, 0, 100_000, 3]


@pytest.fixture
def peers() -> Iterator[Peers]:
    with closing(Peers()) as peers:
        yield peers


@pytest.fixture(params=["memory", "stream"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owned]:
    """An owner that lends its memory, and one that sends bytes."""
    with owned(is_shared=request.param == "memory") as owner:
        yield owner


def data_of(contents: list[Content]) -> list[bytes]:
    return [bytes(each.data) for each in contents]


def expected(sizes: list[int]) -> list[bytes]:
    return [bytes(content_of(seed, size).data) for seed, size in enumerate(sizes)]


def test_fetched_shards_equal_the_stored_ones(owner: Owned, peers: Peers) -> None:
    handles = owner.put(SIZES)
    contents = peers.fetch(owner.address, handles)
    assert data_of(contents) == expected(SIZES)
    assert [each.shape for each in contents] == [(size,) for size in SIZES]
    assert not any(each.data.flags.writeable for each in contents)
    backwards = peers.fetch(owner.address, handles[::-1])
    assert data_of(backwards) == expected(SIZES)[::-1]


def test_an_empty_request_dials_no_owner(peers: Peers) -> None:
    assert peers.fetch("tcp://127.0.0.1:1", []) == []
    assert peers.clear("tcp://127.0.0.1:1", []) == 0


def test_a_large_request_is_split_into_several_messages(
    owner: Owned, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_IDS", 2)
    handles = owner.put(SIZES)
    assert data_of(peers.fetch(owner.address, handles)) == expected(SIZES)
    assert peers.clear(owner.address, [each.shard_id for each in handles]) == len(SIZES)


def test_a_cleared_shard_is_missing_and_the_others_are_there(owner: Owned, peers: Peers) -> None:
    handles = owner.put(SIZES)
    gone = handles[2]
    assert peers.clear(owner.address, [gone.shard_id]) == 1
    assert peers.clear(owner.address, [gone.shard_id]) == 0
    with pytest.raises(ShardMissing) as caught:
        peers.fetch(owner.address, handles)
    missing = caught.value
    assert (missing.shard_id, missing.owner, missing.reason) == (
        gone.shard_id,
        owner.address,
        "cleared",
    )
    assert data_of(peers.fetch(owner.address, handles[:2])) == expected(SIZES)[:2]


def test_a_viewed_shard_stays_valid_when_its_owner_clears_it(peers: Peers) -> None:
    with owned() as owner:
        handles = owner.put([100_000])
        (content,) = peers.fetch(owner.address, handles)
        view = content.data[10:20]
        del content
        assert owner.store.clear([handles[0].shard_id]) == 1
        owner.put([100_000] * 9)
        assert bytes(view) == expected([100_000])[0][10:20]
        assert owner.store.stats().retained_bytes >= 100_000
        del view
        soon(lambda: owner.store.stats().retained_bytes == 0)


def test_ended_loans_are_returned_without_a_further_call(peers: Peers) -> None:
    with owned() as owner:
        for _ in range(3):
            contents = peers.fetch(owner.address, handles := owner.put([64] * 100))
            owner.store.clear([each.shard_id for each in handles])
            assert owner.store.stats().retained_bytes > 0
            del contents
            soon(lambda: owner.store.stats().retained_bytes == 0)


class LateEvent(threading.Event):
    """An event whose `wait` has just timed out when `close` sets it and ends the queue."""

    def __init__(self, loan_queue: queue.SimpleQueue[Peer | None]) -> None:
        super().__init__()
        self.is_awaited = threading.Event()
        self._loan_queue = loan_queue

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        soon(lambda: not self._loan_queue.empty())
        return False


def test_peers_that_close_while_loans_are_reported_end_their_thread() -> None:
    with owned() as owner:
        peers = Peers()
        is_closing = LateEvent(peers._loan_queue)  # noqa: SLF001 - the race needs its moment
        peers._is_closing = is_closing  # noqa: SLF001 - see above
        contents = peers.fetch(owner.address, owner.put([64]))
        del contents
        assert is_closing.is_awaited.wait(PATIENCE_S)
        ThreadCall(peers.close).result()


def test_a_call_that_waits_ends_when_the_peers_close() -> None:
    has_asked = threading.Event()

    def script(framed: FramedSocket) -> None:
        framed.receive()
        has_asked.set()
        assert not framed.wait_for_frame()

    with scripted(script) as owner, closing(Peers()) as peers:
        call = ThreadCall(partial(peers.fetch, owner, handles_of(owner, [8])))
        assert has_asked.wait(PATIENCE_S)
        peers.close()
        with pytest.raises(OwnerGone):
            call.result()


def test_views_outlive_the_peers(owner: Owned) -> None:
    with closing(Peers()) as peers:
        handles = owner.put(SIZES)
        contents = peers.fetch(owner.address, handles)
    owner.store.clear([each.shard_id for each in handles])
    owner.put(SIZES[::-1])
    gc.collect()
    assert data_of(contents) == expected(SIZES)
    del contents
    soon(lambda: owner.store.stats().retained_bytes == 0)


def test_one_connection_serves_all_calls_and_threads(owner: Owned, peers: Peers) -> None:
    handles = owner.put(SIZES)
    results: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()

    def fetch_often() -> None:
        for _ in range(20):
            results.put(data_of(peers.fetch(owner.address, handles)))

    threads = [threading.Thread(target=fetch_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get_nowait() for _ in range(80)] == [expected(SIZES)] * 80
    assert owner.num_consumers() == 1


def test_a_restarted_owner_is_found_and_has_lost_its_shards(peers: Peers) -> None:
    with owned() as first:
        handles = first.put(SIZES)
        peers.fetch(first.address, handles)
        bind = first.address
    with owned(bind=bind) as second:
        with pytest.raises(ShardMissing) as caught:
            peers.fetch(bind, handles)
        assert caught.value.reason == "owner_restarted"
        assert data_of(peers.fetch(bind, second.put(SIZES))) == expected(SIZES)


def test_a_stopped_owner_is_gone(owner: Owned, peers: Peers) -> None:
    handles = owner.put(SIZES)
    peers.fetch(owner.address, handles)
    owner.server.stop()
    for ask in (
        lambda: peers.fetch(owner.address, handles),
        lambda: peers.clear(owner.address, [1]),
    ):
        with pytest.raises(OwnerGone, match="connection refused") as caught:
            ask()
        assert caught.value.owner == owner.address


def disconnect(framed: FramedSocket) -> None:
    """Disconnect during an answer."""
    framed.receive()
    framed.send(frame(Sent(pack_numbers([8])))[:-1])


def send_noise(framed: FramedSocket) -> None:
    framed.receive()
    framed.send(b"\xff" * 100)


def send_part(framed: FramedSocket) -> None:
    """Send a part of the bytes."""
    ask = decode_request(framed.receive())
    assert isinstance(ask, Fetch)
    framed.send(frame(Sent(pack_numbers([2**20]))), [memoryview(bytes(100))])


@pytest.mark.parametrize(
    ("script", "message"),
    [(disconnect, "hung up"), (send_noise, "a header of"), (send_part, "hung up")],
)
def test_an_owner_that_fails_during_a_fetch_is_gone_and_found_again(
    peers: Peers, script: Callable[[FramedSocket], None], message: str
) -> None:
    num_dialled = 0

    def fail_then_answer(framed: FramedSocket) -> None:
        nonlocal num_dialled
        num_dialled += 1
        if num_dialled == 1:
            script(framed)
        else:
            framed.receive()
            framed.send(frame(Sent(pack_numbers([2**20]))), [memoryview(bytes(2**20))])

    with scripted(fail_then_answer) as address:
        handles = handles_of(address, [2**20])
        with pytest.raises(OwnerGone, match=message):
            peers.fetch(address, handles)
        assert data_of(peers.fetch(address, handles)) == [bytes(2**20)]
    assert num_dialled == 2


def test_a_connection_that_ended_while_idle_is_replaced_silently(peers: Peers) -> None:
    num_dialled = 0

    def answer_one(framed: FramedSocket) -> None:
        nonlocal num_dialled
        num_dialled += 1
        framed.receive()
        framed.send(frame(Sent(pack_numbers([1]))), [memoryview(b"x")])

    with scripted(answer_one) as address:
        for _ in range(3):
            assert data_of(peers.fetch(address, handles_of(address, [1]))) == [b"x"]
    assert num_dialled == 3


def test_an_interrupted_call_leaves_nothing_to_the_next(peers: Peers) -> None:
    """Close the peers during an answer."""
    started, may_continue = threading.Event(), threading.Event()

    def stall(framed: FramedSocket) -> None:
        framed.receive()
        framed.send(frame(Sent(pack_numbers([4]))), [memoryview(b"ol")])
        started.set()
        may_continue.wait(PATIENCE_S)
        if framed.wait_for_frame():
            framed.receive()
            framed.send(frame(Sent(pack_numbers([4]))), [memoryview(b"new!")])

    with scripted(stall) as address:
        failed: list[str] = []

        def fetch() -> None:
            try:
                peers.fetch(address, handles_of(address, [4]))
            except TensorError as error:
                failed.append(str(error))

        thread = threading.Thread(target=fetch)
        thread.start()
        started.wait(PATIENCE_S)
        peers.close()
        thread.join()
        may_continue.set()
    assert len(failed) == 1
    with pytest.raises(TensorError, match="closing"):
        peers.fetch(address, handles_of(address, [4]))


def test_ended_loans_of_a_busy_peer_are_returned_when_it_is_idle(peers: Peers) -> None:
    """Loans of other owners are returned meanwhile."""
    started, may_continue = threading.Event(), threading.Event()

    def stall(framed: FramedSocket) -> None:
        framed.receive()
        started.set()
        may_continue.wait(PATIENCE_S)
        framed.send(frame(Sent(pack_numbers([0]))))
        assert not framed.wait_for_frame()

    with scripted(stall) as busy, owned() as owner:
        thread = threading.Thread(target=peers.fetch, args=(busy, handles_of(busy, [0])))
        thread.start()
        started.wait(PATIENCE_S)
        contents = peers.fetch(owner.address, handles := owner.put([64]))
        owner.store.clear([handles[0].shard_id])
        del contents
        soon(lambda: owner.store.stats().retained_bytes == 0)
        assert thread.is_alive()
        may_continue.set()
        thread.join()
        peers.close()


def test_an_address_that_cannot_be_an_owner_is_refused(peers: Peers) -> None:
    with pytest.raises(AddressError, match="tcp://host:port"):
        peers.fetch("nowhere", handles_of("nowhere", [1]))
    with pytest.raises(AddressError, match="need keys"):
        peers.fetch("tcp://10.1.2.3:4", handles_of("tcp://10.1.2.3:4", [1]))


def test_no_descriptor_or_thread_is_left_open() -> None:
    before = opened()
    with owned() as owner:
        for _ in range(3):
            with closing(Peers()) as peers:
                handles = owner.put(SIZES)
                assert data_of(peers.fetch(owner.address, handles)) == expected(SIZES)
    del owner, peers
    assert is_closed_since(before)


@pytest.mark.parametrize("is_shared", [True, False])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seeds=st.lists(st.integers(0, 2**32), min_size=3, max_size=3, unique=True))
def test_concurrent_consumers_see_whole_shards_and_leave_nothing(
    is_shared: bool, seeds: list[int]
) -> None:
    """Meanwhile shards that they view are cleared, and the memory is used for others."""
    stored: list[tuple[int, RTensor]] = []
    wrong: list[object] = []
    with owned(is_shared=is_shared, max_bytes=2**22) as owner:

        def consume(seed: int) -> None:
            rng = random.Random(seed)
            kept: list[tuple[int, Content]] = []
            with closing(Peers(None, rng.choice([0, 2**20]))) as peers:
                for _ in range(60):
                    number = rng.randrange(2**16)
                    size = rng.choice([0, 1, 100, 5000, 100_000])
                    (handle,) = owner.store.put([content_of(number, size)])
                    stored.append((number, handle))
                    some = rng.sample(stored, min(len(stored), rng.randrange(1, 9)))
                    try:
                        contents = peers.fetch(owner.address, [handle for _, handle in some])
                        kept += zip([number for number, _ in some], contents, strict=True)
                    except ShardMissing as error:
                        wrong.extend({error.reason} - {"cleared"})
                    rng.shuffle(kept)
                    del kept[rng.randrange(6) :]
                    for number, content in kept:
                        expected = content_of(number, content.data.nbytes).data
                        if not np.array_equal(content.data, expected):
                            wrong.append((seed, number))
                    _, handle = rng.choice(stored)
                    peers.clear(owner.address, [handle.shard_id])
                kept.clear()

        threads = [threading.Thread(target=consume, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        owner.store.clear([handle.shard_id for _, handle in stored])
        soon(lambda: owner.store.stats().retained_bytes == 0)
        assert owner.store.stats().total_bytes == 0
    assert wrong == []


def test_a_forked_child_does_not_use_the_connections(peers: Peers) -> None:
    with owned() as owner:
        handles = owner.put(SIZES)
        peers.fetch(owner.address, handles)
        child = os.fork()
        if child == 0:
            _leave(owner, peers, handles)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert data_of(peers.fetch(owner.address, handles)) == expected(SIZES)
        assert owner.num_consumers() == 1


def _leave(owner: Owned, peers: Peers, handles: list[RTensor]) -> NoReturn:
    """Exit with 0 if a fetch is refused, and only this process's connection has ended."""
    code = 1
    try:
        peers.fetch(owner.address, handles)
    except TensorError as error:
        peers.close()
        owner.server.stop()
        code = 0 if "fork" in str(error) else 2
    finally:
        os._exit(code)
