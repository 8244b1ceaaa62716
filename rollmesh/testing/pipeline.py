"""A pipeline in its own process, without torch: hooks, router, coordinator and scripted engines.

    python -m rollmesh.testing.pipeline --scheduler tcp://127.0.0.1:9000 --pipeline p0 --steps 5

- Each step signals its demand, samples rollouts on the awake engines, trains (a pause) on its
  cluster, and releases it. Each step prints a line of JSON, and the end prints another.
- The process fails unless every sampled token is exact, whichever engines slept meanwhile.
- Another process registers the pipeline; this one waits for that.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollmesh.core.errors import UserError
from rollmesh.core.process import LAUNCHER_VARIABLE, Ready
from rollmesh.core.types import SamplingParams
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.events import GenerationRequest
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.serve.coordinator.hooks import GpuTicket, PipelineHooks
from rollmesh.testing.engine import ScriptedEngine, endless_token
from rollmesh.wire.fleet import FleetAnswered, FleetChanged, ReadFleet
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, read_keys
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority
from rollmesh.wire.sockets import Dialer

TRAIN = "actor_train"
LOOK_S = 0.05
AGAIN_S = 0.5
"""Delay before a request that was refused because the pipeline is not yet admitted is repeated."""
SIGMA = 0.8
PROMPT = [5, 6, 7, 8]
TO_THE_END = 2**31
STOP_S = 20.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline's work; each field is an option of the command."""

    scheduler: str
    """Address of the scheduler."""
    pipeline: str
    """Name of the pipeline at the scheduler."""
    pipeline_token: str = ""
    """File with the pipeline's token; '': as found by core/share.py."""
    engines: int = 4
    steps: int = 5
    rollouts: int = 8
    tokens: int = 60
    """Median tokens of a rollout; a few rollouts are much longer."""
    train_s: float = 0.1
    hang_at: int = -1
    """Step from which engine 0 no longer answers."""


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Output line of a finished step."""

    pipeline: str
    step: int
    num_tokens: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Output line of the end of the process."""

    pipeline: str
    num_steps: int
    num_requests: int
    """Engine requests; more than rollouts if some were cut and continued on another engine."""


class HangingEngine(ScriptedEngine):
    """A scripted engine that can stop answering."""

    is_hung = False

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.is_hung:
            await asyncio.get_running_loop().create_future()
        return await super()._handle(request)


@contextmanager
def running(*words: str) -> Iterator[Ready]:
    """Run `rollmesh WORDS` as a child, from its readiness to the end of the block."""
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "rollmesh.cli.main", *words, "--ready-fd", str(writing)]
    # the child ends with this process, however that ends
    env = {**os.environ, LAUNCHER_VARIABLE: str(os.getpid())}
    child = subprocess.Popen(argv, pass_fds=[writing], env=env)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            yield msgspec.json.decode(pipe.readline(), type=Ready)
    finally:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Rollouts:
    """Samples turns on the engines of the router's table."""

    def __init__(self, router: str, plan: Plan) -> None:
        self.num_requests = 0
        self._plan = plan
        self._view = FleetView()
        self._dialer = Dialer(router, f"rollouts-{plan.pipeline}", read_keys(role=Role.PUBLISHER))
        self._sampler = Sampler(
            SamplerDeps(view=self._view, vocab_size=TO_THE_END, report=lambda _: None)
        )
        self._dice = random.Random(plan.pipeline)

    async def read_table(self) -> None:
        """Poll the router's table until cancelled."""
        for ask_id in range(1, TO_THE_END):
            self._dialer.send(Packet(ReadFleet(ask_id)))
            for packet in self._dialer.receive():
                if isinstance(packet.message, FleetAnswered):
                    table = FleetChanged(packet.message.epoch, packet.message.engines)
                    self._view.update(table, packet.router)
            await asyncio.sleep(LOOK_S)

    async def sample(self, step: int, number: int) -> int:
        """Sample one rollout; return its number of tokens."""
        length = max(4, round(self._plan.tokens * self._dice.lognormvariate(0.0, SIGMA)))
        prompt = [*PROMPT, step, number]
        generation = self._sampler.start(
            GenerationRequest(
                generation_id=f"{step}.{number}",
                session_key=f"{step}.{number}",
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=length),
            )
        )
        generation.join()
        await generation.wait(TO_THE_END)
        assert generation.state is GenerationState.COMMITTED, generation.error
        self.num_requests += len(generation.engines)
        expected: list[int] = []
        for _ in range(length):
            expected.append(endless_token(0, prompt + expected))
        assert list(generation.token_ids) == expected, "tokens are not exact"
        return length

    async def close(self) -> None:
        await self._sampler.close()
        self._dialer.close()


