"""Bodies in flight are limited by their bytes: who waits is not read, and nobody waits for ever."""

import asyncio
import gzip
import random

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.bodies import STEP_BYTES, Bodies, Reservation
from rollmesh.serve.interception.request import JSON, Request
from tests.unit.serve.interception.http_client import Client, Place, serving, sized

MIB = 2**20
LIMIT = 4 * MIB
MAX_BODY = 3 * MIB
SILENCE_S = 1.0
"""Longer than a busy machine keeps us from our CPU between two drops."""
DRIP_S = 0.02
MAX_AHEAD_BYTES = 400_000
"""What two reads bring before a connection is paused."""


class Counter:
    """Answers with the length of the body, once `go` is set."""

    def __init__(self, bodies: Bodies, silence_s: float = 10.0) -> None:
        self.go = asyncio.Event()
        self.requests: list[Request] = []
        self.num_read = 0
        self.peak_bytes = 0
        self._bodies = bodies
        self._silence_s = silence_s

    async def __call__(self, request: Request) -> None:
        self.requests.append(request)
        try:
            body = await request.read(MAX_BODY, self._silence_s)
        except SessionError as error:
            request.answer(error.status, request.dated(JSON), error.code.encode())
            return
        self.num_read += 1
        self.peak_bytes = max(self.peak_bytes, self._bodies.held_bytes)
        await self.go.wait()
        request.answer(200, request.dated(JSON), b"%d" % len(body))


class Ground:
    """A server whose bodies share LIMIT."""

    def __init__(self, place: Place, bodies: Bodies, handler: Counter) -> None:
        self.place, self.bodies, self.handler = place, bodies, handler

    async def until(self, **wanted: int) -> None:
        """The counts are these."""
        counts = {"num_read": self.handler, "num_waiting": self.bodies, "num_held": self.bodies}
        while any(  # noqa: ASYNC110 - counts have no event
            getattr(counts[name], name) != number for name, number in wanted.items()
        ):
            await asyncio.sleep(0)

    async def sender(self, data: bytes) -> Client:
        client = await self.place.client()
        client.send(data)
        return client


def on_ground(runner: asyncio.Runner, main: object, silence_s: float = 10.0) -> None:
    async def run() -> None:
        bodies = Bodies(LIMIT)
        handler = Counter(bodies, silence_s)
        async with serving(handler, bodies=bodies) as place:
            await main(Ground(place, bodies, handler))  # type: ignore[operator]
        assert (bodies.held_bytes, bodies.num_held, bodies.num_waiting) == (0, 0, 0)
        assert not bodies.readers

    runner.run(run())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_that_does_not_fit_is_not_read_until_another_is_answered(
    runner: asyncio.Runner,
) -> None:
    async def main(ground: Ground) -> None:
        large = b"x" * (3 * MIB - 1000)
        first = await ground.sender(sized(large))
        await ground.until(num_read=1)
        second = await ground.sender(sized(large))
        # The oldest that reads may pass the limit; the next may not.
        await ground.until(num_read=2)
        third = await ground.sender(sized(large))
        await ground.until(num_waiting=1)
        for _ in range(200):  # what the kernel holds of it would be read by now
            await asyncio.sleep(0)
        num_read = ground.handler.requests[-1].num_bytes
        assert num_read < MAX_AHEAD_BYTES, "its body was read though it had no place"
        assert ground.handler.peak_bytes <= LIMIT + MAX_BODY
        ground.handler.go.set()
        for client in (first, second, third):
            assert await client.answer() == (200, b"%d" % len(large))

    on_ground(runner, main)


def test_bodies_in_chunks_that_hold_half_the_limit_each_do_not_block_each_other(
    runner: asyncio.Runner,
) -> None:
    async def main(ground: Ground) -> None:
        ground.handler.go.set()
        senders = [await ground.sender(CHUNKED) for _ in range(4)]
        for client in senders:
            client.send(chunk(b"x" * MIB))
        half_way = LIMIT - 4 * STEP_BYTES
        while ground.bodies.held_bytes < half_way:  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0)
        for client in senders:
            client.send(chunk(b"x" * MIB) + b"0\r\n\r\n")
        for client in senders:
            assert await client.answer() == (200, b"%d" % (2 * MIB))

    on_ground(runner, main)


def test_compressed_bodies_have_a_place_for_what_they_become(runner: asyncio.Runner) -> None:
    async def main(ground: Ground) -> None:
        small = gzip.compress(b"x" * (3 * MIB - 1000))
        senders = [await ground.sender(sized(small, b"Content-Encoding: gzip")) for _ in range(6)]
        await ground.until(num_read=2, num_waiting=4)
        assert ground.handler.peak_bytes <= LIMIT + MAX_BODY
        ground.handler.go.set()
        for client in senders:
            assert await client.answer() == (200, b"%d" % (3 * MIB - 1000))

    on_ground(runner, main)


