"""The server: which consumers it admits, how it answers valid and malformed messages, when their
loans end, and the debugging page, which shows a shard's bytes only with the admin token.
"""

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from rollmesh.core.addresses import own_address, split_address
from rollmesh.core.errors import AddressError, OwnerGone
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.tensors import acceptor
from rollmesh.tensors import server as server_module
from rollmesh.tensors.acceptor import MAX_REQUEST_BYTES
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
from rollmesh.tensors.handles import Content, RTensor, pack
from rollmesh.tensors.handshake import greet_owner
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.relay import PeerIndex
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.server import ConsumerConnection, ServerContext, TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.clock import FakeClock
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, new_keys
from tests.unit.tensors.owners import (
    PATIENCE_S,
    Owned,
    accept_consumer,
    content_of,
    is_closed_since,
    opened,
    owned,
    soon,
)

SIZES = [64, 0, 5000]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys.json")


@pytest.fixture
def owner() -> Iterator[Owned]:
    with owned() as owner:
        yield owner


def dial(owner: Owned) -> socket.socket:
    parts = urlsplit(owner.address)
    return socket.create_connection((parts.hostname, parts.port), PATIENCE_S)


def assert_serves(owner: Owned, keys: Keys | None = None) -> None:
    handles = owner.put(SIZES)
    with closing(Peers(keys)) as peers:
        contents = peers.fetch(owner.address, handles)
        assert [bytes(each.data) for each in contents] == [
            bytes(content_of(seed, size).data) for seed, size in enumerate(SIZES)
        ]


def test_handles_name_the_address_that_serves(owner: Owned) -> None:
    assert owner.address.startswith("tcp://127.0.0.1:")
    assert [each.owner for each in owner.put([1, 2])] == [owner.address] * 2


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://10.1.2.3:0", "tcp://[::]:0"])
def test_a_public_address_without_keys_is_refused(bind: str) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE), owned(bind=bind):
        pytest.fail("it serves")


def test_an_owner_on_all_interfaces_hands_out_an_address_of_its_machine(keys: Keys) -> None:
    with owned("tcp://0.0.0.0:0", keys) as owner:
        assert split_address(owner.address)[0] == own_address()


def test_an_address_in_use_is_refused(owner: Owned) -> None:
    with pytest.raises(AddressError, match="in use"), owned(bind=owner.address):
        pytest.fail("it serves")


def test_only_members_of_the_mesh_are_served(keys: Keys, tmp_path: Path) -> None:
    others = new_keys(tmp_path / "others.json")
    with owned(keys=keys) as owner:
        for wrong in (None, others):
            with pytest.raises(AddressError, match=KEYS_VARIABLE):
                assert_serves(owner, wrong)
        assert_serves(owner, keys)


def test_a_consumer_with_keys_fetches_only_from_owners_with_keys(owner: Owned, keys: Keys) -> None:
    with pytest.raises(AddressError, match="does not have the keys"):
        assert_serves(owner, keys)


