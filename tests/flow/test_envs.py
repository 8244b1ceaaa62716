"""The examples against real sessions: each wins by its script, and by its README's command."""

import asyncio
import contextlib
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from examples.words.server import WordGame
from rollmesh.core.config import InterceptionConfig, load_config
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import listen
from rollmesh.core.types import SamplingPolicy, Score
from rollmesh.engine.view import FleetView
from rollmesh.envs.env import Endpoint, Env
from rollmesh.envs.loading import load_env
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.session import SessionRecord
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.serve.client.evaluation_files import RESULTS, Row
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.testing.engine import AgentReply, AgentScript, ScriptedAgent, ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.openenv_server import OpenEnvServer
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from tests.flow import example_scripts as scripts
from tests.house.leaks import MARK_VARIABLE

REPO = Path(__file__).resolve().parents[2]
MAX_CONTEXT_TOKENS = 100_000
GROUP = GroupId("examples", 0)
SMALL = ("env_settings.agent=small",)


class Example(NamedTuple):
    """An example and the script of its model."""

    name: str
    script: AgentScript
    overrides: tuple[str, ...] = ()
    num_calls: int = 0
    """Number of turns of its first task; 0: any."""


EXAMPLES = [
    Example("quiz", scripts.quiz, num_calls=1),
    Example("bank", scripts.bank, num_calls=3),
    Example("lake", scripts.lake, num_calls=6),
    Example("words", scripts.words),
    Example("bugs", scripts.bugs, SMALL, num_calls=3),
]


class RolloutSessions:
    """Sessions over a real agent server and a scripted engine; the test acts as the worker."""

    def __init__(self, runtime: Runtime, base_url: str) -> None:
        self._runtime = runtime
        self._base_url = base_url
        self._indices = itertools.count()

    def open(self) -> tuple[Endpoint, Callable[[], SessionRecord]]:
        """Open a session; return its agent's endpoint and the function that ends it."""
        rollout_id = RolloutId(GROUP, next(self._indices))
        opened = self._runtime.register_trajectory(rollout_id, SamplingPolicy(), seed=1)

        def finish() -> SessionRecord:
            opened.session.seal("the rollout has ended")
            return opened.session.record()

        return Endpoint(self._base_url, opened.api_key, "policy"), finish

    async def play(self, env: Env, number: int) -> tuple[Score, SessionRecord]:
        """Run the env's task of that number once."""
        task = next(itertools.islice(env.tasks("eval", 0), number, None))
        agent, finish = self.open()
        transcript = await env.run(task, agent)
        assert not transcript.truncated
        score = env.score(task, transcript)
        return (score if isinstance(score, Score) else await score), finish()


@contextlib.asynccontextmanager
async def open_sessions(
    folder: Path, script: AgentScript, max_context_tokens: int = MAX_CONTEXT_TOKENS
) -> AsyncIterator[RolloutSessions]:
    """Sessions whose model follows the script."""
    tokenizer = load_tokenizer(write_model_folder(folder))
    agent = ScriptedAgent(tokenizer, script)
    async with ScriptedEngine(agent.next_token) as engine:
        view = FleetView()
        row = EngineRow(engine.url, "i0", EnginePhase.READY, 0)
        view.update(FleetChanged(0, (row,)), "router")
        sampler = Sampler(SamplerDeps(view=view, vocab_size=tokenizer.vocab_size, report=print))
        prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
        runtime = Runtime(sampler, prompts, max_context_tokens)
        edge = AgentServer(runtime, InterceptionConfig(), "policy")
        address = await edge.start(listen("127.0.0.1:0"))
        try:
            yield RolloutSessions(runtime, f"{address}/v1")
        finally:
            runtime.cleanup_group(GROUP)
            await edge.stop()
            await sampler.close()


