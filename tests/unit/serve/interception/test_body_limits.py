"""Bodies are limited by the bytes that have arrived, every wait ends, and long work takes turns."""

import asyncio
import gzip
import random
from collections.abc import Callable, Sequence

import pytest

from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.body_limits import (
    CONTENDED_SILENCE_S,
    LONG_BYTES,
    STEP_BYTES,
    BodyBudget,
    BodyReservation,
    DecodeGate,
    SendDeadline,
)
from rollmesh.serve.interception.request import ANY_INFLATION_BYTES, JSON, HttpRequest
from tests.unit.serve.interception.http_client import Client, RunningServer, serving, sized

MIB = 2**20
LIMIT = 4 * MIB
MAX_BODY = 3 * MIB
MAX_AHEAD_BYTES = 400_000
"""Most bytes that two reads return before a connection is paused."""


class Counter:
    """A handler that answers with the length of the body, once `go` is set."""

    def __init__(self, bodies: BodyBudget, silence_s: float = 10.0) -> None:
        self.go = asyncio.Event()
        self.requests: list[HttpRequest] = []
        self.num_read = 0
        self.peak_bytes = 0
        self._bodies = bodies
        self._silence_s = silence_s

    async def __call__(self, request: HttpRequest) -> None:
        self.requests.append(request)
        request.owner = request.headers.get(b"x-api-key")
        try:
            body = await request.read(MAX_BODY, self._silence_s)
        except SessionError as error:
            request.answer(error.status, request.header_lines(JSON), error.code.encode())
            return
        self.num_read += 1
        self.peak_bytes = max(self.peak_bytes, self._bodies.held_bytes)
        await self.go.wait()
        request.answer(200, request.header_lines(JSON), b"%d" % len(body))


class BodyLimitServer:
    """A server whose bodies share LIMIT."""

    def __init__(self, running: RunningServer, bodies: BodyBudget, handler: Counter) -> None:
        self.running, self.bodies, self.handler = running, bodies, handler

    async def until(self, **wanted: int) -> None:
        """Wait until the counts have these values."""
        counts = {"num_read": self.handler, "num_waiting": self.bodies, "num_held": self.bodies}
        while any(  # noqa: ASYNC110 - counts have no event
            getattr(counts[name], name) != number for name, number in wanted.items()
        ):
            await asyncio.sleep(0)

    async def sender(self, data: bytes) -> Client:
        client = await self.running.client()
        client.send(data)
        return client


def with_server(runner: asyncio.Runner, main: object, silence_s: float = 10.0) -> None:
    async def run() -> None:
        bodies = BodyBudget(LIMIT)
        handler = Counter(bodies, silence_s)
        async with serving(handler, bodies=bodies) as running:
            await main(BodyLimitServer(running, bodies, handler))  # type: ignore[operator]
        assert (bodies.held_bytes, bodies.num_held, bodies.num_waiting) == (0, 0, 0)
        assert not bodies.readers

    runner.run(run())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_that_does_not_fit_is_not_read_until_another_is_answered(
    runner: asyncio.Runner,
) -> None:
    async def main(limited: BodyLimitServer) -> None:
        large = b"x" * (3 * MIB - 1000)
        first = await limited.sender(sized(large))
        await limited.until(num_read=1)
        second = await limited.sender(sized(large))
        # The oldest incomplete body may exceed the limit; the next may not.
        await limited.until(num_read=2)
        third = await limited.sender(sized(large))
        await limited.until(num_waiting=1)
        for _ in range(200):  # The kernel's buffer would have been read by now.
            await asyncio.sleep(0)
        num_read = limited.handler.requests[-1].num_bytes
        assert num_read < MAX_AHEAD_BYTES, "a body without room was read"
        assert limited.handler.peak_bytes <= LIMIT + MAX_BODY
        limited.handler.go.set()
        for client in (first, second, third):
            assert await client.answer() == (200, b"%d" % len(large))

    with_server(runner, main)


