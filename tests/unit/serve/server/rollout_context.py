"""A worker context without a model or an engine: sessions are real, and served if a test wants."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rollmesh.core.config import InterceptionConfig, WorkerConfig
from rollmesh.core.process import listen
from rollmesh.core.types import SamplingPolicy, Score, Task
from rollmesh.envs.calls import EnvCalls
from rollmesh.envs.env import Endpoint, Env, Transcript
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.serve.server.rollouts import WorkerContext
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.sampler import ScriptedSampler
from rollmesh.wire.messages import GroupAsk

ASK = GroupAsk(task=Task(id="t", data={"n": 1}), sampling=SamplingPolicy(), seed=5)

Step = Callable[[Endpoint], Awaitable[Transcript]]


class ScriptedEnv(Env):
    """Each run takes the next step of the script, and repeats the last one."""

    def __init__(self, *steps: Step | Exception | Transcript, reward: float = 1.0) -> None:
        self._steps = list(steps)
        self.reward = reward
        self.agents: list[Endpoint] = []
        self.score_fault: Exception | None = None

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        del split, seed
        yield ASK.task

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        del task
        self.agents.append(agent)
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, Transcript) else await step(agent)

    def score(self, task: Task, transcript: Transcript) -> Score:
        del task, transcript
        if self.score_fault:
            raise self.score_fault
        return Score(self.reward, {"played": 1.0})


def new_context(
    folder: Path, env: Env, sampler: ScriptedSampler | None = None, **settings: float | str
) -> WorkerContext:
    """Create the context of a worker; `settings` are those of WorkerConfig."""
    tokenizer = load_tokenizer(write_model_folder(folder))
    prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    runtime = Runtime(sampler or ScriptedSampler(), prompts, max_context_tokens=100)
    config = WorkerConfig(**settings)  # type: ignore[arg-type]
    return WorkerContext(
        env, runtime, "http://edge/v1", "policy", config, FakeClock(), EnvCalls(grace_s=0.01)
    )


def sampler_answering(folder: Path, text: str) -> ScriptedSampler:
    """Return a sampler that always answers `text`, for the model in `folder`."""
    token_ids = load_tokenizer(write_model_folder(folder)).encode(text + "<|im_end|>")
    return ScriptedSampler(lambda _: token_ids)


@asynccontextmanager
async def served(context: WorkerContext) -> AsyncIterator[tuple[WorkerContext, AgentServer]]:
    """Serve the context's sessions on a free port."""
    server = AgentServer(context.runtime, InterceptionConfig(), "policy")
    base = await server.start(listen("127.0.0.1:0"))
    try:
        yield msgspec.structs.replace(context, base_url=f"{base}/v1"), server
    finally:
        await context.env.close()
        await server.stop()
