"""A consumer is answered while its messages are valid; its loans stay until it disconnects."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import (
    MAX_IDS,
    Admitted,
    Answer,
    Clear,
    Cleared,
    EndStep,
    Fetch,
    FetchForPeer,
    Hello,
    KeyProof,
    Lent,
    Missing,
    Refused,
    Request,
    Returned,
    Sent,
    ShardsTaken,
    TakeShards,
    decode_answer,
    frame,
    pack_numbers,
    unpack_numbers,
)
from rollmesh.tensors.handles import RTensor, pack
from rollmesh.tensors.handshake import greet_owner
from rollmesh.tensors.relay import PeerIndex
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.server import ConsumerConnection, ServerContext, TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.clock import FakeClock
from tests.unit.tensors.owners import PATIENCE_S, Owned, accept_consumer, content_of, owned, soon

SIZES = [64, 0, 5000]


@pytest.fixture
def owner() -> Iterator[Owned]:
    with owned() as owner:
        yield owner


class Consumer:
    """The consumer's end, whose messages the test chooses."""

    def __init__(self, line: FramedSocket, thread: threading.Thread) -> None:
        self.line = line
        self._thread = thread

    def ask(self, ask: Request) -> Answer:
        """Its next answer."""
        self.line.send(frame(ask))
        return decode_answer(self.line.receive())

    def is_left(self) -> bool:
        """Whether its thread ends."""
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def is_served(self) -> bool:
        """Whether it still has a thread."""
        return self._thread.is_alive()


