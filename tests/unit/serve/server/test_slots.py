"""Slots: a bounded number of rollouts at once, in order, and nothing lost to a cancelled waiter."""

import asyncio

import pytest

from rollmesh.serve.server.groups import Slots


async def hold(slots: Slots, gate: asyncio.Event, order: list[int], number: int) -> None:
    async with slots:
        order.append(number)
        await gate.wait()


async def test_no_more_than_the_slots_run_at_once_and_in_order() -> None:
    slots, gate, order = Slots(2), asyncio.Event(), list[int]()
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(hold(slots, gate, order, number))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == [0, 1]
        assert slots.num_open == 5
        gate.set()
    assert order == [0, 1, 2, 3, 4]
    assert (slots.num_open, slots.num_finished) == (0, 5)


async def test_cancelled_waiter_takes_no_slot_and_is_not_counted() -> None:
    slots, gate, order = Slots(1), asyncio.Event(), list[int]()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hold(slots, gate, order, number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        gate.set()
    assert order == [0, 2]
    assert (slots.num_open, slots.num_finished) == (0, 2)


async def test_failed_rollout_gives_its_slot_back() -> None:
    slots = Slots(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            async with slots:
                raise ValueError("bad")
    assert (slots.num_open, slots.num_finished) == (0, 0)