class Pipeline:
    """The steps of a pipeline: generate, train, release."""

    def __init__(self, plan: Plan, hooks: PipelineHooks, engines: list[HangingEngine]) -> None:
        self._plan = plan
        self._hooks = hooks
        self._engines = engines

    async def run(self, rollouts: Rollouts) -> None:
        """Run all steps, then release the GPUs."""
        plan, hooks = self._plan, self._hooks
        for step in range(plan.steps):
            if step == plan.hang_at:
                self._engines[0].is_hung = True
            await self._granted(
                lambda step=step: hooks.request_gpus(
                    GENERATION_CLUSTER, GpuPriority.GENERATION, step, plan.rollouts
                )
            )
            hooks.begin_progress_batch(plan.rollouts)
            each = [self._rollout(rollouts, step, number) for number in range(plan.rollouts)]
            num_tokens = sum(await asyncio.gather(*each))
            hooks.end_progress_batch()
            await self._granted(
                lambda step=step: hooks.request_gpus(TRAIN, GpuPriority.ACTOR_TRAINING, step)
            )
            await asyncio.sleep(plan.train_s)
            await self._granted(lambda step=step: hooks.notify_release_gpus(TRAIN, step))
            print_line(StepDone(plan.pipeline, step, num_tokens))
        await self._granted(lambda: hooks.notify_release_gpus(GENERATION_CLUSTER))
        print_line(Ended(plan.pipeline, plan.steps, rollouts.num_requests))

    async def _rollout(self, rollouts: Rollouts, step: int, number: int) -> int:
        num_tokens = await rollouts.sample(step, number)
        self._hooks.bump_completed()
        return num_tokens

    async def _granted(self, ask: Any) -> None:
        while True:
            ticket: GpuTicket = ask()
            try:
                await asyncio.to_thread(ticket.wait)
            except UserError:  # the pipeline is not registered yet
                await asyncio.sleep(AGAIN_S)
            else:
                return


def print_line(line: StepDone | Ended) -> None:
    """Print a line for the parent process."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


async def run(plan: Plan, folder: Path) -> None:
    """Run the pipeline, including its children."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(HangingEngine(endless_token))
            for _ in range(plan.engines)
        ]
        urls = [arg for engine in engines for arg in ("--engine", engine.url)]
        settings = ["--set", f"run.folder={folder}", "--set", "router.bind=tcp://127.0.0.1:0"]
        router = stack.enter_context(
            running("router", *settings, *urls, "--fixed-weights", "--asleep")
        ).address
        words = ["--scheduler", plan.scheduler, "--pipeline", plan.pipeline, "--router", router]
        words += ["--weights", str(folder / "weights")]
        words += ["--pipeline-token", plan.pipeline_token] * bool(plan.pipeline_token)
        stack.enter_context(running("coordinator", *settings, *words, *urls))
        rollouts = Rollouts(router, plan)
        stack.push_async_callback(rollouts.close)
        hooks = PipelineHooks(plan.scheduler, plan.pipeline, token_file=plan.pipeline_token)
        stack.enter_context(closing(hooks))
        reading = asyncio.create_task(rollouts.read_table())
        await Pipeline(plan, hooks, engines).run(rollouts)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A scripted pipeline on a shared fleet.")
    for field in msgspec.structs.fields(Plan):
        is_needed = field.default is msgspec.NODEFAULT
        default = None if is_needed else field.default
        kind = str if is_needed else type(field.default)
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, required=is_needed)
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(plan, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
