"""Long pieces of work that come together are done one in each turn of the loop, in their order."""

import asyncio

import pytest

from rollmesh.serve.interception.turnstile import LONG_BYTES, Turnstile


async def test_between_two_long_pieces_the_loop_serves_everything_else() -> None:
    turnstile, done = Turnstile(), list[str]()

    async def long(name: str) -> None:
        await turnstile.pass_through(LONG_BYTES)
        done.append(name)

    async def other() -> None:
        while len(tasks) and not all(task.done() for task in tasks):
            done.append("-")
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(long(name)) for name in "abcd"]
    await asyncio.gather(other(), *tasks)
    assert [each for each in done if each != "-"] == list("abcd")
    told = "".join(done)
    assert all(f"{one}{two}" not in told for one in "abcd" for two in "abcd"), told
    assert len(turnstile) == 0


async def test_alone_nobody_waits() -> None:
    turnstile = Turnstile()
    for _ in range(2):
        passing = turnstile.pass_through(LONG_BYTES)
        with pytest.raises(StopIteration):  # it is over and has not waited
            passing.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(turnstile) == 0


async def test_a_short_piece_of_work_passes_by_those_in_the_line() -> None:
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.pass_through(LONG_BYTES)) for _ in range(3)]
    await asyncio.sleep(0)
    passing = turnstile.pass_through(LONG_BYTES - 1)
    with pytest.raises(StopIteration):
        passing.send(None)
    assert len(turnstile) == 2
    await asyncio.gather(*tasks)


async def test_who_is_cancelled_in_the_line_holds_up_nobody() -> None:
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.pass_through(LONG_BYTES)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(turnstile) == 2
    tasks[1].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert len(turnstile) == 0


async def test_who_is_cancelled_once_let_through_holds_up_nobody() -> None:
    turnstile = Turnstile()
    _, first, second = (asyncio.create_task(turnstile.pass_through(LONG_BYTES)) for _ in range(3))
    await asyncio.sleep(0)
    while len(turnstile) != 1:  # noqa: ASYNC110 - the line tells nobody
        await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(60):
        await second
    assert (first.cancelled(), len(turnstile)) == (True, 0)


async def test_sessions_take_turns_whatever_one_of_them_has_in_the_line() -> None:
    turnstile, done = Turnstile(), list[str]()

    async def long(owner: str) -> None:
        await turnstile.pass_through(LONG_BYTES, owner)
        done.append(owner)

    await asyncio.gather(*[long(owner) for owner in "aaaaaabbc"])
    assert "".join(done) == "aabcabaaa"
    assert len(turnstile) == 0
