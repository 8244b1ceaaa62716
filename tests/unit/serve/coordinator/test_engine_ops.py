"""Engine operations: sleep and wake at an engine, and one operation at a time per engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollmesh.core.model_folders import WeightsProbe, leave_probe
from rollmesh.engine.connection import HttpCall
from rollmesh.engine.http import HttpClient, target
from rollmesh.serve.coordinator import engine_ops as engine_ops_module
from rollmesh.serve.coordinator.engine_ops import EngineOps, run_engine_op
from rollmesh.serve.coordinator.worker import EngineOp, EngineOpDone, RunEngineOp
from rollmesh.testing.engine import FakeMemoryState, ScriptedEngine, endless_token, logprob_of
from tests.shortage import no_descriptor_left


class EngineDriver:
    """A scripted engine, its weights folder, and the operations that a test sends to it."""

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
async def driver(tmp_path: Path) -> AsyncIterator[EngineDriver]:
    async with ScriptedEngine(endless_token) as engine, HttpClient() as http:
        yield EngineDriver(engine, http, tmp_path / "weights")


async def test_the_weight_version_of_a_sleeping_engine_marks_it_as_released(
    driver: EngineDriver,
) -> None:
    await driver.sleep()
    assert driver.engine.memory_state is FakeMemoryState.RELEASED
    assert driver.engine.weight_version == "released-0"
    seen = (await driver.do(EngineOp.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (True, False)
    assert (await driver.do(EngineOp.RELEASE)).ok
    assert driver.engine.num_seen("/release_memory_occupation") == 1


async def test_before_the_first_publication_an_engine_wakes_with_its_first_weights(
    driver: EngineDriver,
) -> None:
    await driver.sleep()
    assert (await driver.do(EngineOp.RESUME)).ok
    assert driver.engine.weight_version == "moving-0"
    seen = (await driver.do(EngineOp.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (False, True)
    loaded = await driver.do(EngineOp.LOAD)
    assert (loaded.ok, loaded.policy_version) == (True, 0)
    assert driver.engine.weight_version == "0"
    assert driver.engine.memory_state is FakeMemoryState.HELD
    assert not driver.engine.is_paused


async def test_an_engine_wakes_with_the_newest_published_weights(driver: EngineDriver) -> None:
    await driver.sleep()
    driver.publish(8)
    newest = driver.publish(9)
    assert (await driver.do(EngineOp.RESUME)).ok
    assert (await driver.do(EngineOp.LOAD)).policy_version == 9
    [update] = [each for each in driver.engine.seen if "from_disk" in each.path]
    assert update.body["model_path"] == str(newest)
    assert (await driver.do(EngineOp.PROBE, 9)).ok
    assert "serves 9" in (await driver.do(EngineOp.PROBE, 8)).detail


async def test_aborted_requests_may_end_before_memory_is_released(
    driver: EngineDriver,
) -> None:
    driver.engine.hold()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(driver.engine))
        await driver.engine.until(lambda: driver.engine.num_live == 1)
        await driver.sleep()
        await running
    assert driver.engine.memory_state is FakeMemoryState.RELEASED
    paths = [each.path for each in driver.engine.seen]
    assert paths.index("/flush_cache") < paths.index("/release_memory_occupation")


async def generate(engine: ScriptedEngine) -> None:
    """Send a request that ends only when it is aborted."""
    body = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":9},"rid":"r"}'
    async with HttpClient() as http:
        to = target("POST", f"{engine.url}/generate", (("Content-Type", "application/json"),))
        response = await http.fetch(to, [body], timeout_s=30.0)
        assert b"abort" in response.body


async def test_a_probe_with_the_weights_detects_other_weights(driver: EngineDriver) -> None:
    folder = driver.publish(7)
    assert (await driver.do(EngineOp.LOAD)).policy_version == 7
    logprobs = tuple(logprob_of(7, token) for token in (2, 3))
    good = WeightsProbe(token_ids=(1, 2, 3), logprobs=logprobs, tolerance=0.01)
    leave_probe(folder, good)
    assert (await driver.do(EngineOp.PROBE, 7)).ok
    bad = tuple(each + 1 for each in logprobs)
    leave_probe(folder, WeightsProbe(token_ids=(1, 2, 3), logprobs=bad, tolerance=0.01))
    assert "log-probs differ" in (await driver.do(EngineOp.PROBE, 7)).detail


async def test_an_unreachable_engine_is_a_failed_operation_and_no_exception(
    driver: EngineDriver,
) -> None:
    await driver.engine.die()
    done = await driver.do(EngineOp.LOOK)
    assert not done.ok
    assert driver.engine.url in done.detail


async def test_every_error_is_a_failed_operation_that_can_be_retried(driver: EngineDriver) -> None:
    await driver.sleep()
    assert (await driver.do(EngineOp.RESUME)).ok
    unreadable = driver.publish(4) / "config.json"
    unreadable.unlink()
    unreadable.symlink_to("x" * 300)
    done = await driver.do(EngineOp.LOAD)
    assert not done.ok
    assert "File name too long" in done.detail


RESUME, RELEASE = "/resume_memory_occupation", "/release_memory_occupation"


class SlowNetwork:
    """A proxy in front of an engine that holds matching requests; a request that it accepted
    arrives, even if its client disconnects.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self._port = int(engine.url.rpartition(":")[2])
        self._held = b""
        """Requests that contain this text are held."""
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
        """Forward bytes; if `ends`, forward the end of the stream too."""
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if self._held and self._held in data:
                    self.holds.set()
                    await self._is_clear.wait()
                target.write(data)
                await target.drain()
        if ends:
            target.close()


