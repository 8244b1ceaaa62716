"""A store returns what was put, frees it when due, and waits for the last view and for the peers
that have pinned it.
"""

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollmesh.core.errors import ShardMissing, StoreFull, TensorError
from rollmesh.tensors.arena import PAGE_BYTES, Arena
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.store import CHUNK, OwnerStore, StorageStats, StoreSettings
from rollmesh.testing.clock import FakeClock

MAX_BYTES = 64 * PAGE_BYTES
MANY = 20_000
SETTINGS = StoreSettings(max_bytes=MAX_BYTES, lease_s=100)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MAX_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(arena: Arena, clock: FakeClock) -> OwnerStore:
    store = OwnerStore(SETTINGS, clock, arena)
    store.owner = "tcp://127.0.0.1:7000"
    return store


def content(number: int, num_bytes: int = 100) -> Content:
    """An array full of `number`."""
    return Content("uint8", (num_bytes,), np.full(num_bytes, number % 256, np.uint8))


def put(store: OwnerStore, number: int, num_bytes: int = 100, step: int = UNTAGGED) -> int:
    """Store one shard full of `number`; return its id."""
    (handle,) = store.put([content(number, num_bytes)], step)
    return handle.shard_id


def reason(store: OwnerStore, shard_id: int) -> str:
    """Return the reason why the shard is missing."""
    with pytest.raises(ShardMissing) as raised:
        store.read(shard_id)
    assert (raised.value.shard_id, raised.value.owner) == (shard_id, store.owner)
    return raised.value.reason


def test_stored_contents_are_read_unchanged(store: OwnerStore) -> None:
    data = np.arange(24, dtype=np.uint8)
    contents = [Content("float32", (2, 3), data), content(1, 0), Content("int8", (), data[:1])]
    handles = store.put(contents, 3)
    first = store.incarnation << 32
    kinds = [("float32", (2, 3), 24), ("uint8", (0,), 0), ("int8", (), 1)]
    assert handles == [
        RTensor(first + number, store.owner, 3, *kind) for number, kind in enumerate(kinds)
    ]
    for handle, put_in in zip(handles, contents, strict=True):
        read = store.read(handle.shard_id)
        assert (read.dtype, read.shape) == (put_in.dtype, put_in.shape)
        assert read.data.tobytes() == put_in.data.tobytes()
        assert not read.data.flags.writeable


def test_a_shard_is_one_array_however_often_it_is_read(store: OwnerStore) -> None:
    shard_id = put(store, 1)
    one = store.read(shard_id)
    assert store.read(shard_id).data is one.data
    assert store.stats().num_tensors == 1


def test_a_put_is_a_copy(store: OwnerStore) -> None:
    mine = content(1)
    (handle,) = store.put([mine])
    mine.data[:] = 2
    assert (store.read(handle.shard_id).data == 1).all()


def test_shards_of_a_step_are_freed_with_it_and_others_stay(store: OwnerStore) -> None:
    early, late, never = (put(store, number) for number in range(3))
    store.take([early], 1)
    store.take([late], 2)
    assert store.end_step(1) == 1
    assert reason(store, early) == "cleared"
    assert store.stats().bytes_by_step == {2: 100, UNTAGGED: 100}
    assert store.end_step(5) == 1
    assert store.clear([never, never, late]) == 1
    assert store.stats().bytes_by_step == {}


def test_a_put_for_an_ended_step_stores_nothing(store: OwnerStore, arena: Arena) -> None:
    store.end_step(4)
    with pytest.raises(TensorError, match="step 4 has ended"):
        store.put([content(number) for number in range(600)], 4)
    assert (store.stats().num_tensors, arena.held_bytes) == (0, 0)


def test_take_takes_existing_shards_and_names_the_first_missing_one(store: OwnerStore) -> None:
    there, gone, also_there = (put(store, number) for number in range(3))
    store.clear([gone])
    with pytest.raises(ShardMissing, match="cleared") as raised:
        store.take([there, gone, also_there, 5], 1)
    assert raised.value.shard_id == gone
    assert store.stats().bytes_by_step == {1: 200}


