"""An engine process that is frozen during a turn: the turn resumes once on another engine.

From outside, SIGSTOP looks like a hung driver or a paused container: connections stay open, the
kernel accepts new ones, nothing is answered, nothing fails.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from tests.contract.conftest import NOT_INSTALLED
from tests.contract.engines import WAIT_S, EngineUnderContract
from tests.contract.processes import (
    SGLANG_INSTALLED,
    EngineProcess,
    embedded_engine,
    sglang_engine,
)
from tests.flow.gateway_process import Gateway, finish, serving

INCREMENTAL = "--incremental-streaming-output"
LEFT_AFTER_S = 1.0
"""Longer than any silence of a running engine, and shorter than two probes."""
NUM_TOKENS = 2000
"""A second or two of generation."""
VOCAB_SIZE = 265
ENDS = (256, 258)
"""Forbidden, so that no turn ends before its length."""
AROUND = 100
"""Tokens before and after a seam that are compared."""


class Watched:
    """One streamed turn, and the times of its tokens."""

    def __init__(self, gateway: Gateway, opened: dict[str, str]) -> None:
        self.opened = opened
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.begun = asyncio.Event()
        """Set when a seam would have AROUND tokens before it."""
        self.went_on_s = 0.0
        """When the longest silence ended."""
        self.silence_s = 0.0
        self.seam = 0
        """Tokens before it."""
        self._gateway = gateway

    async def watch(self) -> None:
        """Make the call, and read to the end."""
        loop = asyncio.get_running_loop()
        last_s = 0.0
        async for choice in self._choices():
            now_s = loop.time()
            if last_s and now_s - last_s > self.silence_s:
                self.silence_s, self.went_on_s = now_s - last_s, now_s
                self.seam = len(self.token_ids)
            last_s = now_s
            self.token_ids += choice.get("token_ids") or []
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or ""
            if len(self.token_ids) >= AROUND:
                self.begun.set()

    async def _choices(self) -> AsyncIterator[dict[str, Any]]:
        body = {
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": NUM_TOKENS,
            "logit_bias": dict.fromkeys(map(str, ENDS), -100),
            "stream": True,
            "return_token_ids": True,
        }
        url = self.opened["path_url"] + "/chat/completions"
        async with self._gateway.client.post(url, json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in orjson.loads(line[6:])["choices"]:
                        yield choice


@contextmanager
def frozen(engine: EngineProcess) -> Iterator[None]:
    """Stop the engine and its descendants until the block ends."""
    process = psutil.Process(engine.pid)
    family = [process, *process.children(recursive=True)]
    for member in family:
        member.suspend()
    try:
        yield
    finally:
        for member in family:
            member.resume()


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)]
)
def victim(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[EngineProcess]:
    """The engine that is frozen."""
    if request.param == "embedded":
        engine = embedded_engine(model_folder, INCREMENTAL)
    elif SGLANG_INSTALLED.exists():
        engine = sglang_engine(model_folder, INCREMENTAL)
    else:
        pytest.skip(NOT_INSTALLED)
    with engine as process:
        yield process


@pytest.fixture(scope="module")
def other(model_folder: Path) -> Iterator[EngineProcess]:
    """Another engine."""
    with embedded_engine(model_folder, INCREMENTAL) as process:
        yield process


async def until_all_ready(gateway: Gateway) -> None:
    """Poll until all are ready."""
    async with asyncio.timeout(WAIT_S):
        while True:
            _, health = await gateway.admin("GET", "/healthz")
            if all(engine["phase"] == "ready" for engine in health["engines"]):
                return


async def figures(gateway: Gateway, *names: str) -> list[float]:
    _, metrics = await gateway.admin("GET", "/metrics")
    return [float(re.findall(rf"^rollmesh_{name} (\S+)$", metrics, re.M)[0]) for name in names]


def assert_has_each_token_once(turn: Watched, account: Any) -> None:
    """Check that the session's one sample is what the client received."""
    [sample] = account["samples"]
    num_prompt = len(sample["token_ids"]) - NUM_TOKENS
    assert sample["token_ids"][num_prompt:] == turn.token_ids
    assert [*map(bool, sample["loss_mask"])] == [False] * num_prompt + [True] * NUM_TOKENS


async def assert_continuous_at_its_seam(turn: Watched, account: Any, judge: EngineProcess) -> None:
    """Check that `judge` finds each token around the seam as likely as it was recorded."""
    [sample] = account["samples"]
    seam = len(sample["token_ids"]) - NUM_TOKENS + turn.seam
    places = range(seam - AROUND, min(seam + AROUND, len(sample["token_ids"])))
    ids = sample["token_ids"][: places.stop]
    async with httpx.AsyncClient(base_url=judge.address, timeout=WAIT_S) as client:
        answer = await EngineUnderContract(client, "", is_incremental=True).generate(
            ids,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=places.start - 1,
            top_logprobs_num=VOCAB_SIZE,
        )
    tops = answer["meta_info"]["input_top_logprobs"]
    scored = []
    for place, top in zip(
        places, tops[1:], strict=True
    ):  # the first silence has no tokens before it
        logprobs = {token: logprob for logprob, token, _ in top}
        # The judge scores among all tokens; the turn was sampled among all except ENDS.
        of_ends = sum(math.exp(logprobs[token]) for token in ENDS)
        scored.append(logprobs[ids[place]] - math.log1p(-of_ends))
    recorded = sample["logprobs"][places.start : places.stop]
    assert recorded == pytest.approx(scored, abs=2e-3)


async def cut_by_a_freeze(pair: list[Watched], victim: EngineProcess) -> Watched | None:
    """Watch both turns, and freeze `victim` meanwhile; return the turn that ran there, if any."""
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        watching = []
        for turn in pair:  # each goes to the engine with less load, so one of them to the victim
            watching.append(group.create_task(turn.watch()))
            await turn.begun.wait()
        with frozen(victim):
            frozen_s = asyncio.get_running_loop().time()
            await asyncio.wait(watching)
    cut = max(pair, key=lambda turn: turn.silence_s)
    return cut if cut.silence_s > LEFT_AFTER_S and cut.went_on_s > frozen_s else None


@pytest.mark.slow
async def test_a_turn_whose_engine_freezes_resumes_on_another_and_is_counted_once(
    victim: EngineProcess, other: EngineProcess, model_folder: Path, tmp_path: Path
) -> None:
    args = ["--model-dir", str(model_folder)]
    args += ["--engine", victim.address, "--engine", other.address]
    async with serving(tmp_path, *args) as gateway:
        turns, cut = list[Watched](), None
        while cut is None:  # the turns were over, or almost
            await until_all_ready(gateway)
            pair = [Watched(gateway, await gateway.open(sampling="eval")) for _ in range(2)]
            turns += pair
            cut = await cut_by_a_freeze(pair, victim)
        async with httpx.AsyncClient(base_url=victim.address, timeout=WAIT_S) as client:
            await EngineUnderContract(client, "", is_incremental=True).until_idle()
        await until_all_ready(gateway)
        names = ("live_legs", "exchanges_open", "calls_total", "sampled_tokens_total")
        assert await figures(gateway, *names) == [*(0, 0, len(turns), len(turns) * NUM_TOKENS)]
        for turn in turns:
            account = await finish(gateway, turn.opened)
            assert_has_each_token_once(turn, account)
            if turn is cut:
                await assert_continuous_at_its_seam(turn, account, other)
