"""What is done to engines: memory goes when nothing runs, woken weights are the newest."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.model_folders import WeightsProbe, leave_probe
from rollmesh.engine.http import HttpClient, target
from rollmesh.serve.coordinator.deeds import carry_out
from rollmesh.serve.coordinator.events import CallEngine, Deed, EngineDone
from rollmesh.testing.engine import ScriptedEngine, Tenure, endless_token, logprob_of


class Hands:
    """An engine, and whoever does things to it."""

    def __init__(self, engine: ScriptedEngine, http: HttpClient, weights: Path) -> None:
        self.engine = engine
        self._http = http
        self._weights = weights

    async def do(self, deed: Deed, policy_version: int = -1) -> EngineDone:
        call = CallEngine(self.engine.url, 1, deed, policy_version)
        return await carry_out(call, self._http, self._weights)

    async def sleep(self) -> None:
        for deed in (Deed.PAUSE, Deed.RELEASE):
            assert (await self.do(deed)).ok

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
    assert hands.engine.tenure is Tenure.RELEASED
    assert hands.engine.weight_version == "released-0"
    seen = (await hands.do(Deed.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (True, False)
    assert (await hands.do(Deed.RELEASE)).ok
    assert hands.engine.num_seen("/release_memory_occupation") == 1


async def test_before_the_first_publication_it_wakes_with_what_it_was_started_with(
    hands: Hands,
) -> None:
    await hands.sleep()
    assert (await hands.do(Deed.RESUME)).ok
    assert hands.engine.weight_version == "moving-0"
    seen = (await hands.do(Deed.LOOK)).seen
    assert seen is not None
    assert (seen.is_released, seen.is_moving) == (False, True)
    loaded = await hands.do(Deed.LOAD)
    assert (loaded.ok, loaded.policy_version) == (True, 0)
    assert hands.engine.weight_version == "0"
    assert hands.engine.tenure is Tenure.HELD
    assert not hands.engine.is_paused


async def test_it_wakes_with_the_newest_that_was_published(hands: Hands) -> None:
    await hands.sleep()
    hands.publish(8)
    newest = hands.publish(9)
    assert (await hands.do(Deed.RESUME)).ok
    assert (await hands.do(Deed.LOAD)).policy_version == 9
    [update] = [each for each in hands.engine.seen if "from_disk" in each.path]
    assert update.body["model_path"] == str(newest)
    assert (await hands.do(Deed.PROBE, 9)).ok
    assert "serves 9" in (await hands.do(Deed.PROBE, 8)).detail


async def test_requests_that_were_cut_have_a_moment_to_end_before_memory_goes(
    hands: Hands,
) -> None:
    hands.engine.hold()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(hands.engine))
        await hands.engine.until(lambda: hands.engine.num_live == 1)
        await hands.sleep()
        await running
    assert hands.engine.tenure is Tenure.RELEASED
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
    assert (await hands.do(Deed.LOAD)).policy_version == 7
    logprobs = tuple(logprob_of(7, token) for token in (2, 3))
    good = WeightsProbe(token_ids=(1, 2, 3), logprobs=logprobs, tolerance=0.01)
    leave_probe(folder, good)
    assert (await hands.do(Deed.PROBE, 7)).ok
    bad = tuple(each + 1 for each in logprobs)
    leave_probe(folder, WeightsProbe(token_ids=(1, 2, 3), logprobs=bad, tolerance=0.01))
    assert "log-probs differ" in (await hands.do(Deed.PROBE, 7)).detail


async def test_an_engine_that_is_gone_is_an_answer_and_no_error(hands: Hands) -> None:
    await hands.engine.die()
    done = await hands.do(Deed.LOOK)
    assert not done.ok
    assert hands.engine.url in done.detail


async def test_whatever_goes_wrong_is_an_answer_so_that_it_is_tried_again(hands: Hands) -> None:
    await hands.sleep()
    assert (await hands.do(Deed.RESUME)).ok
    unreadable = hands.publish(4) / "config.json"
    unreadable.unlink()
    unreadable.symlink_to("x" * 300)
    done = await hands.do(Deed.LOAD)
    assert not done.ok
    assert "File name too long" in done.detail
