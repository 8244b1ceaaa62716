"""Relaying peers: one consumer on a machine fetches from the owner, and all view what it fetched.
No peers wait for each other in a circle.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing

import hypothesis
import pytest
from hypothesis import strategies as st

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import OwnerGone, ShardMissing, TensorError
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.connection import ConnectionState, connect
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.receive_buffer import ReceiveBuffer
from rollmesh.tensors.relay import PeerIndex, TensorRelay
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from tests.unit.tensors.owners import (
    PATIENCE_S,
    Owned,
    content_of,
    handles_of,
    is_closed_since,
    opened,
    owned,
    soon,
)

SIZES = [64, 0, 100_000, 3]
RECEIVE_BYTES = 2**20


class Rank:
    """A process of a trainer: it owns, fetches, and lends what it fetched."""

    def __init__(self, is_shared: bool = True) -> None:
        settings = StoreSettings(max_bytes=2**20)
        self.buffer = FetchBuffer(2**22)
        self.peers = Peers(None, RECEIVE_BYTES, is_shared)
        self._store = OwnerStore(settings, SystemClock(), Arena(settings.max_bytes, None))
        relay = TensorRelay(self.buffer, self.peers)
        self.server = TensorServer(self._store, "tcp://127.0.0.1:0", relay=relay)
        self.address = self.server.start()
        self.peers.lend_at(self.address)

    def fetch(self, handles: list[RTensor]) -> list[Content]:
        """Fetch through the buffer, as a plane does."""
        owner = handles[0].owner
        return self.buffer.get_many(handles, lambda some: self.peers.fetch(owner, some))

    def has_received(self, contents: list[Content]) -> bool:
        """Whether this process received them over the network."""
        return any(self.peers.range_of(each) for each in contents)

    def close(self) -> None:
        self.server.stop()
        self.peers.close()
        self._store.close()


@pytest.fixture
def owner() -> Iterator[Owned]:
    """A process on another machine: no process here sees its memory."""
    with owned(is_shared=False) as owner:
        yield owner


@pytest.fixture
def ranks(owner: Owned) -> Iterator[list[Rank]]:
    """Consumers that the owner knows; the first fetches for the others."""
    with ExitStack() as stack:
        ranks = [Rank() for _ in range(4)]
        for rank in ranks:
            stack.callback(rank.close)
            rank.fetch(owner.put([1]))
        yield sorted(ranks, key=lambda rank: rank.address)


def data_of(contents: list[Content]) -> list[bytes]:
    return [bytes(each.data) for each in contents]


EXPECTED = [bytes(content_of(seed, size).data) for seed, size in enumerate(SIZES)]


def test_shards_that_all_consumers_want_cross_the_network_once(
    owner: Owned, ranks: list[Rank]
) -> None:
    handles = owner.put(SIZES)
    together = threading.Barrier(len(ranks))
    fetched: dict[int, list[Content]] = {}

    def fetch(number: int) -> None:
        together.wait(PATIENCE_S)
        fetched[number] = ranks[number].fetch(handles)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [data_of(fetched[number]) for number in range(len(ranks))] == [EXPECTED] * len(ranks)
    received = [rank.has_received(fetched[number]) for number, rank in enumerate(ranks)]
    assert received == [True, False, False, False]


def test_no_consumer_is_sent_to_a_peer_that_lends_nothing(owner: Owned, ranks: list[Rank]) -> None:
    with closing(Peers()) as lone:
        lone.fetch(owner.address, owner.put([1]))
        handles = owner.put(SIZES)
        assert data_of(ranks[1].fetch(handles)) == EXPECTED
        assert not ranks[1].has_received(ranks[1].fetch(handles))
        assert data_of(lone.fetch(owner.address, handles)) == EXPECTED


def test_views_of_relayed_shards_stay_valid_when_the_relaying_peer_drops_them(
    owner: Owned, ranks: list[Rank]
) -> None:
    relaying, other = ranks[:2]
    handles = owner.put([RECEIVE_BYTES // 2])
    contents = other.fetch(handles)
    expected = data_of(contents)
    assert not other.has_received(contents)
    relaying.buffer.clear(None)
    for _ in range(3):
        relaying.fetch(owner.put([RECEIVE_BYTES // 2]))
        relaying.buffer.clear(None)
    assert data_of(contents) == expected


def test_memory_is_reused_when_the_views_of_other_peers_are_gone(
    owner: Owned, ranks: list[Rank]
) -> None:
    relaying, other = ranks[:2]
    for _ in range(5):  # 2.5 times the receive buffer
        handles = owner.put([RECEIVE_BYTES // 2])
        contents = other.fetch(handles)
        assert not other.has_received(contents)
        del contents
        for rank in (relaying, other):
            rank.buffer.clear(None)
        other.peers.settle()


def test_a_freed_shard_is_missing_even_if_a_peer_has_a_copy(
    owner: Owned, ranks: list[Rank]
) -> None:
    handles = owner.put(SIZES)
    ranks[0].fetch(handles)
    owner.store.clear([handles[1].shard_id])
    with pytest.raises(ShardMissing) as caught:
        ranks[1].fetch(handles)
    assert (caught.value.owner, caught.value.reason) == (owner.address, "cleared")


def test_if_the_relaying_peer_closes_another_takes_over(owner: Owned, ranks: list[Rank]) -> None:
    ranks[0].close()
    contents = [rank.fetch(handles) for handles in [owner.put(SIZES)] for rank in ranks[1:]]
    assert [data_of(each) for each in contents] == [EXPECTED] * 3
    received = [rank.has_received(each) for rank, each in zip(ranks[1:], contents, strict=True)]
    assert received == [True, False, False]


def test_a_relaying_peer_that_does_not_answer_is_bypassed(owner: Owned, ranks: list[Rank]) -> None:
    ranks[0].server.stop()  # it stays connected to the owner
    contents = ranks[1].fetch(owner.put(SIZES))
    assert data_of(contents) == EXPECTED
    assert ranks[1].has_received(contents)


def test_shards_that_a_relaying_peer_cannot_lend_come_from_the_owner(owner: Owned) -> None:
    with ExitStack() as stack:
        ranks = [Rank(is_shared=False) for _ in range(2)]
        for rank in ranks:
            stack.callback(rank.close)
            rank.fetch(owner.put([1]))
        handles = owner.put(SIZES)
        assert [data_of(rank.fetch(handles)) for rank in ranks] == [EXPECTED] * 2


def test_a_stopped_owner_is_gone_for_all_consumers(owner: Owned, ranks: list[Rank]) -> None:
    handles = owner.put(SIZES)
    owner.server.stop()
    for rank in ranks:
        with pytest.raises(OwnerGone) as caught:
            rank.fetch(handles)
        assert caught.value.owner == owner.address


def test_a_peer_returns_only_the_shards_that_it_was_lent(owner: Owned, ranks: list[Rank]) -> None:
    rank = ranks[0]
    relay = TensorRelay(rank.buffer, rank.peers)
    handles = owner.put([RECEIVE_BYTES // 4, RECEIVE_BYTES // 4])
    ids = [each.shard_id for each in handles]
    places = relay.places(handles, "peer")
    assert [place.num_bytes for place in places] == [RECEIVE_BYTES // 4] * 2
    relay.unpin([*ids, 5], "unknown")
    relay.unpin([ids[0], ids[0], 5], "peer")
    lent = weakref.ref(rank.fetch(handles)[1].data)
    rank.buffer.clear(None)
    (again,) = rank.fetch(owner.put([RECEIVE_BYTES // 4]))
    place = rank.peers.range_of(again)
    assert place is not None
    assert place.offset < places[1].offset  # memory without views
    assert lent() is not None
    relay.drop_peer("peer")
    assert lent() is None
    relay.drop_peer("peer")
    assert relay.places([], "peer") == []


def test_private_memory_is_not_lent(owner: Owned) -> None:
    rank = Rank(is_shared=False)
    with pytest.raises(TensorError, match="private memory"):
        TensorRelay(rank.buffer, rank.peers).places(owner.put(SIZES), "peer")
    rank.close()


def test_no_descriptor_or_thread_is_left_open(owner: Owned) -> None:
    rank = Rank()
    rank.close()
    del rank
    before = opened()
    ranks = [Rank() for _ in range(2)]
    handles = owner.put(SIZES)
    for rank in ranks:
        assert data_of(rank.fetch(handles)) == EXPECTED
    for rank in ranks:
        rank.close()
    del rank, ranks
    soon(lambda: is_closed_since(before))  # the owner must notice the disconnects first


def test_a_relay_refuses_to_fetch_from_an_invalid_owner(ranks: list[Rank]) -> None:
    connection = connect(ranks[0].address, None, ReceiveBuffer(), "", lambda: None)
    for address, message in (("nowhere", "tcp://host:port"), ("tcp://10.1.2.3:4", "need keys")):
        with pytest.raises(TensorError, match=f"refused: {address}: .*{message}"):
            connection.fetch_carried(handles_of(address, [5]))
    assert connection.state is ConnectionState.READY
    connection.retire()


def test_the_smallest_address_fetches_for_the_others() -> None:
    index = PeerIndex()
    for address in "cab":
        index.add("here", address)
    assert [index.preferred("here", each) for each in "abc"] == ["", "a", "a"]


def test_a_peer_that_lends_nothing_is_sent_to_one_that_does() -> None:
    index = PeerIndex()
    assert index.preferred("here", "") == ""
    index.add("here", "b")
    assert index.preferred("here", "") == "b"


def test_peers_of_another_machine_are_not_preferred() -> None:
    index = PeerIndex()
    index.add("addresses", "a")
    assert index.preferred("here", "b") == ""


def test_a_peer_that_has_left_is_not_preferred() -> None:
    index = PeerIndex()
    index.add("here", "a")
    index.add("here", "a")  # connected again before the disconnect was noticed
    index.remove("here", "a")
    assert index.preferred("here", "b") == "a"
    index.remove("here", "a")
    assert index.preferred("here", "b") == ""


@hypothesis.given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", min_size=1))))
def test_no_peer_is_sent_to_one_that_may_wait_for_it(
    turns: list[tuple[str, str]],
) -> None:
    index, addresses = PeerIndex(), set[tuple[str, str]]()
    for memory, address in turns:
        if (memory, address) in addresses:
            index.remove(memory, address)
        else:
            index.add(memory, address)
        addresses ^= {(memory, address)}
        for each in addresses:
            asked = index.preferred(*each)
            assert not asked or (asked < each[1] and (each[0], asked) in addresses)
