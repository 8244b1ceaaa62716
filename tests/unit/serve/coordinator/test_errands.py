"""Errands to engines over a road that holds things up: nothing arrives after what came later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollmesh.engine.connection import HttpCall
from rollmesh.engine.http import HttpClient
from rollmesh.serve.coordinator import errands as errands_module
from rollmesh.serve.coordinator.errands import Errands
from rollmesh.serve.coordinator.events import CallEngine, Deed, EngineDone
from rollmesh.testing.engine import ScriptedEngine, Tenure, endless_token
from tests.shortage import no_descriptor_left

RESUME, RELEASE = "/resume_memory_occupation", "/release_memory_occupation"


class Road:
    """Between a client and an engine. What it has taken arrives, whoever hangs up meanwhile."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._port = int(engine.url.rpartition(":")[2])
        self._held = b""
        """Requests with this in them wait."""
        self.holds = asyncio.Event()
        self._is_clear = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    def hold(self, path: str) -> None:
        self._held = path.encode()

    def clear(self) -> None:
        self._is_clear.set()

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        closing = [writer.wait_closed() for writer in self._writers]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._writers.append(back)
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self._port)
        except ConnectionError:
            back.close()
            return
        self._writers.append(forth)
        self._pumps.add(asyncio.create_task(self._pump(near, forth)))
        self._pumps.add(asyncio.create_task(self._pump(far, back, ends=True)))

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, ends: bool = False
    ) -> None:
        """`ends`: the end of what is told is told, too."""
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if self._held and self._held in data:
                    self.holds.set()
                    await self._is_clear.wait()
                target.write(data)
                await target.drain()
        if ends:
            target.close()


class Office:
    """Errands by that road, and what they told."""

    def __init__(self, engine: ScriptedEngine, road: Road) -> None:
        self.engine, self.road = engine, road
        self.told: list[EngineDone] = []
        self._moved = asyncio.Event()
        self._serial = 0

    def hear(self, done: EngineDone) -> None:
        self.told.append(done)
        self._moved.set()

    def send(self, errands: Errands, deed: Deed) -> None:
        self._serial += 1
        errands.send(CallEngine(self.road.url, self._serial, deed))

    async def of_last(self) -> EngineDone:
        """What came of the newest, when it is known."""
        while not self.told or self.told[-1].serial < self._serial:
            self._moved.clear()
            await self._moved.wait()
        return self.told[-1]


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    """An engine that sleeps."""
    async with ScriptedEngine(endless_token, weight_version="released-0") as engine:
        engine.tenure = Tenure.RELEASED
        road = Road(engine)
        server = await road.serve()
        yield Office(engine, road)
        server.close()
        await road.close()


class BreaksOff(Errands):
    """The fault: whatever is under way is given up for what is newer."""

    def send(self, call: CallEngine) -> None:
        before = self._newest.get(call.url)
        if before and before.task:
            before.task.cancel()
        super().send(call)


async def held_up(office: Office, errands: Errands) -> None:
    """It is told to wake, which the road holds, and to sleep again."""
    office.road.hold(RESUME)
    office.send(errands, Deed.RESUME)
    await office.road.holds.wait()
    office.send(errands, Deed.LOOK)
    office.send(errands, Deed.RELEASE)


async def test_an_order_that_is_broken_off_on_the_road_arrives_after_the_next(
    office: Office, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        errands = BreaksOff(http, tmp_path, office.hear)
        await held_up(office, errands)
        assert (await office.of_last()).ok
        assert office.engine.tenure is Tenure.RELEASED
        office.road.clear()
        await office.engine.until(lambda: office.engine.tenure is Tenure.BARE)
        assert office.engine.weight_version == "released-0", "it has its memory, and says no"
        await errands.close()


async def test_no_order_is_sent_before_the_last_ones_outcome_is_known(
    office: Office, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        errands = Errands(http, tmp_path, office.hear)
        await held_up(office, errands)
        office.road.clear()
        done = await office.of_last()
        assert done.ok
        assert [each.serial for each in office.told] == [3]
        assert (office.engine.num_seen(RESUME), office.engine.num_seen(RELEASE)) == (1, 1)
        assert office.engine.tenure is Tenure.RELEASED
        await errands.close()


async def test_an_order_ends_with_its_engine(office: Office, tmp_path: Path) -> None:
    async with HttpClient() as http:
        errands = Errands(http, tmp_path, office.hear)
        await held_up(office, errands)
        assert not office.told
        await office.engine.die()
        done = await office.of_last()
        assert (done.ok, [each.serial for each in office.told]) == (False, [3])
        assert office.engine.num_seen(RESUME) == 0
        await errands.close()


async def test_a_look_is_broken_off_for_what_is_newer(office: Office, tmp_path: Path) -> None:
    async with HttpClient(keepalive=True) as http:
        errands = Errands(http, tmp_path, office.hear)
        office.road.hold("/model_info")
        office.send(errands, Deed.LOOK)
        await office.road.holds.wait()
        office.road.hold("")
        office.send(errands, Deed.RESUME)
        assert (await office.of_last()).ok
        assert [each.serial for each in office.told] == [2]
        assert office.engine.tenure is Tenure.BARE
        await errands.close()


class CountsDials(HttpClient):
    """Counts the connections that it tried to open; gives up at the first shortage."""

    def __init__(self) -> None:
        super().__init__(shortage_wait_s=0.0)
        self.num_dials = 0

    def connect(self, call: HttpCall) -> None:
        self.num_dials += 1
        super().connect(call)


async def test_an_order_that_cannot_be_sent_for_want_of_a_descriptor_is_repeated(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errands_module, "AGAIN_S", 0.0)
    async with CountsDials() as http:
        errands = Errands(http, tmp_path, office.hear)
        with no_descriptor_left():
            office.send(errands, Deed.RELEASE)
            while http.num_dials < 3:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            assert not office.told
        assert (await office.of_last()).ok
        assert [each.serial for each in office.told] == [1]
        await errands.close()