def test_who_hangs_up_while_it_waits_holds_up_nobody(runner: asyncio.Runner) -> None:
    async def main(ground: Ground) -> None:
        large = b"x" * (3 * MIB - 1000)
        senders = [await ground.sender(sized(large)) for _ in range(2)]
        await ground.until(num_read=2)
        gone = await ground.sender(sized(large))
        await ground.until(num_waiting=1)
        small = await ground.sender(sized(b"y" * 300_000))
        await ground.until(num_waiting=2)
        gone.reset()  # which is noticed when it is read again: in its turn
        ground.handler.go.set()
        for client in senders:
            assert (await client.answer())[0] == 200
        assert await small.answer() == (200, b"300000")

    on_ground(runner, main)


def test_a_silent_sender_gives_its_place_back(runner: asyncio.Runner) -> None:
    async def main(ground: Ground) -> None:
        ground.handler.go.set()
        head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (3 * MIB)
        silent = [await ground.sender(head + b"x") for _ in range(2)]
        await ground.until(num_held=2)
        late = await ground.sender(sized(b"y" * 2 * MIB))
        await ground.until(num_waiting=2)
        assert await late.answer() == (200, b"%d" % (2 * MIB))
        for client in silent:
            assert await client.answer() == (408, b"body_timeout")

    on_ground(runner, main, SILENCE_S)


def test_who_only_drips_gives_its_place_to_those_who_wait(runner: asyncio.Runner) -> None:
    async def main(ground: Ground) -> None:
        ground.handler.go.set()
        head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (3 * MIB)
        dripping = await ground.sender(head)

        loop, long_since = asyncio.get_running_loop(), asyncio.Event()
        timers: list[asyncio.TimerHandle] = []

        def drip(num_left: int) -> None:
            dripping.send(b"x" * 100)
            if num_left == 0:
                long_since.set()
            timers[:] = [loop.call_later(DRIP_S, drip, num_left - 1)]

        drip(round(3 * SILENCE_S / DRIP_S))
        await long_since.wait()
        assert ground.bodies.num_held == 1, "nobody waits, and it is merely slow"
        late = await ground.sender(sized(b"y" * 2 * MIB))
        await ground.until(num_waiting=1)
        assert await late.answer() == (200, b"%d" % (2 * MIB))
        assert await dripping.answer() == (408, b"body_timeout")
        timers[0].cancel()

    on_ground(runner, main, SILENCE_S)


def test_a_small_body_waits_for_nobody(runner: asyncio.Runner) -> None:
    async def main(ground: Ground) -> None:
        large = b"x" * (3 * MIB - 1000)
        senders = [await ground.sender(sized(large)) for _ in range(2)]
        await ground.until(num_read=2)
        blocked = await ground.sender(sized(large))
        await ground.until(num_waiting=1)
        small = await ground.sender(sized(b"y" * 20_000))
        await ground.until(num_read=3, num_held=4)
        ground.handler.go.set()
        for client in (*senders, blocked, small):
            assert (await client.answer())[0] == 200

    on_ground(runner, main)


# the rule alone


class Sender:
    """A body that comes in steps, is used for a while, and is let go."""

    def __init__(self, bodies: Bodies, rng: random.Random) -> None:
        self.num_bytes = rng.choice([10, 60, 100])
        self.reservation: Reservation | None = None
        self._bodies = bodies
        self._rng = rng
        self._is_chunked = rng.random() < 0.5
        self._gives_up = rng.random() < 0.1

    async def run(self) -> None:
        self.reservation = reservation = self._bodies.begin()
        try:
            if self._is_chunked:
                for size in range(10, self.num_bytes + 1, 10):
                    await reservation.reach(size)
                    await self._pause()
                    if self._gives_up:
                        return
            else:
                await reservation.reach(self.num_bytes)
                await self._pause()
            reservation.settle(self.num_bytes)
            await self._pause()
        finally:
            reservation.let_go()

    async def _pause(self) -> None:
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever_and_the_limit_is_passed_by_one_body_at_most(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        bodies = Bodies(120)
        senders = [Sender(bodies, rng) for _ in range(60)]
        tasks: list[asyncio.Task[None]] = []
        for sender in senders:
            tasks.append(asyncio.create_task(sender.run()))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
            assert bodies.held_bytes <= bodies.max_bytes + 100
        for _ in range(100_000):
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0)
            assert bodies.held_bytes <= bodies.max_bytes + 100
        assert not [task for task in tasks if not task.done()], "somebody waits for ever"
        assert bodies.num_waits > 0
        assert (bodies.held_bytes, bodies.num_held, bodies.num_waiting) == (0, 0, 0)

    asyncio.run(main())


def test_places_are_given_in_the_order_of_arrival() -> None:
    async def main() -> None:
        bodies = Bodies(100)
        whole = bodies.hold(150)
        got: list[int] = []

        async def ask(number: int) -> None:
            reservation = bodies.begin()
            await reservation.reach(60)
            reservation.settle(60)
            got.append(number)
            reservation.let_go()

        tasks = [asyncio.create_task(ask(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert bodies.num_waiting == 5
        whole.let_go()
        await asyncio.gather(*tasks)
        assert got == [0, 1, 2, 3, 4]

    asyncio.run(main())
