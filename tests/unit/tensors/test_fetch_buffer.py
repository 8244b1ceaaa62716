"""Each shard is fetched once, kept within the budget, and never returns after its clear. The cache
counts entries as the memory that they hold.
"""

import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest

from rollmesh.core.errors import FetchMismatch, OwnerGone
from rollmesh.tensors.fetch_buffer import (
    CHUNK,
    BufferStats,
    CacheEntry,
    FetchBuffer,
    FetchFn,
    LruCache,
)
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor
from tests.unit.tensors.buffer_schedule import check_schedules
from tests.unit.tensors.fetches import (
    BUDGET,
    ERRORS,
    OWNER,
    SHARD_BYTES,
    WAIT_S,
    HeldFetch,
    Pair,
    ThreadCall,
    World,
    assert_are,
    content,
    control_c_enabled,
    handle,
    handles,
    ids,
    in_one_block,
)

WHOLE_BUDGET = handle(99, num_bytes=BUDGET)


@pytest.fixture
def world() -> World:
    return World()


def test_a_shard_that_occurs_often_is_fetched_once(world: World) -> None:
    contents = world.ask(*handles(1, 2, 1, 3, 2, 1))
    assert contents[0] is contents[2] is contents[5]
    assert world.owners.asked == [[1, 2, 3]]


def test_only_missing_shards_are_fetched(world: World) -> None:
    world.ask(*handles(1, 3))
    world.ask(*handles(4, 3, 2, 1))
    world.ask(*handles(2, 1))
    world.ask()
    assert world.owners.asked == [[1, 3], [4, 2]]
    of_no_step = {UNTAGGED: 4 * SHARD_BYTES}
    assert world.buffer.stats() == BufferStats(4, 4 * SHARD_BYTES, 4, 4, of_no_step)


def test_the_least_recently_used_shards_are_evicted_first(world: World) -> None:
    for number in range(10):
        world.ask(handle(number))
    world.ask(*handles(0, 2))
    world.ask(*handles(10, 11))
    assert world.kept() == (10, BUDGET)
    world.owners.asked.clear()
    world.ask(*handles(0, 2, 4, 5, 6, 7, 8, 9, 10, 11, 1, 3))
    assert world.owners.asked == [[1, 3]]


def test_a_shard_larger_than_the_budget_is_returned_and_evicts_nothing(world: World) -> None:
    world.ask(*handles(1, 2))
    world.ask(handle(3, num_bytes=BUDGET + 1))
    assert world.kept() == (2, 2 * SHARD_BYTES)
    world.ask(WHOLE_BUDGET)
    assert world.kept() == (1, BUDGET)


def test_without_a_budget_only_empty_shards_are_kept() -> None:
    world = World(0)
    world.ask(handle(1), handle(2, num_bytes=0))
    assert world.kept() == (1, 0)


def test_views_survive_eviction_and_are_not_counted(world: World) -> None:
    (first,) = world.ask(handle(1))
    world.ask(WHOLE_BUDGET)
    assert world.kept() == (1, BUDGET)
    assert_are([first], [handle(1)])
    (again,) = world.ask(handle(1))
    assert again is not first
    assert world.kept() == (1, SHARD_BYTES)


def test_a_fetched_block_counts_whole_until_its_last_shard_is_evicted(world: World) -> None:
    world.ask(*handles(1, 2, 3, 4), fetch=in_one_block)
    world.ask(*handles(5, 6, 7, 8), fetch=in_one_block)
    world.ask(handle(2))
    world.ask(*handles(9, 10, 11), fetch=in_one_block)
    assert world.kept() == (4, 7 * SHARD_BYTES)
    world.ask(*handles(2, 9, 10, 11))
    assert world.owners.asked == []


