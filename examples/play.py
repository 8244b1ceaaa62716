"""Plays some tasks of an environment against any OpenAI-style endpoint, without a mesh.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.play examples/quiz/mesh.toml -n 4

Reads `env` and `env_settings` of the file, which `rollmesh up` trains with as well. Invariant: it
calls an environment as a worker does, and prints what came of each task on a line of its own.
Driven by people who write an environment.
"""

import argparse
import asyncio
import inspect
import itertools
import os
import sys
from pathlib import Path

from rollmesh.core.config import load_config
from rollmesh.core.errors import AgentFailed, InfraError, UserError
from rollmesh.core.types import Task
from rollmesh.envs.env import Endpoint, Env
from rollmesh.envs.loading import load_env


async def play(env: Env, task: Task, agent: Endpoint) -> str:
    """What came of one task, in a line."""
    try:
        transcript = await env.run(task, agent)
        score = env.score(task, transcript)
        if inspect.isawaitable(score):
            score = await score
    except (AgentFailed, InfraError) as error:
        return f"{task.id}  {type(error).__name__}: {error}"
    metrics = "  ".join(f"{name} {value:g}" for name, value in score.metrics.items())
    outcome = "truncated" if transcript.truncated else "completed"
    return f"{task.id}  {outcome}  reward {score.reward:g}  {metrics}".rstrip()


async def main(options: argparse.Namespace) -> None:
    """The first tasks of the split, one after the other."""
    config = load_config(options.config, options.overrides)
    env = load_env(config.env, config.env_settings)
    agent = Endpoint(
        os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        os.environ.get("OPENAI_API_KEY", "none"),
        os.environ.get("OPENAI_MODEL", "policy"),
    )
    try:
        for task in itertools.islice(env.tasks(options.split, options.seed), options.num_tasks):
            print(await play(env, task, agent), flush=True)
    finally:
        await env.close()


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.play", description="Try an env.")
    parser.add_argument("config", type=Path, help="a mesh.toml with `env` and `env_settings`")
    parser.add_argument("-n", dest="num_tasks", type=int, default=1, help="how many tasks")
    parser.add_argument("--split", default="eval", help="train, eval, or another of the env's own")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the tasks")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))
    except UserError as error:
        sys.exit(f"{error}")
