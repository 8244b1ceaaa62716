"""Memory lent to a peer stays in place until the peer releases it, and its pins are its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollmesh.core.errors import ShardMissing, TensorError
from rollmesh.tensors.arena import PAGE_BYTES, Arena
from rollmesh.tensors.handles import Content
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.clock import FakeClock

SETTINGS = StoreSettings(max_bytes=64 * PAGE_BYTES)


@pytest.fixture
def store() -> Iterator[OwnerStore]:
    store = OwnerStore(SETTINGS, FakeClock())
    yield store
    store.close()


def put(store: OwnerStore, number: int, num_bytes: int = 100) -> int:
    """The id of one shard full of `number`."""
    content = Content("uint8", (num_bytes,), np.full(num_bytes, number, np.uint8))
    (handle,) = store.put([content])
    return handle.shard_id


def test_a_peer_sees_what_was_put_and_pins_it(store: OwnerStore) -> None:
    ids = [put(store, number) for number in range(3)]
    places = store.pins.places(ids, "guest")
    for number, place in enumerate(places):
        assert place.path.startswith(store.folder)
        assert (AttachedSegment(place.path).view(place.offset, place.num_bytes) == number).all()
    store.clear(ids)
    assert store.stats().retained_bytes == 300
    store.pins.unpin(ids[:2], "guest")
    assert store.stats().retained_bytes == 100
    store.pins.drop_peer("guest")
    assert store.stats().retained_bytes == 0


def test_windows_hold_the_bytes_in_order_and_are_pinned(store: OwnerStore) -> None:
    ids = [put(store, number, num_bytes) for number, num_bytes in enumerate([64, 64, 10, 64])]
    order = [ids[0], ids[1], ids[3], ids[2], ids[0]]
    sizes, windows = store.pins.windows(order, "peer")
    assert sizes == [64, 64, 64, 10, 64]
    assert b"".join(windows) == b"".join(bytes(store.read(each).data) for each in order)
    assert windows[0].nbytes == 128
    assert windows[0].readonly
    store.clear(ids)
    assert store.stats().retained_bytes == 202
    store.pins.unpin(order, "peer")
    assert store.stats().retained_bytes == 0
    with pytest.raises(ShardMissing):
        store.pins.windows(ids, "peer")


def test_each_pin_is_taken_back_by_itself(store: OwnerStore) -> None:
    shard_id = put(store, 1)
    store.pins.places([shard_id, shard_id], "one")
    store.pins.places([shard_id], "two")
    seen = [store.read(shard_id)]
    store.clear([shard_id])
    ends: list[Callable[[], None]] = [
        seen.clear,
        lambda: store.pins.unpin([shard_id], "one"),
        lambda: store.pins.unpin([shard_id, shard_id, shard_id], "one"),
        lambda: store.pins.drop_peer("two"),
    ]
    for end in ends:
        assert store.stats().retained_bytes == 100
        end()
    assert store.stats().retained_bytes == 0


def test_an_unpinned_shard_is_freed_once(store: OwnerStore) -> None:
    shard_id = put(store, 1, PAGE_BYTES)
    seen = store.read(shard_id)
    store.pins.places([shard_id], "guest")
    store.clear([shard_id])
    del seen  # which is noted, and looked at later
    store.pins.unpin([shard_id], "guest")
    assert store.stats().retained_bytes == 0
    ids = [put(store, number, PAGE_BYTES) for number in range(64)]
    assert [int(store.read(each).data[0]) for each in ids] == [*range(64)]


def test_what_a_peer_has_not_pinned_it_does_not_unpin(store: OwnerStore) -> None:
    shard_id = put(store, 1)
    store.pins.places([shard_id], "one")
    store.pins.unpin([shard_id], "two")
    store.pins.drop_peer("three")
    store.pins.unpin([shard_id + 1, 5], "one")
    store.clear([shard_id])
    assert store.stats().retained_bytes == 100


def test_where_one_is_missing_none_is_pinned(store: OwnerStore) -> None:
    ids = [put(store, number % 256, 8) for number in range(600)]
    store.clear([ids[550]])
    with pytest.raises(ShardMissing) as raised:
        store.pins.places(ids, "guest")
    assert raised.value.shard_id == ids[550]
    store.clear(ids)
    assert store.stats().retained_bytes == 0


def test_private_memory_is_not_lent(tmp_path: Path) -> None:
    store = OwnerStore(SETTINGS, FakeClock(), Arena(SETTINGS.max_bytes, tmp_path / "absent"))
    shard_id = put(store, 1)
    assert store.folder == ""
    with pytest.raises(TensorError, match="private memory"):
        store.pins.places([shard_id], "guest")
    assert (store.read(shard_id).data == 1).all()
