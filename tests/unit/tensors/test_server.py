"""The server admits members of its mesh, survives malformed clients, and leaves nothing behind."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from rollmesh.core.errors import AddressError, OwnerGone
from rollmesh.tensors import server as server_module
from rollmesh.tensors.peers import Peers
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, new_keys
from tests.unit.tensors.owners import (
    PATIENCE_S,
    Owned,
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
def test_no_other_machine_is_let_in_without_keys(bind: str) -> None:
    with pytest.raises(AddressError, match=KEYS_VARIABLE), owned(bind=bind):
        pytest.fail("it serves")


def test_an_address_that_cannot_be_dialled_is_not_announced(keys: Keys) -> None:
    with pytest.raises(AddressError, match="cannot dial it"), owned("tcp://0.0.0.0:0", keys):
        pytest.fail("it serves")


def test_an_address_that_is_taken_is_named(owner: Owned) -> None:
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
def test_malformed_clients_cost_no_other_client_anything(owner: Owned, seed: int) -> None:
    rng = random.Random(seed)
    beginnings = [b"", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\x10\0\0\0", b"GET / HTTP/1.1\r\n"]
    with closing(Peers()) as peers:
        handles = owner.put(SIZES)
        for _ in range(50):
            with dial(owner) as vandal:
                vandal.sendall(rng.choice(beginnings) + rng.randbytes(rng.randrange(100)))
        assert len(peers.fetch(owner.address, handles)) == len(handles)
        soon(lambda: owner.num_guests() == 1)


def test_a_silent_client_delays_no_other(owner: Owned) -> None:
    with dial(owner), dial(owner):
        assert_serves(owner)
        assert owner.num_guests() <= 1, "they have no threads"


def test_one_too_many_is_hung_up_on(owner: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONSUMERS", 1)
    with closing(Peers(None)) as first, closing(Peers(None)) as second:
        first.fetch(owner.address, owner.put(SIZES))
        with pytest.raises(OwnerGone):
            second.fetch(owner.address, owner.put(SIZES))
    soon(lambda: owner.num_guests() == 0)
    assert_serves(owner)


def test_consumers_are_served_side_by_side(owner: Owned) -> None:
    """All of them view one copy."""
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


def test_stop_hangs_up_on_all_and_leaves_nothing() -> None:
    before = opened()
    with owned() as owner, dial(owner) as silent, closing(Peers()) as peers:
        contents = peers.fetch(owner.address, owner.put(SIZES))
        owner.server.stop()
        assert silent.recv(1) == b""
        owner.server.stop()
        del contents
    del owner, silent, peers
    assert is_closed_since(before)