@contextlib.asynccontextmanager
async def game_server(example: Example) -> AsyncIterator[tuple[str, ...]]:
    """Settings of the example, with the address of a server if it needs one."""
    if example.name != "words":
        yield example.overrides
        return
    async with OpenEnvServer(WordGame) as server:
        yield (*example.overrides, f"env_settings.url={server.url}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
async def test_example_wins_and_every_turn_extends_the_sampled_tokens(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    async with (
        open_sessions(tmp_path, example.script) as sessions,
        game_server(example) as overrides,
    ):
        config = load_config(REPO / f"examples/{example.name}/mesh.toml", [*overrides])
        env = load_env(config.env, config.env_settings)
        try:
            score, record = await sessions.play(env, 0)
            others = await asyncio.gather(*(sessions.play(env, number) for number in (1, 2)))
        finally:
            await env.close()
    assert score.reward == 1.0
    assert [each.reward for each, _ in others] == [1.0, 1.0]
    assert record.num_calls == (example.num_calls or record.num_calls)
    for each in (record, *(other for _, other in others)):
        assert (each.num_forks, each.healed) == (0, {})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
async def test_the_readmes_command_runs(example: Example, tmp_path: Path) -> None:
    readme = (REPO / f"examples/{example.name}/README.md").read_text()
    (command,) = re.findall(r"rollmesh (play .+)", readme)
    async with (
        open_sessions(tmp_path, example.script) as sessions,
        game_server(example) as overrides,
    ):
        agent, finish = sessions.open()
        here = command.replace("http://127.0.0.1:8000/v1", agent.base_url)
        output = await printed(agent, here, *with_set(overrides))
        finish()
    assert output.count("\n=== completed, reward 1") == 4, output


async def test_a_conversation_past_the_context_is_truncated_and_scored(tmp_path: Path) -> None:
    make = {"is_slippery": False, "render_mode": "ansi"}
    env = load_env("gym", {"env_id": "FrozenLake-v1", "make": make, "max_tokens": 8})
    task = next(env.tasks("eval", 0))
    async with open_sessions(tmp_path, lambda _: AgentReply("0"), 300) as sessions:
        agent, finish = sessions.open()
        transcript = await env.run(task, agent)
        record = finish()
        await env.close()
    assert transcript.truncated
    assert 1 <= transcript.data["num_turns"] == record.num_calls < 64
    score = env.score(task, transcript)
    assert (await score if not isinstance(score, Score) else score).reward == 0.0


async def test_a_mesh_runs_command_line_agents_and_leaves_nothing_of_them(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    (
        folder / "model.safetensors"
    ).touch()  # the command checks that the file exists; the engine is scripted
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    agent = ScriptedAgent(load_tokenizer(folder), scripts.bugs)
    async with ScriptedEngine(agent.next_token) as engine:
        process = await start(
            *("-m", "rollmesh.cli.main", "eval", "--config", "examples/bugs/mesh.toml"),
            *("--model-dir", str(folder), "--engine", engine.url, "--out", str(tmp_path / "out")),
            *("-n", "2", "--num-tasks", "3"),
            *with_set((*SMALL, f"model.max_context_tokens={MAX_CONTEXT_TOKENS}")),
            TMPDIR=str(scratch),
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    lines = await asyncio.to_thread((tmp_path / "out" / RESULTS).read_bytes)
    rows = [msgspec.json.decode(line, type=Row) for line in lines.splitlines()]
    assert [(row.outcome, row.reward, row.num_calls) for row in rows] == [("completed", 1.0, 3)] * 6
    assert os.listdir(scratch) == []


async def test_the_word_games_server_starts_by_its_readmes_command() -> None:
    readme = (REPO / "examples/words/README.md").read_text()
    (command,) = re.findall(r"python (-m examples\.words\.server) --port 8765 &", readme)
    process = await start(*command.split(), "--port", "0")
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", line.decode())
    finally:
        process.terminate()
        await process.communicate()


def with_set(overrides: tuple[str, ...]) -> list[str]:
    """The overrides as command-line arguments."""
    return [arg for override in overrides for arg in ("--set", override)]


async def printed(agent: Endpoint, command: str, *more: str) -> str:
    """Output of a `rollmesh` command whose endpoint is the agent's."""
    args = ("-m", "rollmesh.cli.main", *command.split(), "--model", agent.model, *more)
    process = await start(*args, ROLLMESH_UPSTREAM_KEY=agent.api_key)
    output, _ = await process.communicate()
    return output.decode()


async def start(*args: str, **variables: str) -> asyncio.subprocess.Process:
    """Run Python in the root of the repository."""
    kept = {name: os.environ[name] for name in ("PATH", MARK_VARIABLE)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *args),
        cwd=REPO,
        env={**kept, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