class OpSender:
    """Sends engine operations through the network, and keeps their results."""

    def __init__(self, engine: ScriptedEngine, network: SlowNetwork) -> None:
        self.engine, self.network = engine, network
        self.results: list[EngineOpDone] = []
        self._moved = asyncio.Event()
        self._serial = 0

    def add(self, done: EngineOpDone) -> None:
        self.results.append(done)
        self._moved.set()

    def send(self, engine_ops: EngineOps, op: EngineOp) -> None:
        self._serial += 1
        engine_ops.send(RunEngineOp(self.network.url, self._serial, op))

    async def of_last(self) -> EngineOpDone:
        """Return the result of the newest operation, once it has one."""
        while not self.results or self.results[-1].serial < self._serial:
            self._moved.clear()
            await self._moved.wait()
        return self.results[-1]


@pytest.fixture
async def sender() -> AsyncIterator[OpSender]:
    """The sender for an engine that sleeps."""
    async with ScriptedEngine(endless_token, weight_version="released-0") as engine:
        engine.memory_state = FakeMemoryState.RELEASED
        network = SlowNetwork(engine)
        server = await network.serve()
        yield OpSender(engine, network)
        server.close()
        await network.close()


class BreaksOff(EngineOps):
    """The fault: a running operation is cancelled when a newer one arrives."""

    def send(self, call: RunEngineOp) -> None:
        before = self._newest.get(call.url)
        if before and before.task:
            before.task.cancel()
        super().send(call)


async def held_up(sender: OpSender, engine_ops: EngineOps) -> None:
    """Send a wake-up, which the network holds, and then a release."""
    sender.network.hold(RESUME)
    sender.send(engine_ops, EngineOp.RESUME)
    await sender.network.holds.wait()
    sender.send(engine_ops, EngineOp.LOOK)
    sender.send(engine_ops, EngineOp.RELEASE)


async def test_a_cancelled_operation_that_is_still_in_the_network_arrives_after_the_next(
    sender: OpSender, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        engine_ops = BreaksOff(http, tmp_path, sender.add)
        await held_up(sender, engine_ops)
        assert (await sender.of_last()).ok
        assert sender.engine.memory_state is FakeMemoryState.RELEASED
        sender.network.clear()
        await sender.engine.until(lambda: sender.engine.memory_state is FakeMemoryState.BARE)
        assert sender.engine.weight_version == "released-0", "it has memory and reports none"
        await engine_ops.close()


async def test_no_operation_is_sent_before_the_result_of_the_last_one_is_known(
    sender: OpSender, tmp_path: Path
) -> None:
    async with HttpClient() as http:
        engine_ops = EngineOps(http, tmp_path, sender.add)
        await held_up(sender, engine_ops)
        sender.network.clear()
        done = await sender.of_last()
        assert done.ok
        assert [each.serial for each in sender.results] == [3]
        assert (sender.engine.num_seen(RESUME), sender.engine.num_seen(RELEASE)) == (1, 1)
        assert sender.engine.memory_state is FakeMemoryState.RELEASED
        await engine_ops.close()


async def test_an_operation_ends_with_its_engine(sender: OpSender, tmp_path: Path) -> None:
    async with HttpClient() as http:
        engine_ops = EngineOps(http, tmp_path, sender.add)
        await held_up(sender, engine_ops)
        assert not sender.results
        await sender.engine.die()
        done = await sender.of_last()
        assert (done.ok, [each.serial for each in sender.results]) == (False, [3])
        assert sender.engine.num_seen(RESUME) == 0
        await engine_ops.close()


async def test_a_look_is_cancelled_for_a_newer_operation(sender: OpSender, tmp_path: Path) -> None:
    async with HttpClient() as http:
        engine_ops = EngineOps(http, tmp_path, sender.add)
        sender.network.hold("/model_info")
        sender.send(engine_ops, EngineOp.LOOK)
        await sender.network.holds.wait()
        sender.network.hold("")
        sender.send(engine_ops, EngineOp.RESUME)
        assert (await sender.of_last()).ok
        assert [each.serial for each in sender.results] == [2]
        assert sender.engine.memory_state is FakeMemoryState.BARE
        await engine_ops.close()


class CountsDials(HttpClient):
    """Count the connections that it tried to open; stop at the first shortage."""

    def __init__(self) -> None:
        super().__init__(shortage_wait_s=0.0)
        self.num_dials = 0

    def connect(self, call: HttpCall) -> None:
        self.num_dials += 1
        super().connect(call)


async def test_an_operation_that_cannot_be_sent_for_lack_of_a_descriptor_is_repeated(
    sender: OpSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ops_module, "RESEND_S", 0.0)
    async with CountsDials() as http:
        engine_ops = EngineOps(http, tmp_path, sender.add)
        with no_descriptor_left():
            sender.send(engine_ops, EngineOp.RELEASE)
            while http.num_dials < 3:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            assert not sender.results
        assert (await sender.of_last()).ok
        assert [each.serial for each in sender.results] == [1]
        await engine_ops.close()