@pytest.mark.parametrize("seed", range(4))
def test_malformed_clients_affect_no_other_client(owner: Owned, seed: int) -> None:
    rng = random.Random(seed)
    beginnings = [b"", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\x10\0\0\0", b"GET / HTTP/1.1\r\n"]
    with closing(Peers()) as peers:
        handles = owner.put(SIZES)
        for _ in range(50):
            with dial(owner) as client:
                client.sendall(rng.choice(beginnings) + rng.randbytes(rng.randrange(100)))
        assert len(peers.fetch(owner.address, handles)) == len(handles)
        soon(lambda: owner.num_consumers() == 1)


def test_a_silent_client_delays_no_other(owner: Owned) -> None:
    with dial(owner), dial(owner):
        assert_serves(owner)
        assert owner.num_consumers() <= 1, "they have no threads"


def test_a_consumer_beyond_the_limit_is_disconnected(
    owner: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONSUMERS", 1)
    with closing(Peers(None)) as first, closing(Peers(None)) as second:
        first.fetch(owner.address, owner.put(SIZES))
        with pytest.raises(OwnerGone):
            second.fetch(owner.address, owner.put(SIZES))
    soon(lambda: owner.num_consumers() == 0)
    assert_serves(owner)


def test_consumers_are_served_concurrently(owner: Owned) -> None:
    """All consumers view one copy."""
    handles = owner.put([100_000] * 4)
    together = threading.Barrier(8)
    seen: list[bool] = []

    def consume() -> None:
        with closing(Peers()) as peers:
            together.wait(PATIENCE_S)
            contents = peers.fetch(owner.address, handles)
            together.wait(PATIENCE_S)
            seen.append(
                all(
                    np.array_equal(each.data, content_of(seed, 100_000).data)
                    for seed, each in enumerate(contents)
                )
            )

    threads = [threading.Thread(target=consume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8
    stats = owner.store.stats()
    assert stats.total_bytes == 400_000
    assert stats.backed_bytes < 4_000_000


def test_stop_disconnects_all_and_leaves_nothing_open() -> None:
    before = opened()
    with owned() as owner, dial(owner) as silent, closing(Peers()) as peers:
        contents = peers.fetch(owner.address, owner.put(SIZES))
        owner.server.stop()
        assert silent.recv(1) == b""
        owner.server.stop()
        del contents
    del owner, silent, peers
    assert is_closed_since(before)


class Consumer:
    """The consumer's end, whose messages the test chooses."""

    def __init__(self, framed: FramedSocket, thread: threading.Thread) -> None:
        self.framed = framed
        self._thread = thread

    def ask(self, ask: Request) -> Answer:
        """Send a request; return the answer."""
        self.framed.send(frame(ask))
        return decode_answer(self.framed.receive())

    def has_ended(self) -> bool:
        """Wait for its thread in the server; return whether it ended."""
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def is_served(self) -> bool:
        """Whether it still has a thread in the server."""
        return self._thread.is_alive()


@contextmanager
def connected_consumer(owner: Owned, patience_s: float = PATIENCE_S) -> Iterator[Consumer]:
    """A consumer connection of `owner` in a thread; at the end the consumer disconnects, and the
    thread ends.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = FramedSocket(socket.create_connection(listening.getsockname()), PATIENCE_S)
        far = FramedSocket(listening.accept()[0], patience_s)
    admitted = Admitted("memory", owner.store.folder)
    host = ServerContext(owner.store, None, PeerIndex(), admitted)

    def serve() -> None:
        ConsumerConnection(f"peer {far}", far, host, accept_consumer(far, None, admitted)).serve()

    thread = threading.Thread(target=serve)
    thread.start()
    assert greet_owner(near, "owner", None) == admitted
    consumer = Consumer(near, thread)
    try:
        yield consumer
    finally:
        near.close()
        assert consumer.has_ended()


def ids_of(handles: list[RTensor]) -> list[int]:
    return [each.shard_id for each in handles]


def lent(owner: Owned, consumer: Consumer, sizes: list[int]) -> tuple[list[int], Lent]:
    """Lend shards to the consumer and clear them; return their ids and the loan."""
    ids = ids_of(owner.put(sizes))
    answer = consumer.ask(Fetch(pack_numbers(ids), True))
    assert isinstance(answer, Lent)
    assert owner.store.clear(ids) == len(ids)
    return ids, answer


def test_a_lent_place_contains_the_bytes(owner: Owned) -> None:
    with connected_consumer(owner) as consumer:
        _, answer = lent(owner, consumer, SIZES)
        assert len(answer.paths) == 1
        attached = AttachedSegment(answer.paths[0])
        places = zip(unpack_numbers(answer.offsets), unpack_numbers(answer.sizes), strict=True)
        for seed, (offset, size) in enumerate(places):
            assert size == SIZES[seed]
            assert bytes(attached.view(offset, size)) == bytes(content_of(seed, size).data)
    assert owner.store.stats().retained_bytes == 0


def test_loans_are_returned_one_by_one(owner: Owned) -> None:
    with connected_consumer(owner) as consumer:
        ids, _ = lent(owner, consumer, [100, 200])
        assert owner.store.stats().retained_bytes == 300
        assert consumer.ask(Clear(pack_numbers([]), pack_numbers([ids[0]]))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 200
        consumer.framed.send(frame(Returned(pack_numbers([ids[1]]))))
        soon(lambda: owner.store.stats().retained_bytes == 0)


def test_a_consumers_step_takes_shards_and_frees_them_when_it_ends(owner: Owned) -> None:
    ids = ids_of(owner.put([100, 200, 300]))
    with connected_consumer(owner) as consumer:
        assert consumer.ask(TakeShards(pack_numbers(ids[:2]), 3)) == ShardsTaken()
        assert owner.store.stats().bytes_by_step == {-1: 300, 3: 300}
        assert consumer.ask(EndStep(2)) == Cleared(0)
        assert consumer.ask(EndStep(3)) == Cleared(2)
        assert consumer.ask(TakeShards(pack_numbers(ids), 4)) == Missing(ids[0], "cleared")
        assert owner.store.stats().bytes_by_step == {4: 300}, "existing shards are taken"
        answer = consumer.ask(TakeShards(pack_numbers(ids), 3))
        assert isinstance(answer, Refused)
        assert answer.why.startswith("step 3 has ended")


@pytest.mark.parametrize("ask", [TakeShards(b"", -1), EndStep(-1)])
def test_a_negative_step_is_malformed(owner: Owned, ask: TakeShards | EndStep) -> None:
    with connected_consumer(owner) as consumer:
        consumer.framed.send(frame(ask))
        assert consumer.has_ended()


def test_a_client_that_takes_a_batch_is_live_so_its_leases_restart() -> None:
    clock = FakeClock()
    store = OwnerStore(StoreSettings(max_bytes=2**20, lease_s=60), clock)
    owner = Owned(store, TensorServer(store, "tcp://127.0.0.1:0"))
    with closing(store), connected_consumer(owner) as consumer:
        ids = ids_of(owner.put([10]))
        clock.advance(50)
        assert consumer.ask(TakeShards(pack_numbers(ids), 3)) == ShardsTaken()
        clock.advance(50)
        assert store.expire() == 0
        clock.advance(10)
        assert store.expire() == 1
    owner.server.stop()


def test_a_disconnected_consumer_holds_nothing(owner: Owned) -> None:
    with connected_consumer(owner) as consumer:
        lent(owner, consumer, SIZES)
        assert owner.store.stats().retained_bytes == sum(SIZES)
    assert owner.store.stats().retained_bytes == 0


@pytest.mark.parametrize(
    "malformed", [b"\xff" * 8, frame(KeyProof(b"")), frame(Hello(1, bytes(32)))]
)
def test_a_malformed_consumer_is_ignored_and_keeps_its_loans(
    owner: Owned, malformed: bytes
) -> None:
    with connected_consumer(owner) as consumer:
        lent(owner, consumer, SIZES)
        consumer.framed.send(malformed)
        assert not consumer.framed.wait_for_frame()
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
    with connected_consumer(owner) as consumer:
        consumer.framed.send(malformed)
        assert consumer.has_ended()
        assert not consumer.framed.wait_for_frame()


def test_a_consumer_that_does_not_read_is_disconnected(owner: Owned) -> None:
    with connected_consumer(owner, patience_s=0.05) as consumer:
        ids = ids_of(owner.put([2**24]))
        consumer.framed.send(frame(Fetch(pack_numbers(ids * 4), False)))
        assert consumer.has_ended()
        owner.store.clear(ids)
        assert owner.store.stats().retained_bytes == 0


def test_shards_may_be_cleared_while_they_are_sent(owner: Owned) -> None:
    with connected_consumer(owner) as consumer:
        ids = ids_of(owner.put([2**24]))
        answer = consumer.ask(Fetch(pack_numbers(ids), False))
        assert answer == Sent(pack_numbers([2**24]))
        owner.store.clear(ids)
        owner.put([2**24, 2**24])
        received = bytearray(2**24)
        consumer.framed.fill([memoryview(received)])
        assert received == bytes(content_of(0, 2**24).data)
        assert consumer.ask(Clear(pack_numbers(ids))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 0


@pytest.mark.parametrize("is_by_memory", [True, False])
def test_a_missing_shard_is_named_and_none_is_held(owner: Owned, is_by_memory: bool) -> None:
    with connected_consumer(owner) as consumer:
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


def test_private_shards_are_sent_and_a_loan_of_them_is_refused() -> None:
    with owned(is_shared=False) as owner, connected_consumer(owner) as consumer:
        ids = ids_of(owner.put([8]))
        answer = consumer.ask(Fetch(pack_numbers(ids), True))
        assert isinstance(answer, Refused)
        assert isinstance(consumer.ask(Fetch(pack_numbers(ids), False)), Sent)


def test_a_server_without_a_relay_refuses_to_fetch_for_peers(owner: Owned) -> None:
    with connected_consumer(owner) as consumer:
        answer = consumer.ask(FetchForPeer(pack(owner.put([5]))))
        assert answer == Refused("nothing is fetched for others here")


def test_returning_shards_that_were_not_borrowed_changes_nothing(owner: Owned) -> None:
    with connected_consumer(owner) as consumer, connected_consumer(owner) as client:
        ids, _ = lent(owner, consumer, [100])
        assert client.ask(Clear(pack_numbers([]), pack_numbers([*ids, 5, 2**64 - 1]))) == Cleared(0)
        assert owner.store.stats().retained_bytes == 100


TOKEN = "a-token-for-tests"


@pytest.fixture
def page_owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owned]:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, TOKEN)
    with owned() as page_owner:
        yield page_owner


def get(
    page_owner: Owned, path: str, token: str | None = TOKEN, scheme: str = "Bearer "
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Return status, body and headers."""
    parts = urlsplit(page_owner.address)
    headers = {} if token is None else {"Authorization": f"{scheme}{token}"}
    with closing(http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


@pytest.mark.parametrize("form", [str, hex])
@pytest.mark.parametrize("size", [0, 5, 2**21])
def test_a_shard_is_shown(page_owner: Owned, form: type[str], size: int) -> None:
    data = content_of(0, size).data
    (handle,) = page_owner.store.put([Content("float8_e5m2", (size, 1), data)])
    status, body, headers = get(page_owner, f"/tensors/{form(handle.shard_id)}")
    assert (status, body) == (200, bytes(data))
    assert headers["X-Rollmesh-Dtype"] == "float8_e5m2"
    assert headers["X-Rollmesh-Shape"] == f"{size},1"
    assert headers["Content-Length"] == str(size)


@pytest.mark.parametrize(
    ("token", "scheme"),
    [(None, ""), ("", "Bearer "), ("other", "Bearer "), (TOKEN[:-1], "Bearer "), (TOKEN, "Basic ")],
)
def test_a_request_without_the_token_is_shown_nothing(
    page_owner: Owned, token: str | None, scheme: str
) -> None:
    (handle,) = page_owner.put([5])
    for path in (f"/tensors/{handle.shard_id}", "/tensors/1", "/"):
        status, body, _ = get(page_owner, path, token, scheme)
        assert status == 401
        assert ADMIN_TOKEN_VARIABLE.encode() in body


def test_without_a_token_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE, raising=False)
    with owned() as page_owner:
        (handle,) = page_owner.put([5])
        for token in (None, "", TOKEN):
            assert get(page_owner, f"/tensors/{handle.shard_id}", token)[0] == 401
        assert get(page_owner, f"/tensors/{handle.shard_id}", "", scheme="")[0] == 401


@pytest.mark.parametrize(
    "path", ["/", "/tensors", "/tensors/", "/tensors/x", "/tensors/-1", f"/tensors/{2**64}", "/x/1"]
)
def test_an_invalid_shard_path_is_not_found(page_owner: Owned, path: str) -> None:
    assert get(page_owner, path)[0] == 404


def test_a_cleared_shard_is_reported_as_cleared(page_owner: Owned) -> None:
    (handle,) = page_owner.put([5])
    page_owner.store.clear([handle.shard_id])
    status, body, _ = get(page_owner, f"/tensors/{handle.shard_id}")
    assert status == 404
    assert b"cleared" in body


def test_a_client_that_drips_its_request_is_disconnected(
    page_owner: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.1)
    host, _, port = urlsplit(page_owner.address).netloc.partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as dripping:
        dripping.sendall(b"GET ")
        dripping.settimeout(0.02)

        def is_hung_up() -> bool:
            try:
                dripping.sendall(b"x")
                return not dripping.recv(1)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        soon(is_hung_up)
    soon(lambda: page_owner.num_consumers() == 0)
    assert get(page_owner, "/")[0] == 404, "others are still served"


def test_a_request_without_end_is_disconnected(page_owner: Owned) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        get(page_owner, "/tensors/" + "9" * MAX_REQUEST_BYTES)
    soon(lambda: page_owner.num_consumers() == 0)
