"""Reserved memory of a store becomes shards once it is complete; otherwise it is freed."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollmesh.core.errors import StoreFull, TensorError
from rollmesh.tensors.arena import PAGE_BYTES, Arena
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.tensors.store import CHUNK, OwnerStore, ShardSpec, StoreSettings
from rollmesh.testing.clock import FakeClock

MAX_BYTES = 64 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MAX_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def store(arena: Arena) -> OwnerStore:
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), FakeClock(), arena)
    store.owner = "tcp://127.0.0.1:7000"
    return store


def kinds(*sizes: int) -> list[ShardSpec]:
    return [ShardSpec("uint8", (size,), size) for size in sizes]


def is_empty(store: OwnerStore, arena: Arena) -> bool:
    stats = store.stats()
    return (stats.num_tensors, stats.retained_bytes, arena.held_bytes) == (0, 0, 0)


def test_bytes_written_to_a_reservation_are_read_by_the_owner_and_by_peers(
    store: OwnerStore,
) -> None:
    with store.reserve([ShardSpec("float32", (2, 3), 24), *kinds(0, 100)]) as reserved:
        for number, memory in enumerate(reserved.memory):
            memory[:] = number + 1
        handles = reserved.commit(4)
    first = store.incarnation << 32
    assert handles == [
        RTensor(first, store.owner, 4, "float32", (2, 3), 24),
        RTensor(first + 1, store.owner, 4, "uint8", (0,), 0),
        RTensor(first + 2, store.owner, 4, "uint8", (100,), 100),
    ]
    read = [store.read(handle.shard_id) for handle in handles]
    assert [each.data.tolist() for each in read] == [[1] * 24, [], [3] * 100]
    assert not any(each.data.flags.writeable for each in read)
    (place,) = store.pins.places([handles[2].shard_id], "peer")
    assert (AttachedSegment(place.path).view(place.offset, place.num_bytes) == 3).all()


def test_a_reservation_becomes_shards_without_a_copy(store: OwnerStore) -> None:
    with store.reserve(kinds(100, 100)) as reserved:
        written = [memory.ctypes.data for memory in reserved.memory]
        handles = reserved.commit()
    assert [store.read(each.shard_id).data.ctypes.data for each in handles] == written


def test_reserved_memory_is_held_and_belongs_to_no_shard(store: OwnerStore, arena: Arena) -> None:
    with store.reserve(kinds(PAGE_BYTES)) as reserved:
        assert (store.stats().num_tensors, arena.held_bytes) == (0, PAGE_BYTES)
        reserved.commit()
    assert (store.stats().num_tensors, arena.held_bytes) == (1, PAGE_BYTES)


def write_and_fail(store: OwnerStore) -> None:
    with store.reserve(kinds(*[100] * 3 * CHUNK)) as reserved:
        reserved.memory[0][:] = 1
        raise KeyboardInterrupt


def test_a_failed_write_leaves_nothing(store: OwnerStore, arena: Arena) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(store)
    assert is_empty(store, arena)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_ended_reservation_is_neither_written_nor_committed_again(
    store: OwnerStore, is_committed: bool
) -> None:
    with store.reserve(kinds(100)) as reserved:
        if is_committed:
            reserved.commit()
    with pytest.raises(AssertionError):
        reserved.commit()
    with pytest.raises(AssertionError):
        _ = reserved.memory
    assert store.stats().num_tensors == is_committed


def test_nothing_is_committed_to_an_ended_step(store: OwnerStore, arena: Arena) -> None:
    store.end_step(4)
    with (
        pytest.raises(TensorError, match="step 4 has ended"),
        store.reserve(kinds(*[8] * 3 * CHUNK)) as reserved,
    ):
        reserved.commit(4)
    assert is_empty(store, arena)


class Interrupted(list[ShardSpec]):
    """Kinds of which the second slice is read after another event."""

    def __init__(self, kinds: list[ShardSpec], happen: Callable[[], object]) -> None:
        super().__init__(kinds)
        self.happen = happen
        self.num_cuts = 0

    def __getitem__(self, part: Any) -> Any:
        self.num_cuts += 1
        if self.num_cuts == 2:
            self.happen()
        return super().__getitem__(part)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_commit_that_is_interrupted_leaves_nothing(
    store: OwnerStore, arena: Arena, is_interrupted: bool
) -> None:
    happen = interrupt if is_interrupted else partial(store.end_step, 4)
    many = Interrupted(kinds(*[8] * 3 * CHUNK), happen)
    with pytest.raises((TensorError, KeyboardInterrupt)), store.reserve(many) as reserved:
        reserved.commit(4)
    assert many.num_cuts == 2
    assert is_empty(store, arena)


def test_a_reservation_that_does_not_fit_is_refused(store: OwnerStore, arena: Arena) -> None:
    with pytest.raises(StoreFull):
        store.reserve(kinds(MAX_BYTES // 2, MAX_BYTES))
    assert is_empty(store, arena)
    with store.reserve(kinds(MAX_BYTES)), pytest.raises(StoreFull):
        store.put([Content("uint8", (1,), np.zeros(1, np.uint8))])
    store.put([Content("uint8", (1,), np.zeros(1, np.uint8))])


def test_reservations_work_without_shared_memory(tmp_path: Path) -> None:
    store = OwnerStore(
        StoreSettings(max_bytes=MAX_BYTES), FakeClock(), Arena(MAX_BYTES, tmp_path / "absent")
    )
    with store.reserve(kinds(100)) as reserved:
        reserved.memory[0][:] = 7
        (handle,) = reserved.commit()
    assert (store.read(handle.shard_id).data == 7).all()


@hypothesis.settings(derandomize=True, database=None, deadline=None)
@hypothesis.given(
    turns=st.lists(
        st.tuples(
            st.lists(st.integers(0, 20 * PAGE_BYTES), max_size=4),
            st.sampled_from(["commit", "leave", "fail", "commit and clear"]),
        ),
        max_size=12,
    )
)
def test_random_reservations_leave_only_held_memory_in_use(
    turns: list[tuple[list[int], str]],
) -> None:
    arena = Arena(MAX_BYTES)
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), FakeClock(), arena)
    held: dict[int, int] = {}
    for number, (sizes, ending) in enumerate(turns):
        try:
            with store.reserve(kinds(*sizes)) as reserved:
                for memory in reserved.memory:
                    memory[:] = number
                if ending.startswith("commit"):
                    ids = [handle.shard_id for handle in reserved.commit()]
                    held |= dict.fromkeys(ids, number)
                if ending == "fail":
                    raise StoreFull(0, 0, 0)
                if ending.endswith("clear"):
                    assert store.clear(ids) == len(ids)
                    held = {each: of for each, of in held.items() if each not in ids}
        except StoreFull:
            pass
        for shard_id, filling in held.items():
            assert (store.read(shard_id).data == filling).all()
        assert store.stats().num_tensors == len(held)
    store.clear([*held])
    assert is_empty(store, arena)
    arena.close()