def test_each_missing_shard_has_its_reason(store: OwnerStore, clock: FakeClock) -> None:
    cleared, leased = put(store, 1), put(store, 2)
    store.clear([cleared])
    clock.advance(100)
    assert store.expire() == 1
    reasons = [reason(store, each) for each in (cleared, leased, leased + 1, 3)]
    assert reasons == ["cleared", "expired", "never_seen", "owner_restarted"]


def test_a_renewed_lease_does_not_expire(store: OwnerStore, clock: FakeClock) -> None:
    put(store, 1)
    clock.advance(60)
    store.renew()
    clock.advance(99)
    assert store.expire() == 0
    clock.advance(1)
    assert store.expire() == 1


def test_a_freed_shard_stays_until_no_view_is_left(store: OwnerStore, arena: Arena) -> None:
    shard_id = put(store, 1, 40 * PAGE_BYTES)
    part = store.read(shard_id).data[7:9].view(np.int8)
    assert store.clear([shard_id]) == 1
    assert reason(store, shard_id) == "cleared"
    stats = store.stats()
    assert (stats.num_tensors, stats.total_bytes) == (0, 0)
    assert stats.retained_bytes == 40 * PAGE_BYTES
    with pytest.raises(StoreFull, match=f"{40 * PAGE_BYTES} of them freed and still looked at"):
        put(store, 2, 40 * PAGE_BYTES)
    for number in range(24):
        put(store, 3 + number, PAGE_BYTES)
    assert part.tolist() == [1, 1]
    del part
    put(store, 2, 40 * PAGE_BYTES)
    assert store.stats().retained_bytes == 0
    assert arena.held_bytes == MAX_BYTES


def test_a_view_that_ends_before_its_shard_frees_nothing(store: OwnerStore) -> None:
    shard_id = put(store, 1)
    for _ in range(3):
        assert (store.read(shard_id).data == 1).all()
        assert store.stats() == StorageStats(1, 100, 0, {UNTAGGED: 100}, store.stats().backed_bytes)


def test_a_store_creates_its_arena_and_closes_it(clock: FakeClock) -> None:
    store = OwnerStore(SETTINGS, clock)
    (place,) = store.pins.places([put(store, 1)], "peer")
    store.close()
    assert not Path(place.path).exists()


def test_other_calls_run_while_many_shards_are_cleared(store: OwnerStore) -> None:
    seen: list[int] = []

    class Watched(list[int]):
        """Reads the statistics at each slice, which takes the lock."""

        def __getitem__(self, part: Any) -> Any:
            seen.append(store.stats().num_tensors)
            return super().__getitem__(part)

    ids = Watched(each.shard_id for each in store.put([content(1, 8)] * 1000))
    assert store.clear(ids) == 1000
    assert seen == list(range(1000, 0, -CHUNK))


def test_a_chunk_of_a_large_clear_takes_less_than_a_millisecond() -> None:
    store = OwnerStore(StoreSettings(max_bytes=MANY * 64), FakeClock())
    ids = [each.shard_id for each in store.put([content(1, 8)] * MANY)]
    random.Random(1).shuffle(ids)
    costs_s = []
    for start in range(0, MANY, CHUNK):
        begun_s = time.thread_time()
        store.clear(ids[start : start + CHUNK])
        costs_s.append(time.thread_time() - begun_s)
    store.close()
    assert statistics.median(costs_s) < 0.001


