"""Entries count as the memory that they hold, and the least recently used one is known."""

import gc
import random
import weakref

import pytest

from rollmesh.tensors.fetch_buffer import CacheEntry, LruCache
from rollmesh.tensors.handles import UNTAGGED, RTensor
from tests.unit.tensors.fetches import SHARD_BYTES, content, handle, handles, ids, in_one_block


@pytest.fixture
def shelf() -> LruCache:
    return LruCache(10**9)


def put(shelf: LruCache, *numbers: int, step: int = UNTAGGED) -> None:
    """Arrays with their own memory."""
    for shard in handles(*numbers, step=step):
        shelf.put(shard, content(shard))


def put_block(shelf: LruCache, *numbers: int) -> None:
    """Arrays in the same memory."""
    shards = handles(*numbers)
    for shard, each in zip(shards, in_one_block(shards), strict=True):
        shelf.put(shard, each)


def test_what_was_put_is_here_until_it_is_taken_down(shelf: LruCache) -> None:
    shard = handle(1, step=3)
    given = content(shard)
    shelf.put(shard, given)
    assert shelf.use(shard.shard_id) is given
    assert (len(shelf), shelf.total_bytes) == (1, SHARD_BYTES)
    kept = shelf.remove(shard.shard_id)
    assert kept is not None
    assert (kept.content, kept.of_step.step) == (given, 3)
    assert (len(shelf), shelf.total_bytes) == (0, 0)
    assert shelf.remove(shard.shard_id) is None
    assert shelf.use(shard.shard_id) is None


def test_the_longest_unused_goes_first(shelf: LruCache) -> None:
    put(shelf, 1, 2, 3)
    shelf.use(*ids(1))
    left = []
    while len(shelf):
        left.append(shelf.remove_coldest().content.data.tobytes())
    assert left == [content(each).data.tobytes() for each in handles(2, 3, 1)]


def test_the_shards_of_a_step_and_those_before_are_found(shelf: LruCache) -> None:
    put(shelf, 1, 2, step=3)
    put(shelf, 3, step=5)
    put(shelf, 4)
    found = []
    while kept := shelf.remove_ended(4):
        found.append(kept.content.data.tobytes())
    assert sorted(found) == sorted(content(each).data.tobytes() for each in handles(1, 2, 4))
    assert (len(shelf), shelf.total_bytes) == (1, SHARD_BYTES)


def test_each_step_has_the_bytes_of_its_shards(shelf: LruCache) -> None:
    put(shelf, 1, 2, step=3)
    put(shelf, 3, step=5)
    put_block(shelf, 4, 5)
    shelf.remove(*ids(1))
    shelf.remove(*ids(4))
    one = SHARD_BYTES
    assert shelf.bytes_by_step == {3: one, 5: one, UNTAGGED: one}
    assert shelf.total_bytes == 4 * SHARD_BYTES
    shelf.remove_ended(4)
    shelf.remove_ended(4)
    assert shelf.bytes_by_step == {5: one}


def test_what_alone_is_more_than_may_be_kept_is_not() -> None:
    shelf = LruCache(2 * SHARD_BYTES)
    shelf.put(handle(1, num_bytes=2 * SHARD_BYTES + 1), content(handle(1)))
    put_block(shelf, 2, 3, 4)
    assert (len(shelf), shelf.total_bytes, shelf.bytes_by_step) == (0, 0, {})
    put_block(shelf, 5, 6)
    assert (len(shelf), shelf.is_over) == (2, False)
    put(shelf, 7)
    assert (len(shelf), shelf.is_over) == (3, True)


def test_a_block_counts_whole_until_its_last_shard_goes(shelf: LruCache) -> None:
    put_block(shelf, 1, 2, 3)
    used = shelf.use(*ids(1))
    assert used is not None
    memory = weakref.ref(used.data.base)
    del used
    gc.disable()
    try:
        for number in (1, 3):
            shelf.remove(*ids(number))
            assert (shelf.total_bytes, memory() is None) == (3 * SHARD_BYTES, False)
        shelf.remove(*ids(2))
        assert (shelf.total_bytes, memory() is None) == (0, True)
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_it_counts_as_a_list_does(shelf: LruCache, seed: int) -> None:
    chance = random.Random(seed)
    here: list[RTensor] = []
    block_of: dict[int, tuple[int, int]] = {}
    for number in range(400):
        match chance.choice(["put", "put", "use", "remove", "coldest", "ended"]):
            case "put":
                shards = [handle(9 * number + each, each % 3, each) for each in range(1, 5)]
                shards = shards[: chance.randrange(1, 5)]
                for shard, each in zip(shards, in_one_block(shards), strict=True):
                    shelf.put(shard, each)
                    block_of[shard.shard_id] = number, sum(each.num_bytes for each in shards)
                here += shards
            case "use" if here:
                here.append(here.pop(chance.randrange(len(here))))
                assert shelf.use(here[-1].shard_id) is not None
            case "remove" if here:
                shard = here.pop(chance.randrange(len(here)))
                assert isinstance(shelf.remove(shard.shard_id), CacheEntry)
            case "coldest" if here:
                assert shelf.remove_coldest().of_step.step == here.pop(0).step
            case "ended" if any(each.step == 0 for each in here):
                kept = shelf.remove_ended(0)
                assert kept is not None
                assert kept.of_step.step == 0
                here.remove(next(each for each in here if shelf.use(each.shard_id) is None))
                here = [each for each in here if shelf.use(each.shard_id) is not None]
        blocks = dict(block_of[each.shard_id] for each in here)
        assert (len(shelf), shelf.total_bytes) == (len(here), sum(blocks.values()))
    while here:
        assert shelf.remove(here.pop().shard_id) is not None
    assert shelf.total_bytes == 0
