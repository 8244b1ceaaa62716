"""Recorded log-probs are those of the recorded weights, across turns and a weight update.

A real engine process, the real agent server over real sockets, and stock transformers as the
reference: every sampled token of every sample is teacher-forced through the checkpoint of its
policy version.
"""

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import Ready, listen
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, SamplingPolicy, Task
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.session import SessionRecord
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.runtime.tokens.tool_calls import StopStrings
from rollmesh.serve.client.samples import Sample, cut
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged

GROUP = GroupId("r", 0)
PATIENCE_S = 60.0
TEXTS = ["Guess a number from 1 to 7. I guess 4. higher lower correct"] * 50
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of one shape; wide, so that the model samples many different tokens."""
    folders = [tmp_path_factory.mktemp("model") / f"v{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        write_tiny_model(folder, TEXTS, TinyShape(init_std=0.2, max_positions=4096), seed)
    return folders


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[str]:
    """The address of an engine that serves the first weights as version 0."""
    reading, writing = os.pipe()
    args = ["--model-dir", str(models[0]), "--weight-version", "0", "--ready-fd", str(writing)]
    command = [sys.executable, "-m", "rollmesh.engine.embedded", *args]
    process = subprocess.Popen([*command, "--incremental-streaming-output"], pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ready = msgspec.json.decode(pipe.readline(), type=Ready)
    yield ready.address
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)


class Bench:
    """The worker's half of the mesh; the test acts as router and publisher."""

    def __init__(self, engine: str, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        self.engine = engine
        self.view = FleetView()
        self.epoch = 0
        parts = SamplerDeps(
            view=self.view,
            vocab_size=tokenizer.vocab_size,
            report=lambda fault: pytest.fail(f"the engine failed: {fault}"),
            new_matcher=lambda stops: StopStrings(stops, tokenizer.stream()),
        )
        self.sampler = Sampler(parts)
        prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
        self.runtime = Runtime(self.sampler, prompts, 4096)
        self.server = AgentServer(self.runtime, InterceptionConfig(), "policy")
        self.client = aiohttp.ClientSession()
        self.base = ""
        self.streaming = asyncio.Event()
        """Set when a stream has delivered some text."""

    async def start(self) -> None:
        self.base = await self.server.start(listen("127.0.0.1:0"))

    def table(self, phase: EnginePhase, policy_version: int) -> None:
        """The engine table that the router would push."""
        self.epoch += 1
        row = EngineRow(self.engine, "i0", phase, policy_version)
        self.view.update(FleetChanged(self.epoch, (row,)), "router")

    async def update(self, folder: Path, old: int, new: int) -> None:
        """Update the weights as the publisher does: abort, flush, load, continue."""
        self.table(EnginePhase.UPDATING, old)
        async with HttpClient() as http:
            client = SglangBackend(self.engine, http)
            await client.pause("abort")
            await client.flush()
            await client.update_from_disk(folder, new)
            await client.resume()
        self.table(EnginePhase.READY, new)

    async def ask(self, opened: OpenSession, messages: list[Any], **fields: object) -> Any:
        """Make one plain call; return the assistant message."""
        async with self.post(opened, {"messages": messages, **fields}) as response:
            answer = msgspec.json.decode(await response.read())
            assert response.status == 200, answer
            return answer["choices"][0]["message"]

    async def stream(self, opened: OpenSession, messages: list[Any], **fields: object) -> Any:
        """Make one streamed call; return the deltas merged into the assistant message."""
        content = ""
        async with self.post(opened, {"messages": messages, "stream": True, **fields}) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (choice,) = msgspec.json.decode(line[6:])["choices"]
                    content += choice["delta"].get("content", "")
                    if len(content) > 40:
                        self.streaming.set()
        return {"role": "assistant", "content": content}

    def post(self, opened: OpenSession, body: object) -> Any:
        return self.client.post(
            self.base + "/v1/chat/completions",
            data=msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {opened.api_key}"},
        )

    async def close(self) -> None:
        self.runtime.cleanup_group(GROUP)
        await self.client.close()
        await self.server.stop()
        await self.sampler.close()


@pytest.fixture
async def bench(engine: str, models: list[Path]) -> AsyncIterator[Bench]:
    bench = Bench(engine, models[0])
    await bench.start()
    async with HttpClient() as http:
        await SglangBackend(engine, http).update_from_disk(models[0], 0)
    bench.table(EnginePhase.READY, 0)
    yield bench
    await bench.close()


def samples_of(record: SessionRecord) -> list[Sample]:
    """The samples that the intake would cut from a rollout's record."""
    rollout = RolloutRecord(
        index=0,
        outcome=Outcome.COMPLETED,
        reward=1.0,
        nodes=record.nodes,
        engines=record.engines,
        num_tokens=record.token_ids.nbytes // 4,
        num_logprobs=record.logprobs.nbytes // 4,
    )
    return cut(
        GROUP,
        GroupRecord(task=Task("t"), rollouts=[rollout]),
        np.frombuffer(record.token_ids, np.int32),
        np.frombuffer(record.logprobs, np.float32),
        ("main", "subagent", "side"),
    ).samples


def forced_logprobs(folder: Path, token_ids: Any) -> Any:
    """Log-prob of each token after the first, by stock transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logits_TV = model(ids[None]).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    return logprobs_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def assert_exact(sample: Sample, models: list[Path]) -> int:
    """Check that every sampled token has the log-prob of its version's checkpoint; return how
    many.
    """
    for policy_version, folder in enumerate(models):
        mask = sample.loss_mask & (sample.policy_versions == policy_version)
        forced = np.concatenate([[0.0], forced_logprobs(folder, sample.token_ids)])
        assert np.abs(forced - sample.logprobs)[mask].max(initial=0.0) < 1e-3
    return int(sample.loss_mask.sum())


async def test_a_rollout_is_token_exact_across_turns_and_a_weight_update_during_a_turn(
    bench: Bench, models: list[Path]
) -> None:
    opened = bench.runtime.register_trajectory(RolloutId(GROUP, 0), SamplingPolicy(), seed=1)
    messages: list[Any] = [
        {"role": "system", "content": "Guess a number from 1 to 7."},
        {"role": "user", "content": "Guess."},
    ]
    messages.append(await bench.ask(opened, messages, max_tokens=24))
    messages.append({"role": "user", "content": "higher"})
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(bench.stream(opened, messages, max_tokens=600))
        await bench.streaming.wait()
        await bench.update(models[1], 0, 1)
    messages.append(turn.result())
    messages.append({"role": "user", "content": "lower \u00e9\U0001f642"})
    messages.append(await bench.ask(opened, messages, max_tokens=24, tools=None))
    opened.session.seal("done")
    record = opened.session.record()
    (sample,) = samples_of(record)
    assert record.num_forks == 0
    assert set(sample.policy_versions[sample.loss_mask].tolist()) == {0, 1}
    num_sampled = assert_exact(sample, models)
    assert num_sampled == len(array("f", bytes(record.logprobs)))
    contents = [m["content"] for m in msgspec.json.decode(record.messages)]
    assert contents == [m["content"] for m in messages]


async def test_forks_tools_and_retries_are_token_exact_too(
    bench: Bench, models: list[Path]
) -> None:
    opened = bench.runtime.register_trajectory(RolloutId(GROUP, 0), SamplingPolicy(), seed=2)
    user = {"role": "user", "content": "Guess."}
    more = {"role": "user", "content": "higher"}
    first = await bench.ask(opened, [user], max_tokens=16, tools=[TOOL])
    await bench.ask(opened, [user, first, more], max_tokens=16, tools=[TOOL])
    again = await bench.ask(opened, [user, first, more], max_tokens=16, tools=[TOOL])
    edited = {"role": "assistant", "content": "I guess 7"}
    await bench.stream(opened, [user, edited, more], max_tokens=16, tools=[TOOL])
    rewound = {"role": "user", "content": "lower"}
    await bench.ask(opened, [user, first, rewound], max_tokens=16, tools=[TOOL])
    await bench.ask(opened, [user, first, more, again, edited, more], max_tokens=16, tools=[TOOL])
    opened.session.seal("done")
    record = opened.session.record()
    samples = samples_of(record)
    assert len(samples) == 3
    assert [fork.cause for fork in record.forks] == ["edited_history", "rewind"]
    for sample in samples:
        assert assert_exact(sample, models[:1])
