"""A room holds samples as they were laid, where others see them; what is cleared is gone."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from rollmesh.core.errors import StoreFull
from rollmesh.serve.client.samples import BYTES_PER_TOKEN, Sample, SampleArrays, lay_plainly
from rollmesh.tensors.arena import PAGE_BYTES, Arena
from rollmesh.tensors.segment import Attached
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.pacing.ready_queue import LocalAllocator, StoreAllocator, copy_samples
from tests.unit.trainer.samples import new_sample

MAX_BYTES = 16 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(MAX_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def store(arena: Arena) -> OwnerStore:
    return OwnerStore(StoreSettings(max_bytes=MAX_BYTES), FakeClock(), arena)


def given(*lengths: int) -> list[Sample]:
    """Samples of these lengths, of which no two say the same."""
    return [
        new_sample(
            [100 * number + at for at in range(length)],
            [0] + [1] * (length - 1),
            index=number,
            reward=number,
            logprobs=np.linspace(-number - 1, -1, length),
            policy_version=number,
        )
        for number, length in enumerate(lengths)
    ]


def assert_alike(samples: Sequence[Sample], others: Sequence[Sample]) -> None:
    for one, other in zip(samples, others, strict=True):
        assert (one.rollout_id, one.reward) == (other.rollout_id, other.reward)
        for name in SampleArrays._fields:
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs), name


def test_samples_are_in_the_store_as_they_were_and_nobody_changes_them(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(given(4, 9, 2), allocator.lay)
    assert_alike(samples, given(4, 9, 2))
    assert all(map(allocator.holds, samples))
    assert not any(map(allocator.holds, given(4, 9, 2)))
    assert not any(sample.token_ids.flags.writeable for sample in samples)
    assert store.stats().total_bytes == BYTES_PER_TOKEN * 15


def test_who_attaches_by_the_handle_sees_the_very_bytes(store: OwnerStore) -> None:
    (sample,) = copy_samples(given(7), StoreAllocator(store).lay)
    assert sample.handle is not None
    (place,) = store.pins.places([sample.handle.shard_id], "rank")
    seen = Attached(place.path).view(place.offset, place.num_bytes)
    assert seen[: 4 * 7].tobytes() == sample.token_ids.tobytes()
    assert len(seen) == BYTES_PER_TOKEN * 7 == sample.handle.num_bytes


def test_what_is_cleared_is_gone_when_nobody_holds_it(store: OwnerStore, arena: Arena) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(given(4, 9), allocator.lay)
    allocator.clear([*samples, *given(3)])
    assert (store.stats().num_tensors, store.stats().retained_bytes) == (0, BYTES_PER_TOKEN * 13)
    assert_alike(samples, given(4, 9))
    samples.clear()
    assert store.stats().retained_bytes == 0
    assert arena.held_bytes == 0


def test_what_does_not_fit_leaves_what_is_there(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(given(4), allocator.lay)
    with pytest.raises(StoreFull):
        copy_samples(given(2, MAX_BYTES // BYTES_PER_TOKEN), allocator.lay)
    assert store.stats().num_tensors == 1
    assert_alike(samples, given(4))


def test_samples_that_leave_the_room_are_plain(store: OwnerStore) -> None:
    allocator = StoreAllocator(store)
    samples = copy_samples(given(4, 9), allocator.lay)
    aside = copy_samples(samples, lay_plainly)
    allocator.clear(samples)
    del samples
    assert (store.stats().num_tensors, store.stats().retained_bytes) == (0, 0)
    assert_alike(aside, given(4, 9))
    assert [sample.handle for sample in aside] == [None, None]


def test_a_plain_room_holds_everything() -> None:
    allocator = LocalAllocator()
    samples = copy_samples(given(4, 9), allocator.lay)
    assert_alike(samples, given(4, 9))
    assert all(map(allocator.holds, samples))
    allocator.clear(samples)
    assert_alike(samples, given(4, 9))
