"""The contract of engine requests as rollmesh's client makes them: read, parked, resumed and
refused.

Greedy tokens prove themselves: a turn that was cut must read as one that was not, except for ties:
a prompt is not computed in the order of a decode, so two equally likely tokens may swap, and the
tokens after them may differ.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollmesh.core.types import OutputGrammar, SamplingParams, policy_version_of
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.generation import Generation, GenerationState
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.wire.fleet import EngineFaulted, EnginePhase, EngineRow, FleetChanged
from tests.contract.engines import WAIT_S, EngineUnderContract

PROMPT = [5, 6, 7, 8]
END_TOKEN = 256
"""The end token of the contract's model; pushed down, so that turns end by their length."""
TO_THE_END = 2**31
TIE = 1e-3
"""Log-prob difference within which the likeliest tokens count as equally likely."""


class Caller:
    """A sampler in front of one engine."""

    def __init__(self, url: str, policy_version: int) -> None:
        """`policy_version` is the engine's, which other tests may have updated."""
        self.url = url
        self.view = FleetView()
        self.faults: list[EngineFaulted] = []
        row = EngineRow(url, "", EnginePhase.READY, policy_version)
        self.view.update(FleetChanged(1, (row,)), "r")
        parts = SamplerDeps(view=self.view, vocab_size=2**31, report=self.faults.append)
        self.sampler = Sampler(parts)

    def start(self, num_tokens: int, *, stream: bool = False, **more: Any) -> Generation:
        params = {"logit_bias": ((END_TOKEN, -100.0),), **more.pop("params", {})}
        request = GenerationRequest(
            generation_id="g",
            session_key="s",
            prompt_ids=PROMPT,
            params=SamplingParams(max_tokens=num_tokens, temperature=0.0, **params),
            stream=stream,
            **more,
        )
        generation = self.sampler.start(request)
        generation.join()
        return generation

    async def turn(self, num_tokens: int, **more: Any) -> Generation:
        generation = self.start(num_tokens, **more)
        await generation.wait(TO_THE_END)
        assert generation.state is GenerationState.COMMITTED, generation.error
        return generation

    async def tokens(self, num_tokens: int, **more: Any) -> list[int]:
        return list((await self.turn(num_tokens, **more)).token_ids)


@pytest.fixture
async def caller(engine: EngineUnderContract) -> AsyncIterator[Caller]:
    info = await engine.get("/model_info")
    policy_version = policy_version_of(info["weight_version"])
    caller = Caller(str(engine.client.base_url).rstrip("/"), policy_version)
    yield caller
    await caller.sampler.close()


def assert_reads_alike(found: Generation, expected: Generation) -> None:
    """Check that two greedy outputs have the same tokens and log-probs up to the first tie."""
    assert found.state is GenerationState.COMMITTED, found.error
    assert len(found.token_ids) == len(expected.token_ids)
    for at, (mine, theirs) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
        gap = abs(found.logprobs[at] - expected.logprobs[at])
        assert gap < TIE, f"token {at}: {mine} and {theirs}, log-probs {gap} apart"
        if mine != theirs:
            return


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - what moves is in another process
            await asyncio.sleep(0)


async def test_streamed_and_plain_requests_return_the_same(caller: Caller) -> None:
    plain = await caller.turn(40)
    assert len(plain.token_ids) == 40
    assert END_TOKEN not in plain.token_ids
    assert_reads_alike(await caller.turn(40, stream=True), plain)
    assert caller.faults == []


@pytest.mark.parametrize("stream", [True, False])
async def test_likeliest_tokens_are_returned_with_each_token(caller: Caller, stream: bool) -> None:
    generation = caller.start(12, stream=stream, num_top_logprobs=3)
    await generation.wait(TO_THE_END)
    assert [len(place) for place in generation.top_logprobs] == [3] * 12
    assert [place[0][1] for place in generation.top_logprobs] == list(generation.token_ids)
    firsts = [place[0][0] for place in generation.top_logprobs]
    assert firsts == pytest.approx(list(generation.logprobs), abs=1e-3)


@pytest.mark.parametrize("stream", [True, False])
async def test_parked_turn_ends_at_the_engine_and_resumes_exactly(
    engine: EngineUnderContract, caller: Caller, stream: bool
) -> None:
    uncut = await caller.turn(400)
    generation = caller.start(400, stream=stream)
    if stream:
        await generation.wait(5)
    else:
        await engine.until_running(1)
    generation.leave()
    await until(lambda: caller.view.num_requests(caller.url) == 0)
    await engine.until_idle()
    num_parked = len(generation.token_ids)
    assert generation.state is GenerationState.PARKED
    assert num_parked < 400
    generation.join()
    await generation.wait(TO_THE_END)
    assert_reads_alike(generation, uncut)


async def test_prepared_json_of_a_prompt_is_read_as_its_ids(caller: Caller) -> None:
    ready = ",".join(map(str, PROMPT)).encode()
    assert await caller.tokens(8, prompt_json=ready) == await caller.tokens(8)


async def test_requests_beyond_the_queue_wait_their_turn(caller: Caller) -> None:
    expected = await caller.turn(60)
    for found in await asyncio.gather(*(caller.turn(60) for _ in range(110))):
        assert_reads_alike(found, expected)
    assert caller.faults == []


async def test_an_invalid_grammar_is_refused_and_a_valid_one_is_kept(caller: Caller) -> None:
    wrong = caller.start(8, params={"grammar": OutputGrammar("regex", "(")})
    await wrong.wait(TO_THE_END)
    assert type(wrong.error).__name__ == "EngineRefused"
    right = caller.start(8, params={"grammar": OutputGrammar("regex", "[0-9]+"), "logit_bias": ()})
    await right.wait(TO_THE_END)
    assert right.state is GenerationState.COMMITTED, right.error