class RandomUsers:
    """Threads that use one store at random, and check the shards that they view."""

    def __init__(self, store: OwnerStore) -> None:
        self.store = store
        self.faults: list[str] = []
        self.known: list[tuple[int, int]] = [(1, 0)]
        """Ids, and the number that fills each shard."""

    def run(self, seed: int) -> None:
        chance, seen = random.Random(seed), list[tuple[Content, int]]()
        for turn in range(150):
            try:
                self.turn(chance, seen, seed * 1000 + turn)
            except (ShardMissing, StoreFull):
                seen.clear()
            if not all((each.data == number % 256).all() for each, number in seen):
                self.faults.append(f"seed {seed} turn {turn}")

    def turn(self, chance: random.Random, seen: list[tuple[Content, int]], number: int) -> None:
        shard_id, filling = chance.choice(self.known)
        match chance.choice(
            ["put", "put", "read", "lend", "unpin", "take", "clear", "end", "drop"]
        ):
            case "put":
                sizes = [chance.randrange(2 * PAGE_BYTES) for _ in range(chance.randrange(5))]
                handles = self.store.put([content(number, size) for size in sizes])
                self.known += [(handle.shard_id, number) for handle in handles]
            case "read":
                seen.append((self.store.read(shard_id), filling))
            case "lend":
                (place,) = self.store.pins.places([shard_id], f"peer-{number % 3}")
                assert place.num_bytes <= 2 * PAGE_BYTES
            case "unpin":
                self.store.pins.unpin([each for each, _ in self.known[-20:]], f"peer-{number % 3}")
            case "take":
                self.store.take([shard_id], 1000 + number % 7)
            case "clear":
                self.store.clear([each for each, _ in chance.choices(self.known, k=4)])
            case "end":
                del seen[: chance.randrange(4)]
                self.store.end_step(number % 900)
            case "drop":
                seen.clear()
                self.store.pins.drop_peer(f"peer-{number % 3}")


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
@hypothesis.given(seeds=st.lists(st.integers(1, 999), min_size=4, max_size=4, unique=True))
def test_concurrent_threads_see_whole_shards_and_leave_nothing(seeds: list[int]) -> None:
    arena = Arena(MAX_BYTES)
    store = OwnerStore(SETTINGS, FakeClock(), arena)
    users = RandomUsers(store)
    threads = [threading.Thread(target=users.run, args=(seed,)) for seed in seeds]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert users.faults == []
    store.clear([shard_id for shard_id, _ in users.known])
    for number in range(3):
        store.pins.drop_peer(f"peer-{number}")
    assert store.stats() == StorageStats(0, 0, 0, {}, arena.backed_bytes)
    assert arena.held_bytes == 0
    assert arena.backed_bytes <= MAX_BYTES
    arena.close()


def test_lent_places_show_the_stored_bytes_and_are_pinned(store: OwnerStore) -> None:
    ids = [put(store, number) for number in range(3)]
    places = store.pins.places(ids, "peer")
    for number, place in enumerate(places):
        assert place.path.startswith(store.folder)
        assert (AttachedSegment(place.path).view(place.offset, place.num_bytes) == number).all()
    store.clear(ids)
    assert store.stats().retained_bytes == 300
    store.pins.unpin(ids[:2], "peer")
    assert store.stats().retained_bytes == 100
    store.pins.drop_peer("peer")
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


def test_pins_are_released_one_by_one(store: OwnerStore) -> None:
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
    store.pins.places([shard_id], "peer")
    store.clear([shard_id])
    del seen  # recorded now, and handled later
    store.pins.unpin([shard_id], "peer")
    assert store.stats().retained_bytes == 0
    ids = [put(store, number, PAGE_BYTES) for number in range(64)]
    assert [int(store.read(each).data[0]) for each in ids] == [*range(64)]


def test_a_peer_releases_only_its_own_pins(store: OwnerStore) -> None:
    shard_id = put(store, 1)
    store.pins.places([shard_id], "one")
    store.pins.unpin([shard_id], "two")
    store.pins.drop_peer("three")
    store.pins.unpin([shard_id + 1, 5], "one")
    store.clear([shard_id])
    assert store.stats().retained_bytes == 100


def test_if_one_shard_is_missing_none_is_pinned(store: OwnerStore) -> None:
    ids = [put(store, number % 256, 8) for number in range(600)]
    store.clear([ids[550]])
    with pytest.raises(ShardMissing) as raised:
        store.pins.places(ids, "peer")
    assert raised.value.shard_id == ids[550]
    store.clear(ids)
    assert store.stats().retained_bytes == 0


def test_private_memory_is_not_lent(tmp_path: Path) -> None:
    store = OwnerStore(SETTINGS, FakeClock(), Arena(SETTINGS.max_bytes, tmp_path / "absent"))
    shard_id = put(store, 1)
    assert store.folder == ""
    with pytest.raises(TensorError, match="private memory"):
        store.pins.places([shard_id], "peer")
    assert (store.read(shard_id).data == 1).all()