@contextmanager
def seated(owner: Owned, patience_s: float = PATIENCE_S) -> Iterator[Consumer]:
    """A consumer connection of `owner` in a thread; at the end the consumer disconnects, and the
    thread ends.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = FramedSocket(socket.create_connection(listening.getsockname()), PATIENCE_S)
        far = FramedSocket(listening.accept()[0], patience_s)
    admitted = Admitted("memory", owner.store.folder)
    host = ServerContext(owner.store, None, PeerIndex(), admitted)

    def serve() -> None:
        ConsumerConnection(f"guest {far}", far, host, accept_consumer(far, None, admitted)).serve()

    thread = threading.Thread(target=serve)
    thread.start()
    assert greet_owner(near, "owner", None) == admitted
    consumer = Consumer(near, thread)
    try:
        yield consumer
    finally:
        near.close()
        assert consumer.is_left()


def ids_of(handles: list[RTensor]) -> list[int]:
    return [each.shard_id for each in handles]


def lent(owner: Owned, consumer: Consumer, sizes: list[int]) -> tuple[list[int], Lent]:
    """Shards that the consumer has borrowed, and which have then been cleared."""
    ids = ids_of(owner.put(sizes))
    answer = consumer.ask(Fetch(pack_numbers(ids), True))
    assert isinstance(answer, Lent)
    assert owner.store.clear(ids) == len(ids)
    return ids, answer


def test_a_place_is_where_the_bytes_lie(owner: Owned) -> None:
    with seated(owner) as consumer:
        _, answer = lent(owner, consumer, SIZES)
        assert len(answer.paths) == 1
        attached = AttachedSegment(answer.paths[0])
        places = zip(unpack_numbers(answer.offsets), unpack_numbers(answer.sizes), strict=True)
        for seed, (offset, size) in enumerate(places):
            assert size == SIZES[seed]
            assert bytes(attached.view(offset, size)) == bytes(content_of(seed, size).data)
    assert owner.store.stats().retained_bytes == 0


def test_each_loan_is_returned_by_itself(owner: Owned) -> None:
    with seated(owner) as consumer:
        ids, _ = lent(owner, consumer, [100, 200])
        assert owner.store.stats().retained_bytes == 300
        assert consumer.ask(Clear(pack_numbers([]), pack_numbers([ids[0]]))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 200
        consumer.line.send(frame(Returned(pack_numbers([ids[1]]))))
        soon(lambda: owner.store.stats().retained_bytes == 0)


def test_a_consumers_step_takes_shards_and_frees_them_when_it_ends(owner: Owned) -> None:
    ids = ids_of(owner.put([100, 200, 300]))
    with seated(owner) as consumer:
        assert consumer.ask(TakeShards(pack_numbers(ids[:2]), 3)) == ShardsTaken()
        assert owner.store.stats().bytes_by_step == {-1: 300, 3: 300}
        assert consumer.ask(EndStep(2)) == Cleared(0)
        assert consumer.ask(EndStep(3)) == Cleared(2)
        assert consumer.ask(TakeShards(pack_numbers(ids), 4)) == Missing(ids[0], "cleared")
        assert owner.store.stats().bytes_by_step == {4: 300}, "what is there is taken all the same"
        answer = consumer.ask(TakeShards(pack_numbers(ids), 3))
        assert isinstance(answer, Refused)
        assert answer.why.startswith("step 3 has ended")


@pytest.mark.parametrize("ask", [TakeShards(b"", -1), EndStep(-1)])
def test_a_step_that_is_none_is_nonsense(owner: Owned, ask: TakeShards | EndStep) -> None:
    with seated(owner) as consumer:
        consumer.line.send(frame(ask))
        assert consumer.is_left()


def test_a_client_that_takes_a_batch_is_live_so_its_leases_restart() -> None:
    clock = FakeClock()
    store = OwnerStore(StoreSettings(max_bytes=2**20, lease_s=60), clock)
    owner = Owned(store, TensorServer(store, "tcp://127.0.0.1:0"))
    with closing(store), seated(owner) as consumer:
        ids = ids_of(owner.put([10]))
        clock.advance(50)
        assert consumer.ask(TakeShards(pack_numbers(ids), 3)) == ShardsTaken()
        clock.advance(50)
        assert store.expire() == 0
        clock.advance(10)
        assert store.expire() == 1
    owner.server.stop()


def test_a_disconnected_consumer_holds_nothing(owner: Owned) -> None:
    with seated(owner) as consumer:
        lent(owner, consumer, SIZES)
        assert owner.store.stats().retained_bytes == sum(SIZES)
    assert owner.store.stats().retained_bytes == 0


@pytest.mark.parametrize(
    "malformed", [b"\xff" * 8, frame(KeyProof(b"")), frame(Hello(1, bytes(32)))]
)
def test_a_malformed_consumer_is_ignored_and_keeps_its_loans(
    owner: Owned, malformed: bytes
) -> None:
    with seated(owner) as consumer:
        lent(owner, consumer, SIZES)
        consumer.line.send(malformed)
        assert not consumer.line.wait_for_frame()
        assert owner.store.stats().retained_bytes == sum(SIZES)
        assert consumer.is_served()
    assert owner.store.stats().retained_bytes == 0


TOO_MANY = pack_numbers([1]) * (MAX_IDS + 1)


@pytest.mark.parametrize(
    "malformed",
    [
        b"\xff" * 8,
        frame(KeyProof(b"")),
        frame(Fetch(b"odd", False)),
        frame(Fetch(TOO_MANY, True)),
        frame(Clear(TOO_MANY)),
        frame(FetchForPeer(b"no pack")),
        frame(Returned(TOO_MANY)),
    ],
)
def test_a_malformed_consumer_without_loans_is_disconnected(owner: Owned, malformed: bytes) -> None:
    with seated(owner) as consumer:
        consumer.line.send(malformed)
        assert consumer.is_left()
        assert not consumer.line.wait_for_frame()


def test_a_consumer_that_does_not_read_is_disconnected(owner: Owned) -> None:
    with seated(owner, patience_s=0.05) as consumer:
        ids = ids_of(owner.put([2**24]))
        consumer.line.send(frame(Fetch(pack_numbers(ids * 4), False)))
        assert consumer.is_left()
        owner.store.clear(ids)
        assert owner.store.stats().retained_bytes == 0


def test_what_is_sent_may_be_cleared_meanwhile(owner: Owned) -> None:
    with seated(owner) as consumer:
        ids = ids_of(owner.put([2**24]))
        answer = consumer.ask(Fetch(pack_numbers(ids), False))
        assert answer == Sent(pack_numbers([2**24]))
        owner.store.clear(ids)
        owner.put([2**24, 2**24])
        came = bytearray(2**24)
        consumer.line.fill([memoryview(came)])
        assert came == bytes(content_of(0, 2**24).data)
        assert consumer.ask(Clear(pack_numbers(ids))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 0


@pytest.mark.parametrize("is_by_memory", [True, False])
def test_a_missing_shard_is_named_and_none_is_held(owner: Owned, is_by_memory: bool) -> None:
    with seated(owner) as consumer:
        ids = ids_of(owner.put(SIZES))
        owner.store.clear(ids[1:2])
        assert consumer.ask(Fetch(pack_numbers(ids), is_by_memory)) == Missing(ids[1], "cleared")
        never = ids[-1] + 1
        assert consumer.ask(Fetch(pack_numbers([never]), is_by_memory)) == Missing(
            never, "never_seen"
        )
        foreign = consumer.ask(Fetch(pack_numbers([1]), is_by_memory))
        assert foreign == Missing(1, "owner_restarted")
        owner.store.clear(ids)
        assert owner.store.stats().retained_bytes == 0


def test_what_cannot_be_lent_is_refused() -> None:
    with owned(is_shared=False) as owner, seated(owner) as consumer:
        ids = ids_of(owner.put([8]))
        answer = consumer.ask(Fetch(pack_numbers(ids), True))
        assert isinstance(answer, Refused)
        assert isinstance(consumer.ask(Fetch(pack_numbers(ids), False)), Sent)


def test_a_process_that_relays_for_no_other_refuses(owner: Owned) -> None:
    with seated(owner) as consumer:
        answer = consumer.ask(FetchForPeer(pack(owner.put([5]))))
        assert answer == Refused("nothing is fetched for others here")


def test_returning_what_one_never_had_changes_nothing(owner: Owned) -> None:
    with seated(owner) as consumer, seated(owner) as vandal:
        ids, _ = lent(owner, consumer, [100])
        assert vandal.ask(Clear(pack_numbers([]), pack_numbers([*ids, 5, 2**64 - 1]))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 100
