"""Engine operations: sleep and wake at an engine, and one order at a time per engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollmesh.core.model_folders import WeightsProbe, leave_probe
from rollmesh.engine.connection import HttpCall
from rollmesh.engine.http import HttpClient, target
from rollmesh.serve.coordinator import engine_ops as errands_module
from rollmesh.serve.coordinator.engine_ops import EngineOps, run_engine_op
from rollmesh.serve.coordinator.worker import EngineOp, EngineOpDone, RunEngineOp
from rollmesh.testing.engine import FakeMemoryState, ScriptedEngine, endless_token, logprob_of
from tests.shortage import no_descriptor_left


class Hands:
    """An engine, and whoever does things to it."""

    def __init__(self, engine: ScriptedEngine, http: HttpClient, weights: Path) -> None:
        self.engine = engine
        self._http = http
        self._weights = weights

    async def do(self, op: EngineOp, policy_version: int = -1) -> EngineOpDone:
        call = RunEngineOp(self.engine.url, 1, op, policy_version)
        return await run_engine_op(call, self._http, self._weights)

    async def sleep(self) -> None:
        for op in (EngineOp.PAUSE, EngineOp.RELEASE):
            assert (await self.do(op)).ok

    def publish(self, policy_version: int) -> Path:
        folder = self._weights / f"v{policy_version:06d}"
        folder.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).touch()
        return folder


@pytest.fixture
async def hands(tmp_path: Path) -> AsyncIterator[Hands]:
    async with ScriptedEngine(endless_token) as engine, HttpClient() as http:
        yield Hands(engine, http, tmp_path / "weights")


async def test_an_engine_says_by_its_weights_name_that_it_sleeps(hands: Hands) -> None:
    await hands.sleep()
    assert hands.engine.memory_state is FakeMemoryState.RELEASED
    assert hands.engine.weight_version == "released-0"
    seen = (await hands.do(EngineOp.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (True, False)
    assert (await hands.do(EngineOp.RELEASE)).ok
    assert hands.engine.num_seen("/release_memory_occupation") == 1


async def test_before_the_first_publication_it_wakes_with_what_it_was_started_with(
    hands: Hands,
) -> None:
    await hands.sleep()
    assert (await hands.do(EngineOp.RESUME)).ok
    assert hands.engine.weight_version == "moving-0"
    seen = (await hands.do(EngineOp.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (False, True)
    loaded = await hands.do(EngineOp.LOAD)
    assert (loaded.ok, loaded.policy_version) == (True, 0)
    assert hands.engine.weight_version == "0"
    assert hands.engine.memory_state is FakeMemoryState.HELD
    assert not hands.engine.is_paused


async def test_it_wakes_with_the_newest_that_was_published(hands: Hands) -> None:
    await hands.sleep()
    hands.publish(8)
    newest = hands.publish(9)
    assert (await hands.do(EngineOp.RESUME)).ok
    assert (await hands.do(EngineOp.LOAD)).policy_version == 9
    [update] = [each for each in hands.engine.seen if "from_disk" in each.path]
    assert update.body["model_path"] == str(newest)
    assert (await hands.do(EngineOp.PROBE, 9)).ok
    assert "serves 9" in (await hands.do(EngineOp.PROBE, 8)).detail


async def test_requests_that_were_cut_have_a_moment_to_end_before_memory_goes(
    hands: Hands,
) -> None:
    hands.engine.hold()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(hands.engine))
        await hands.engine.until(lambda: hands.engine.num_live == 1)
        await hands.sleep()
        await running
    assert hands.engine.memory_state is FakeMemoryState.RELEASED
    paths = [each.path for each in hands.engine.seen]
    assert paths.index("/flush_cache") < paths.index("/release_memory_occupation")


async def generate(engine: ScriptedEngine) -> None:
    """A request that nobody would end by itself."""
    body = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":9},"rid":"r"}'
    async with HttpClient() as http:
        to = target("POST", f"{engine.url}/generate", (("Content-Type", "application/json"),))
        response = await http.fetch(to, [body], timeout_s=30.0)
        assert b"abort" in response.body


async def test_a_probe_behind_the_weights_finds_out_other_ones(hands: Hands) -> None:
    folder = hands.publish(7)
    assert (await hands.do(EngineOp.LOAD)).policy_version == 7
    logprobs = tuple(logprob_of(7, token) for token in (2, 3))
    good = WeightsProbe(token_ids=(1, 2, 3), logprobs=logprobs, tolerance=0.01)
    leave_probe(folder, good)
    assert (await hands.do(EngineOp.PROBE, 7)).ok
    bad = tuple(each + 1 for each in logprobs)
    leave_probe(folder, WeightsProbe(token_ids=(1, 2, 3), logprobs=bad, tolerance=0.01))
    assert "log-probs differ" in (await hands.do(EngineOp.PROBE, 7)).detail


async def test_an_engine_that_is_gone_is_an_answer_and_no_error(hands: Hands) -> None:
    await hands.engine.die()
    done = await hands.do(EngineOp.LOOK)
    assert not done.ok
    assert hands.engine.url in done.detail


async def test_whatever_goes_wrong_is_an_answer_so_that_it_is_tried_again(hands: Hands) -> None:
    await hands.sleep()
    assert (await hands.do(EngineOp.RESUME)).ok
    unreadable = hands.publish(4) / "config.json"
    unreadable.unlink()
    unreadable.symlink_to("x" * 300)
    done = await hands.do(EngineOp.LOAD)
    assert not done.ok
    assert "File name too long" in done.detail


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
        self.told: list[EngineOpDone] = []
        self._moved = asyncio.Event()
        self._serial = 0

    def hear(self, done: EngineOpDone) -> None:
        self.told.append(done)
        self._moved.set()

    def send(self, errands: EngineOps, op: EngineOp) -> None:
        self._serial += 1
        errands.send(RunEngineOp(self.road.url, self._serial, op))

    async def of_last(self) -> EngineOpDone:
        """What came of the newest, when it is known."""
        while not self.told or self.told[-1].serial < self._serial:
            self._moved.clear()
            await self._moved.wait()
        return self.told[-1]


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    """An engine that sleeps."""
    async with ScriptedEngine(endless_token, weight_version="released-0") as engine:
        engine.memory_state = FakeMemoryState.RELEASED
        road = Road(engine)
        server = await road.serve()
        yield Office(engine, road)
        server.close()
        await road.close()


class BreaksOff(EngineOps):
    """The fault: whatever is under way is given up for what is newer."""

    def send(self, call: RunEngineOp) -> None:
        before = self._newest.get(call.url)
        if before and before.task:
            before.task.cancel()
        super().send(call)


async def held_up(office: Office, errands: EngineOps) -> None:
    """It is told to wake, which the road holds, and to sleep again."""
    office.road.hold(RESUME)
    office.send(errands, EngineOp.RESUME)
    await office.road.holds.wait()
    office.send(errands, EngineOp.LOOK)
    office.send(errands, EngineOp.RELEASE)


async def test_an_order_that_is_broken_off_on_the_road_arrives_after_the_next(
    office: Office, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        errands = BreaksOff(http, tmp_path, office.hear)
        await held_up(office, errands)
        assert (await office.of_last()).ok
        assert office.engine.memory_state is FakeMemoryState.RELEASED
        office.road.clear()
        await office.engine.until(lambda: office.engine.memory_state is FakeMemoryState.BARE)
        assert office.engine.weight_version == "released-0", "it has its memory, and says no"
        await errands.close()


async def test_no_order_is_sent_before_the_last_ones_outcome_is_known(
    office: Office, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        errands = EngineOps(http, tmp_path, office.hear)
        await held_up(office, errands)
        office.road.clear()
        done = await office.of_last()
        assert done.ok
        assert [each.serial for each in office.told] == [3]
        assert (office.engine.num_seen(RESUME), office.engine.num_seen(RELEASE)) == (1, 1)
        assert office.engine.memory_state is FakeMemoryState.RELEASED
        await errands.close()


async def test_an_order_ends_with_its_engine(office: Office, tmp_path: Path) -> None:
    async with HttpClient() as http:
        errands = EngineOps(http, tmp_path, office.hear)
        await held_up(office, errands)
        assert not office.told
        await office.engine.die()
        done = await office.of_last()
        assert (done.ok, [each.serial for each in office.told]) == (False, [3])
        assert office.engine.num_seen(RESUME) == 0
        await errands.close()


async def test_a_look_is_broken_off_for_what_is_newer(office: Office, tmp_path: Path) -> None:
    async with HttpClient(keepalive=True) as http:
        errands = EngineOps(http, tmp_path, office.hear)
        office.road.hold("/model_info")
        office.send(errands, EngineOp.LOOK)
        await office.road.holds.wait()
        office.road.hold("")
        office.send(errands, EngineOp.RESUME)
        assert (await office.of_last()).ok
        assert [each.serial for each in office.told] == [2]
        assert office.engine.memory_state is FakeMemoryState.BARE
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
    monkeypatch.setattr(errands_module, "RESEND_S", 0.0)
    async with CountsDials() as http:
        errands = EngineOps(http, tmp_path, office.hear)
        with no_descriptor_left():
            office.send(errands, EngineOp.RELEASE)
            while http.num_dials < 3:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            assert not office.told
        assert (await office.of_last()).ok
        assert [each.serial for each in office.told] == [1]
        await errands.close()