def test_bodies_in_chunks_that_hold_half_the_limit_each_do_not_block_each_other(
    runner: asyncio.Runner,
) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        senders = [await limited.sender(CHUNKED) for _ in range(4)]
        for client in senders:
            client.send(chunk(b"x" * MIB))
        half_way = LIMIT - 4 * STEP_BYTES
        while limited.bodies.held_bytes < half_way:  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0)
        for client in senders:
            client.send(chunk(b"x" * MIB) + b"0\r\n\r\n")
        for client in senders:
            assert await client.answer() == (200, b"%d" % (2 * MIB))

    with_server(runner, main)


def test_compressed_bodies_reserve_their_decompressed_size(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        rng = random.Random(1)
        blocks = [rng.randbytes(1000) + b"x" * 29_000 for _ in range(100)]
        small = gzip.compress(b"".join(blocks))
        senders = [await limited.sender(sized(small, b"Content-Encoding: gzip")) for _ in range(6)]
        await limited.until(num_read=2, num_waiting=4)
        assert limited.handler.peak_bytes <= LIMIT + MAX_BODY
        limited.handler.go.set()
        for client in senders:
            assert await client.answer() == (200, b"3000000")

    with_server(runner, main)


def test_a_compression_bomb_is_refused_at_a_hundred_times_its_size(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        bomb = gzip.compress(b"x" * (3 * MIB - 1000))
        client = await limited.sender(sized(bomb, b"Content-Encoding: gzip"))
        assert await client.answer() == (413, b"body_too_large")
        assert limited.handler.num_read == 0
        assert limited.handler.peak_bytes <= ANY_INFLATION_BYTES + STEP_BYTES

    with_server(runner, main)


def test_the_loop_runs_between_two_steps_of_a_decompression(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        loop = asyncio.get_running_loop()
        blocks = gzip.compress(random.Random(1).randbytes(20_000) * 150)
        client = await limited.sender(sized(blocks, b"Content-Encoding: gzip"))
        await limited.until(num_held=1)
        loop.call_soon(turn)
        assert await client.answer() == (200, b"3000000")
        assert turns >= 3_000_000 // STEP_BYTES

    with_server(runner, main)


def test_a_client_that_disconnects_while_it_waits_delays_no_other(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        large = b"x" * (3 * MIB - 1000)
        senders = [await limited.sender(sized(large)) for _ in range(2)]
        await limited.until(num_read=2)
        gone = await limited.sender(sized(large))
        await limited.until(num_waiting=1)
        small = await limited.sender(sized(b"y" * 300_000))
        await limited.until(num_waiting=2)
        gone.reset()  # The server notices it when it reads the body again, in its turn.
        limited.handler.go.set()
        for client in senders:
            assert (await client.answer())[0] == 200
        assert await small.answer() == (200, b"300000")

    with_server(runner, main)


def test_an_announced_body_that_does_not_arrive_takes_no_room(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (3 * MIB)
        silent = [await limited.sender(head + b"x") for _ in range(20)]
        await limited.until(num_held=20)
        late = await limited.sender(sized(b"y" * 2 * MIB))
        assert await late.answer() == (200, b"%d" % (2 * MIB))
        assert limited.bodies.num_waits == 0
        assert limited.bodies.num_held == 20, (
            "a silent sender was cut although nothing waited for room"
        )
        for client in silent:
            client.reset()
        await limited.until(num_held=0)

    with_server(runner, main)


def test_a_silent_sender_is_cut_soon_while_another_waits_for_room(
    runner: asyncio.Runner,
) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        num_sent = 3 * MIB - 1000
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (3 * MIB)
        silent = await limited.sender(head + b"x" * num_sent)
        while limited.bodies.held_bytes < num_sent:  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0)
        late = await limited.sender(sized(b"y" * 2 * MIB))
        await limited.until(num_waiting=1)
        # Only the contended deadline can end it, because silence is allowed for an hour.
        assert await silent.answer() == (408, b"body_timeout")
        assert await late.answer() == (200, b"%d" % (2 * MIB))

    with_server(runner, main, silence_s=3600.0)


def test_a_session_takes_at_most_a_quarter_of_the_room(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nX-API-Key: greedy\r\nContent-Length: %d\r\n\r\n" % (
            3 * MIB
        )
        greedy = [await limited.sender(head + b"x" * 900_000) for _ in range(8)]
        await limited.until(num_held=8)
        while not limited.bodies.num_waiting:  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0)
        assert limited.bodies.held_bytes <= LIMIT // 4
        other = await limited.sender(sized(b"y" * 2 * MIB, b"X-API-Key: modest"))
        assert await other.answer() == (200, b"%d" % (2 * MIB))
        for client in greedy:
            client.reset()

    with_server(runner, main, silence_s=3600.0)


def test_the_bodies_of_one_session_do_not_block_each_other(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        limited.handler.go.set()
        line = b"X-API-Key: one"
        senders = [await limited.sender(sized(b"x" * 2 * MIB, line)) for _ in range(6)]
        for client in senders:
            assert await client.answer() == (200, b"%d" % (2 * MIB))

    with_server(runner, main, silence_s=3600.0)


def test_a_sender_may_be_silent_unless_others_wait_for_room() -> None:
    pace = SendDeadline(now_s=100.0, num_bytes=0, silence_s=15.0)
    look_s, is_late = pace.check(100.0, 0, is_contended=False)
    assert (look_s, is_late) == (100.0 + CONTENDED_SILENCE_S, False)
    assert pace.check(114.9, 0, is_contended=False) == (115.0, False)
    assert pace.check(115.0, 0, is_contended=False)[1]

    hurried = SendDeadline(now_s=100.0, num_bytes=0, silence_s=15.0)
    assert hurried.check(110.0, 1000, is_contended=True) == (110.0 + CONTENDED_SILENCE_S, False)
    assert hurried.check(110.0 + CONTENDED_SILENCE_S, 1000, is_contended=True)[1]


def test_a_slow_sender_is_cut_while_others_wait_whatever_it_sent_before() -> None:
    pace = SendDeadline(now_s=0.0, num_bytes=0, silence_s=15.0)
    num_bytes, now_s = 60 * MIB, 1.0
    while not pace.check(now_s, num_bytes, is_contended=True)[1]:
        num_bytes, now_s = num_bytes + 1, now_s + 0.5
        assert now_s < 10.0, "earlier bytes extended the grace period"


def test_a_small_body_never_waits(runner: asyncio.Runner) -> None:
    async def main(limited: BodyLimitServer) -> None:
        large = b"x" * (3 * MIB - 1000)
        senders = [await limited.sender(sized(large)) for _ in range(2)]
        await limited.until(num_read=2)
        blocked = await limited.sender(sized(large))
        await limited.until(num_waiting=1)
        small = await limited.sender(sized(b"y" * 20_000))
        await limited.until(num_read=3, num_held=4)
        limited.handler.go.set()
        for client in (*senders, blocked, small):
            assert (await client.answer())[0] == 200

    with_server(runner, main)


# Only the rule decides here.


class Sender:
    """A body that arrives in steps, is used for a while and is then released."""

    def __init__(self, bodies: BodyBudget, rng: random.Random, owner: str | None = None) -> None:
        self.num_bytes = rng.choice([10, 60, 100])
        self.owner = owner
        self.final_bytes = rng.choice([self.num_bytes, 100])
        """The announced length or the limit."""
        self.reservation: BodyReservation | None = None
        self._bodies = bodies
        self._rng = rng
        self._is_chunked = rng.random() < 0.5
        self._gives_up = rng.random() < 0.1

    async def run(self) -> None:
        self.reservation = reservation = self._bodies.begin(self.owner, self.final_bytes)
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
            reservation.release()

    def held_bytes(self) -> int:
        return self.reservation.num_bytes if self.reservation else 0

    async def _pause(self) -> None:
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)


async def run_senders(
    senders: Sequence[Sender], bodies: BodyBudget, rng: random.Random, check: Callable[[], None]
) -> None:
    """Run all senders to their end and cancel a tenth of them; call `check` at each step."""
    tasks: list[asyncio.Task[None]] = []
    for sender in senders:
        tasks.append(asyncio.create_task(sender.run()))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            rng.choice(tasks).cancel()
        check()
    for _ in range(100_000):
        if all(task.done() for task in tasks):
            break
        await asyncio.sleep(0)
        check()
    assert not [task for task in tasks if not task.done()], "a body waits forever"
    assert bodies.num_waits > 0
    assert (bodies.held_bytes, bodies.num_held, bodies.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(40))
async def test_each_wait_ends_and_the_limit_is_exceeded_by_one_body_at_most(seed: int) -> None:
    rng = random.Random(seed)
    bodies = BodyBudget(120)

    def check() -> None:
        assert bodies.held_bytes <= bodies.max_bytes + 100

    await run_senders([Sender(bodies, rng) for _ in range(60)], bodies, rng, check)


@pytest.mark.parametrize("seed", range(40))
async def test_an_owner_holds_a_quarter_or_one_body_and_each_of_its_bodies_ends(seed: int) -> None:
    rng = random.Random(seed)
    bodies = BodyBudget(rng.choice([320, 480, 1000]))
    senders = [Sender(bodies, rng, rng.choice("abc")) for _ in range(90)]

    def check() -> None:
        for owner in "abc":
            held = [each.held_bytes() for each in senders if each.owner == owner]
            assert sum(held) <= max(bodies.max_owner_bytes, *held)

    await run_senders(senders, bodies, rng, check)


def test_room_is_assigned_in_the_order_of_arrival() -> None:
    async def main() -> None:
        bodies = BodyBudget(100)
        whole = bodies.hold(150)
        got: list[int] = []

        async def ask(number: int) -> None:
            reservation = bodies.begin()
            await reservation.reach(60)
            reservation.settle(60)
            got.append(number)
            reservation.release()

        tasks = [asyncio.create_task(ask(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert bodies.num_waiting == 5
        whole.release()
        await asyncio.gather(*tasks)
        assert got == [0, 1, 2, 3, 4]

    asyncio.run(main())


async def test_the_loop_serves_other_tasks_between_two_long_pieces() -> None:
    decode_gate, done = DecodeGate(), list[str]()

    async def long(name: str) -> None:
        await decode_gate.pass_through(LONG_BYTES)
        done.append(name)

    async def other() -> None:
        while len(tasks) and not all(task.done() for task in tasks):
            done.append("-")
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(long(name)) for name in "abcd"]
    await asyncio.gather(other(), *tasks)
    assert [each for each in done if each != "-"] == list("abcd")
    order = "".join(done)
    assert all(f"{one}{two}" not in order for one in "abcd" for two in "abcd"), order
    assert len(decode_gate) == 0


async def test_a_single_body_never_waits() -> None:
    decode_gate = DecodeGate()
    for _ in range(2):
        passing = decode_gate.pass_through(LONG_BYTES)
        with pytest.raises(StopIteration):  # It has ended without waiting.
            passing.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(decode_gate) == 0


async def test_a_short_piece_of_work_overtakes_waiting_ones() -> None:
    decode_gate = DecodeGate()
    tasks = [asyncio.create_task(decode_gate.pass_through(LONG_BYTES)) for _ in range(3)]
    await asyncio.sleep(0)
    passing = decode_gate.pass_through(LONG_BYTES - 1)
    with pytest.raises(StopIteration):
        passing.send(None)
    assert len(decode_gate) == 2
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_delays_no_other() -> None:
    decode_gate = DecodeGate()
    tasks = [asyncio.create_task(decode_gate.pass_through(LONG_BYTES)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(decode_gate) == 2
    tasks[1].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert len(decode_gate) == 0


async def test_a_waiter_that_is_cancelled_after_admission_delays_no_other() -> None:
    decode_gate = DecodeGate()
    _, first, second = (asyncio.create_task(decode_gate.pass_through(LONG_BYTES)) for _ in range(3))
    await asyncio.sleep(0)
    while len(decode_gate) != 1:  # noqa: ASYNC110 - the queue has no event
        await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(60):
        await second
    assert (first.cancelled(), len(decode_gate)) == (True, 0)


async def test_sessions_take_turns_however_much_work_one_of_them_queues() -> None:
    decode_gate, done = DecodeGate(), list[str]()

    async def long(owner: str) -> None:
        await decode_gate.pass_through(LONG_BYTES, owner)
        done.append(owner)

    await asyncio.gather(*[long(owner) for owner in "aaaaaabbc"])
    assert "".join(done) == "aabcabaaa"
    assert len(decode_gate) == 0
