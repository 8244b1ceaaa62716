"""What is kept is counted as the memory that it holds, and the longest unused is known."""

import gc
import random
import weakref

import pytest

from rollmesh.tensors.handles import RTensor
from rollmesh.tensors.shelf import Shelf
from tests.unit.tensors.fetches import SHARD_BYTES, content, handle, handles, ids, in_one_block


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def put(shelf: Shelf, *numbers: int) -> None:
    """Each in memory of its own."""
    for shard in handles(*numbers):
        shelf.put(shard, content(shard))


def put_block(shelf: Shelf, *numbers: int) -> None:
    """All in the same memory."""
    shards = handles(*numbers)
    for shard, each in zip(shards, in_one_block(shards), strict=True):
        shelf.put(shard, each)


def use(shelf: Shelf, number: int) -> None:
    kept = shelf.get(handle(number).shard_id)
    assert kept is not None
    shelf.use(kept)


def test_what_was_put_is_here_until_it_is_taken_down(shelf: Shelf) -> None:
    shard = handle(1, step=3)
    given = content(shard)
    shelf.put(shard, given)
    kept = shelf.get(shard.shard_id)
    assert kept is not None
    assert (kept.step, shelf.use(kept)) == (3, given)
    assert (len(shelf), [*shelf], shelf.total_bytes) == (1, ids(1), SHARD_BYTES)
    assert shelf.take_down(shard.shard_id) is kept
    assert (len(shelf), [*shelf], shelf.total_bytes) == (0, [], 0)
    assert shelf.get(shard.shard_id) is None
    assert shelf.coldest(9) == []


def test_the_longest_unused_is_coldest(shelf: Shelf) -> None:
    put(shelf, 1, 2, 3)
    use(shelf, 1)
    assert shelf.coldest(9) == ids(2)
    shelf.take_down(*ids(2))
    assert shelf.coldest(9) == ids(3)


def test_a_block_is_used_as_one(shelf: Shelf) -> None:
    put_block(shelf, 1, 2, 3)
    put_block(shelf, 4, 5)
    use(shelf, 2)
    assert shelf.coldest(9) == ids(4, 5)
    use(shelf, 5)
    assert shelf.coldest(2) == ids(1, 2)


def test_a_block_counts_whole_until_its_last_shard_goes(shelf: Shelf) -> None:
    put_block(shelf, 1, 2, 3)
    kept = shelf.get(*ids(1))
    assert kept is not None
    memory = weakref.ref(kept.content.data.base)
    del kept
    gc.disable()
    try:
        for number in (1, 3):
            shelf.take_down(*ids(number))
            assert (shelf.total_bytes, memory() is None) == (3 * SHARD_BYTES, False)
        shelf.take_down(*ids(2))
        assert (shelf.total_bytes, memory() is None) == (0, True)
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_it_counts_as_a_list_does(shelf: Shelf, seed: int) -> None:
    chance = random.Random(seed)
    blocks: list[list[RTensor]] = []
    sizes: dict[int, int] = {}
    for number in range(400):
        match chance.choice(["put", "use", "take_down"]):
            case "put":
                shards = [handle(9 * number + each, num_bytes=each) for each in range(1, 5)]
                shards = shards[: chance.randrange(1, 5)]
                for shard, each in zip(shards, in_one_block(shards), strict=True):
                    shelf.put(shard, each)
                blocks.append(shards)
                sizes[shards[0].shard_id] = sum(each.num_bytes for each in shards)
            case "use" if blocks:
                block = blocks.pop(chance.randrange(len(blocks)))
                use(shelf, chance.choice(block).shard_id & 0xFFFF)
                blocks.append(block)
            case "take_down" if blocks:
                block = chance.choice(blocks)
                shelf.take_down(block.pop(1 if len(block) > 1 else 0).shard_id)
                blocks = [each for each in blocks if each]
        firsts = [block[0].shard_id for block in blocks]
        assert shelf.total_bytes == sum(sizes[each] for each in firsts)
        assert {*shelf} == {each.shard_id for block in blocks for each in block}
        assert {*shelf.coldest(9)} == {each.shard_id for each in (blocks or [[]])[0]}