Leave = Callable[[World], object]
LEAVES: dict[str, Leave] = {
    "evict": lambda world: world.ask(WHOLE_BUDGET),
    "clear": lambda world: world.buffer.clear(ids(1, 2)),
    "flush": lambda world: world.buffer.clear(None),
    "end_step": lambda world: world.buffer.end_step(0),
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_removed_shards_are_freed_at_once(world: World, leave: Leave) -> None:
    gc.disable()
    try:
        data = [weakref.ref(each.data) for each in world.ask(*handles(1, 2))]
        assert sum(each() is not None for each in data) == 2
        leave(world)
        assert sum(each() is not None for each in data) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_nothing_is_freed_while_the_lock_is_held(world: World, leave: Leave) -> None:
    seen: list[tuple[int, int]] = []
    for each in world.ask(*handles(1, 2)):
        weakref.finalize(each.data, lambda: seen.append(world.kept()))
    del each
    ThreadCall(partial(leave, world)).result()
    assert len(seen) == 2


MANY = 4 * CHUNK + 1
LEAVE_MANY: dict[str, tuple[Callable[[World], int], int]] = {
    "evict": (lambda world: len(world.ask(handle(MANY, num_bytes=MANY * SHARD_BYTES))), 1),
    "clear": (lambda world: world.buffer.clear(ids(*range(2 * MANY))), MANY),
    "end_step": (lambda world: world.buffer.end_step(0), MANY),
}


@pytest.mark.parametrize("way", LEAVE_MANY)
def test_many_shards_are_kept_together_and_freed_a_few_at_a_time(way: str) -> None:
    (leave, number), world = LEAVE_MANY[way], World(MANY * SHARD_BYTES)
    world.ask(*handles(*range(MANY)))
    left: set[int] = {MANY}
    for each in world.ask(*handles(*range(MANY))):
        # Each freed array records how many are still kept, which takes the lock.
        weakref.finalize(each.data, lambda: left.add(world.kept()[0]))
    del each
    assert len(world.owners.asked) == 1
    assert ThreadCall(partial(leave, world)).result() == number
    assert min(left) <= 1
    assert max(more - fewer for fewer, more in pairwise(sorted(left))) <= 64


def test_the_end_of_a_step_drops_its_shards_and_the_untagged(world: World) -> None:
    for number, step in enumerate([0, 3, 4, 5, -1]):
        world.ask(handle(number, step))
    assert world.buffer.end_step(4) == 4
    assert world.kept() == (1, SHARD_BYTES)
    world.ask(handle(3, 5))
    assert len(world.owners.asked) == 5


def test_a_repeated_end_of_a_step_drops_nothing(world: World) -> None:
    world.buffer.end_step(4)
    world.ask(handle(1))
    assert (world.buffer.end_step(4), world.buffer.end_step(3)) == (0, 0)
    assert world.kept() == (1, SHARD_BYTES)
    assert world.buffer.end_step(5) == 1


def test_a_late_request_for_an_ended_step_keeps_nothing(world: World) -> None:
    world.buffer.end_step(4)
    world.ask(handle(1, 4), handle(2, 0))
    assert world.kept() == (0, 0)


def test_clearing_none_flushes_and_clearing_nothing_removes_nothing(world: World) -> None:
    world.ask(*handles(1, 2, 3, 4))
    assert world.buffer.clear([]) == 0
    assert world.buffer.clear(ids(2, 9, 2)) == 1
    assert world.kept() == (3, 3 * SHARD_BYTES)
    assert world.buffer.clear(None) == 3
    assert world.kept() == (0, 0)


# Changes during a fetch.

MEANWHILE: dict[str, tuple[RTensor, Callable[[FetchBuffer], int], int]] = {
    "clear": (handle(1), lambda buffer: buffer.clear(ids(1)), 0),
    "flush": (handle(1), lambda buffer: buffer.clear(None), 0),
    "clear_another": (handle(1), lambda buffer: buffer.clear(ids(2)), 1),
    "clear_nothing": (handle(1), lambda buffer: buffer.clear([]), 1),
    "end_of_step_untagged": (handle(1), lambda buffer: buffer.end_step(4), 0),
    "end_of_its_step": (handle(1, 4), lambda buffer: buffer.end_step(4), 0),
    "end_of_earlier_step": (handle(1, 5), lambda buffer: buffer.end_step(4), 1),
}


@pytest.mark.parametrize("case", MEANWHILE)
def test_a_shard_that_is_cleared_during_its_fetch_is_returned_and_not_kept(
    world: World, case: str
) -> None:
    shard, leave, num_kept = MEANWHILE[case]

    def fetch(wanted: list[RTensor]) -> list[Content]:
        assert leave(world.buffer) == 0
        return world.owners(wanted)

    world.ask(shard, fetch=fetch)
    assert world.buffer.stats().num_tensors == num_kept


def test_a_fetch_after_the_clear_asks_the_owner(world: World) -> None:
    def fetch(wanted: list[RTensor]) -> list[Content]:
        world.buffer.clear(ids(1))
        world.ask(handle(1))
        return world.owners(wanted)

    world.ask(handle(1), fetch=fetch)
    assert world.owners.asked == [[1], [1]]
    assert world.kept() == (1, SHARD_BYTES)  # the shard of the later request


WRONG: dict[str, FetchFn] = {
    "fewer": lambda wanted: [content(each) for each in wanted[1:]],
    "more": lambda wanted: [content(each) for each in [*wanted, wanted[0]]],
    "none": lambda wanted: [],
    "shorter": lambda wanted: [content(handle(each.shard_id, num_bytes=99)) for each in wanted],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mismatch_keeps_nothing(world: World, wrong: str) -> None:
    world.ask(handle(1))
    with pytest.raises(FetchMismatch, match=OWNER):
        world.buffer.get_many(handles(1, 2, 3), WRONG[wrong])
    assert world.kept() == (1, SHARD_BYTES)
    world.ask(*handles(1, 2, 3))


def test_an_error_keeps_no_content_alive(world: World) -> None:
    def fail(wanted: list[RTensor]) -> list[Content]:
        raise OwnerGone(OWNER, "it hung up")

    gc.disable()
    try:
        data = weakref.ref(world.ask(handle(1))[0].data)
        with pytest.raises(OwnerGone) as caught:
            world.buffer.get_many(handles(1, 2), fail)
        world.buffer.clear(None)
        del caught
        assert data() is None
    finally:
        gc.enable()


def test_threads_with_the_same_request_share_one_fetch(world: World) -> None:
    start = threading.Barrier(8)

    def ask(shift: int) -> None:
        start.wait(WAIT_S)
        world.ask(*handles(*[(number + shift) % 8 for number in range(8)]))

    for thread in [ThreadCall(partial(ask, shift)) for shift in range(8)]:
        thread.result()
    assert sorted(chain.from_iterable(world.owners.asked)) == list(range(8))
    assert world.kept() == (8, 8 * SHARD_BYTES)


def test_a_thread_waits_for_a_shard_that_another_fetches(world: World) -> None:
    pair = Pair(world)
    pair.fetches[1].release()
    pair.fetches[0].release()
    assert pair.first.result()[0] is pair.second.result()[0]
    assert world.owners.asked == [[1], [2]]


def test_a_waiter_gets_a_shard_that_was_cleared_meanwhile(world: World) -> None:
    pair = Pair(world)
    world.buffer.clear(None)
    for fetch in pair.fetches:
        fetch.release()
    assert pair.first.result()[0] is pair.second.result()[0]
    assert world.owners.asked == [[1], [2]]
    assert world.kept() == (0, 0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_reaches_all_waiters_and_nothing_is_kept(world: World, error: Exception) -> None:
    pair = Pair(world)
    pair.fetches[0].fail(error)
    with pytest.raises(type(error)) as first:
        pair.first.result()
    assert first.value is error
    assert world.kept() == (0, 0)
    pair.fetches[1].release()
    with pytest.raises(type(error)) as second:
        pair.second.result()
    assert second.value is not error
    assert (str(second.value), vars(second.value)) == (str(error), vars(error))
    assert world.kept() == (1, SHARD_BYTES)  # shard 2, which was fetched
    world.ask(handle(1))


def test_each_waiter_gets_its_own_error(world: World) -> None:
    pair = Pair(world)
    third_fetch = HeldFetch(world.owners)
    third = ThreadCall(partial(world.ask, *handles(1, 3), fetch=third_fetch))
    third_fetch.wait_begun()
    pair.fetches[0].fail(OwnerGone(OWNER, "it hung up"))
    pair.fetches[1].release()
    third_fetch.release()
    caught: set[int] = set()
    for thread in (pair.first, pair.second, third):
        with pytest.raises(OwnerGone) as error:
            thread.result()
        caught.add(id(error.value))
    assert len(caught) == 3


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_a_waiter_on_an_interrupted_thread_fetches_itself(
    world: World, interruption: type[BaseException]
) -> None:
    pair = Pair(world)
    pair.fetches[0].fail(interruption())
    with pytest.raises(interruption):
        pair.first.result()
    pair.fetches[1].release()
    pair.fetches[1].wait_begun()
    pair.fetches[1].release()
    pair.second.result()
    assert world.owners.asked == [[1], [2], [1]]


def test_control_c_in_a_fetch_wakes_waiters(world: World) -> None:
    held = HeldFetch(world.owners)
    waiting: list[ThreadCall[list[Content]]] = []

    def interrupted(wanted: list[RTensor]) -> list[Content]:
        waiting.append(ThreadCall(partial(world.ask, *handles(1, 2), fetch=held)))
        held.wait_begun()
        signal.raise_signal(signal.SIGINT)
        return world.owners(wanted)

    with control_c_enabled(), pytest.raises(KeyboardInterrupt):
        world.buffer.get_many(handles(1), interrupted)
    held.release()
    held.wait_begun()
    held.release()
    waiting[0].result()


def test_two_waiters_on_an_interrupted_thread_fetch_once(world: World) -> None:
    pair = Pair(world)
    third_fetch = HeldFetch(world.owners)
    third = ThreadCall(partial(world.ask, *handles(1, 3), fetch=third_fetch))
    third_fetch.wait_begun()
    pair.fetches[0].fail(KeyboardInterrupt())
    # The first of them fetches again, and that fetch may end at once.
    for fetch in (pair.fetches[1], third_fetch):
        fetch.release()
        fetch.release()
    for thread in (pair.second, third):
        thread.result()
    assert sorted(world.owners.asked) == [[1], [1], [2], [3]]


def test_counts_are_consistent_after_many_threads(world: World) -> None:
    start = threading.Barrier(6)

    def hammer(seed: int) -> None:
        chance = np.random.default_rng(seed)
        start.wait(WAIT_S)
        for step in range(150):
            numbers = chance.integers(0, 16, size=6).tolist()
            world.ask(*handles(*numbers, step=step))
            if step % 5 == seed % 5:
                world.buffer.clear(ids(*numbers[:2]))
            if step % 7 == seed % 7:
                world.buffer.end_step(step - 3)

    for thread in [ThreadCall(partial(hammer, seed)) for seed in range(6)]:
        thread.result()
    num_tensors, total_bytes = world.kept()
    assert total_bytes == num_tensors * SHARD_BYTES <= BUDGET
    world.buffer.clear(None)
    assert world.kept() == (0, 0)


def test_every_schedule_of_threads_matches_a_naive_buffer() -> None:
    check_schedules(num_schedules=60, num_steps=25)


@pytest.fixture
def cache() -> LruCache:
    return LruCache(10**9)


def put(cache: LruCache, *numbers: int, step: int = UNTAGGED) -> None:
    """Put arrays with their own memory."""
    for shard in handles(*numbers, step=step):
        cache.put(shard, content(shard))


def put_block(cache: LruCache, *numbers: int) -> None:
    """Put arrays in one block of memory."""
    shards = handles(*numbers)
    for shard, each in zip(shards, in_one_block(shards), strict=True):
        cache.put(shard, each)


def test_an_entry_is_kept_until_it_is_removed(cache: LruCache) -> None:
    shard = handle(1, step=3)
    given = content(shard)
    cache.put(shard, given)
    assert cache.use(shard.shard_id) is given
    assert (len(cache), cache.total_bytes) == (1, SHARD_BYTES)
    kept = cache.remove(shard.shard_id)
    assert kept is not None
    assert (kept.content, kept.of_step.step) == (given, 3)
    assert (len(cache), cache.total_bytes) == (0, 0)
    assert cache.remove(shard.shard_id) is None
    assert cache.use(shard.shard_id) is None


def test_the_least_recently_used_entry_is_removed_first(cache: LruCache) -> None:
    put(cache, 1, 2, 3)
    cache.use(*ids(1))
    left = []
    while len(cache):
        left.append(cache.remove_coldest().content.data.tobytes())
    assert left == [content(each).data.tobytes() for each in handles(2, 3, 1)]


def test_the_shards_of_a_step_and_those_before_are_found(cache: LruCache) -> None:
    put(cache, 1, 2, step=3)
    put(cache, 3, step=5)
    put(cache, 4)
    found = []
    while kept := cache.remove_ended(4):
        found.append(kept.content.data.tobytes())
    assert sorted(found) == sorted(content(each).data.tobytes() for each in handles(1, 2, 4))
    assert (len(cache), cache.total_bytes) == (1, SHARD_BYTES)


def test_each_step_has_the_bytes_of_its_shards(cache: LruCache) -> None:
    put(cache, 1, 2, step=3)
    put(cache, 3, step=5)
    put_block(cache, 4, 5)
    cache.remove(*ids(1))
    cache.remove(*ids(4))
    one = SHARD_BYTES
    assert cache.bytes_by_step == {3: one, 5: one, UNTAGGED: one}
    assert cache.total_bytes == 4 * SHARD_BYTES
    cache.remove_ended(4)
    cache.remove_ended(4)
    assert cache.bytes_by_step == {5: one}


def test_an_entry_larger_than_the_budget_is_not_kept() -> None:
    cache = LruCache(2 * SHARD_BYTES)
    cache.put(handle(1, num_bytes=2 * SHARD_BYTES + 1), content(handle(1)))
    put_block(cache, 2, 3, 4)
    assert (len(cache), cache.total_bytes, cache.bytes_by_step) == (0, 0, {})
    put_block(cache, 5, 6)
    assert (len(cache), cache.is_over) == (2, False)
    put(cache, 7)
    assert (len(cache), cache.is_over) == (3, True)


def test_a_cached_block_counts_whole_until_its_last_shard_is_removed(cache: LruCache) -> None:
    put_block(cache, 1, 2, 3)
    used = cache.use(*ids(1))
    assert used is not None
    memory = weakref.ref(used.data.base)
    del used
    gc.disable()
    try:
        for number in (1, 3):
            cache.remove(*ids(number))
            assert (cache.total_bytes, memory() is None) == (3 * SHARD_BYTES, False)
        cache.remove(*ids(2))
        assert (cache.total_bytes, memory() is None) == (0, True)
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_on_the_cache_count_like_a_list(cache: LruCache, seed: int) -> None:
    chance = random.Random(seed)
    entries: list[RTensor] = []
    block_of: dict[int, tuple[int, int]] = {}
    for number in range(400):
        match chance.choice(["put", "put", "use", "remove", "coldest", "ended"]):
            case "put":
                shards = [handle(9 * number + each, each % 3, each) for each in range(1, 5)]
                shards = shards[: chance.randrange(1, 5)]
                for shard, each in zip(shards, in_one_block(shards), strict=True):
                    cache.put(shard, each)
                    block_of[shard.shard_id] = number, sum(each.num_bytes for each in shards)
                entries += shards
            case "use" if entries:
                entries.append(entries.pop(chance.randrange(len(entries))))
                assert cache.use(entries[-1].shard_id) is not None
            case "remove" if entries:
                shard = entries.pop(chance.randrange(len(entries)))
                assert isinstance(cache.remove(shard.shard_id), CacheEntry)
            case "coldest" if entries:
                assert cache.remove_coldest().of_step.step == entries.pop(0).step
            case "ended" if any(each.step == 0 for each in entries):
                kept = cache.remove_ended(0)
                assert kept is not None
                assert kept.of_step.step == 0
                entries.remove(next(each for each in entries if cache.use(each.shard_id) is None))
                entries = [each for each in entries if cache.use(each.shard_id) is not None]
        blocks = dict(block_of[each.shard_id] for each in entries)
        assert (len(cache), cache.total_bytes) == (len(entries), sum(blocks.values()))
    while entries:
        assert cache.remove(entries.pop().shard_id) is not None
    assert cache.total_bytes == 0
