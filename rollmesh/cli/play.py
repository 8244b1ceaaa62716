"""`rollmesh play [ENV]`: run tasks of an environment and print each conversation and its score.

Model calls go to an OpenAI-style endpoint (--base-url), to SGLang (--engine), or to the embedded
engine, which serves --model-dir or else a tiny model that is made for it.
"""

# ruff: noqa: PLC0415 - what an environment needs is imported after the arguments are checked

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmesh.cli.files import write_demo_model
from rollmesh.cli.local_client import (
    ThirdPartyEndpoint,
    add_upstream,
    child,
    gateway,
    relay,
    upstream_of,
)
from rollmesh.cli.options import (
    add_model_dir,
    add_set,
    config_of,
    model_defaults,
    parser,
    quoted,
    set_model,
)
from rollmesh.core.config import Config
from rollmesh.core.errors import UserError
from rollmesh.core.model_folders import why_no_model
from rollmesh.core.process import FAILED, OK
from rollmesh.core.text import printable, printable_lines
from rollmesh.core.types import TRAINED_OUTCOMES, Task
from rollmesh.envs.env import Env, close_pool
from rollmesh.envs.isolation import isolate_programs
from rollmesh.envs.loading import load_env
from rollmesh.envs.program import forward_to
from rollmesh.serve.client.evaluation_files import EvaluationPlan, pose
from rollmesh.serve.client.gateway import Gateway

if TYPE_CHECKING:
    from rollmesh.cli.local_client import LocalRollout, LocalRollouts

MODEL_NAME = "policy"
CALLS = ("tool_use", "function_call", "custom_tool_call")
"""Types of content parts that are calls, in the Messages and the Responses API."""


def main(argv: list[str]) -> int:
    """Play; return exit code 1 if a rollout failed."""
    options = arguments().parse_args(argv)
    if options.base_url and (options.engine or options.model_dir):
        raise UserError("--base-url: excludes --engine and --model-dir; leave them out")
    if options.engine and not options.model_dir:
        raise UserError("--engine: needs --model-dir, which renders the prompts")
    if options.env:
        options.overrides.append(f"env={quoted(options.env)}")
    set_model(options)
    config = config_of(options, model_defaults(options))
    if options.model_dir and (why := why_no_model(str(options.model_dir))):
        raise UserError(f"--model-dir {options.model_dir}: {why}")
    env = load_env(config.env, config.env_settings)
    tasks = pose(env, plan_of(config, options))
    upstream = upstream_of(options)
    with sessions(options, config, upstream) as found:
        return asyncio.run(play(env, tasks, found, config, upstream))


def arguments() -> argparse.ArgumentParser:
    """Return the verb's parser."""
    found = parser(
        "play", "Run tasks of an environment, and print each conversation and its score."
    )
    found.add_argument(
        "env", nargs="?", help="a built-in name or package.module:Class (default: env of --config)"
    )
    found.add_argument(
        "-n", dest="num_tasks", type=int, default=1, help="number of tasks (default: 1)"
    )
    found.add_argument("--split", default="eval", help="split of the tasks (default: %(default)s)")
    add_upstream(found)
    found.add_argument(
        "--engine", metavar="URL", help="SGLang server with the model of --model-dir"
    )
    add_model_dir(found)
    found.add_argument("--config", type=Path, help="mesh.toml, for env_settings and the rest")
    add_set(found)
    return found


def plan_of(config: Config, options: argparse.Namespace) -> EvaluationPlan:
    """Return the tasks to play; UserError if there are none."""
    if options.num_tasks < 1:
        raise UserError(f"-n {options.num_tasks}: must be at least 1")
    return EvaluationPlan(
        env=config.env,
        env_settings=config.env_settings,
        model="",
        split=options.split,
        num_tasks=options.num_tasks,
        num_samples=1,
        seed=config.run.seed,
        sampling=config.sampling.eval_policy(),
    )


@contextmanager
def sessions(
    options: argparse.Namespace, config: Config, upstream: ThirdPartyEndpoint | None
) -> Iterator[Gateway]:
    """Yield a gateway for the chosen model."""
    with ExitStack() as stack:
        if upstream:
            yield stack.enter_context(relay(upstream))
            return
        model, url = options.model_dir, options.engine
        if not model:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollmesh-"))
            model = Path(folder) / "tiny-model"
            print(
                "no model named: writing the demo's tiny model, which takes some seconds",
                flush=True,
            )
            write_demo_model(model, config.run.seed)
        if not url:
            more = ("--run-folder", stack.enter_context(tempfile.TemporaryDirectory()))
            words = ("--model-dir", str(model), "--incremental-streaming-output", *more)
            url = stack.enter_context(child("engine", words)).address
        tokens = f"sampling.max_tokens={config.sampling.max_tokens}"
        serving = ("--engine", url, "--model-dir", str(model), "--set", tokens)
        yield stack.enter_context(gateway(serving))


async def play(
    env: Env, tasks: list[Task], found: Gateway, config: Config, upstream: ThirdPartyEndpoint | None
) -> int:
    """Play the tasks one after the other; return the exit code."""
    from rollmesh.cli.local_client import LocalRollouts

    isolate_programs(config.worker, forward_to(found.url))
    model, is_relay = (upstream.model, True) if upstream else (MODEL_NAME, False)
    rollouts = LocalRollouts(env, found, model, config.worker, is_relay=is_relay)
    seeds = random.Random(f"play/{config.run.seed}")
    try:
        played = [await play_one(rollouts, task, seeds.getrandbits(63)) for task in tasks]
    finally:
        await env.close()
        await close_pool()
    is_fine = all(each.record.outcome in TRAINED_OUTCOMES for each in played)
    return OK if is_fine else FAILED


async def play_one(rollouts: "LocalRollouts", task: Task, seed: int) -> "LocalRollout":
    """Play one task and print it."""
    print(f"=== task {printable(task.id)}", flush=True)
    played = await rollouts.play(task, 0, seed)
    for message in msgspec.json.decode(played.record.messages):
        print(printable_lines("\n".join(message_lines(message))))
    record = played.record
    words = [f"=== {record.outcome}", *([f": {record.error}"] if record.error else [])]
    words += [f", reward {record.reward:g}"] if record.reward is not None else []
    words += [f", {name} {value:g}" for name, value in record.metrics.items()]
    print(printable("".join(words)), flush=True)
    return played


def message_lines(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message as lines: its role, its text, and its tool calls."""
    role = message.get("role") or message.get("type", "message")
    content, calls = message.get("content"), list(message.get("tool_calls") or [])
    if isinstance(content, list):
        calls += [part for part in content if part.get("type") in CALLS]
        content = "\n".join(part_text(part) for part in content if part.get("type") not in CALLS)
    calls += [message] if message.get("type") in CALLS else []
    if reasoning := message.get("reasoning_content"):
        yield f"{role} thinks: {reasoning}"
    if content or not calls:
        yield f"{role}: {content or ''}"
    for call in calls:
        yield f"{role} calls: {call_text(call)}"


def part_text(part: Mapping[str, Any]) -> str:
    """Return the text of a content part: its text, a tool's result, or the name of its type."""
    if isinstance(part.get("text"), str):
        return str(part["text"])
    result = part.get("content")
    if isinstance(result, list):
        return "\n".join(map(part_text, result))
    return result if isinstance(result, str) else f"[{part.get('type')}]"


def call_text(call: Mapping[str, Any]) -> str:
    """Format a call of any API as `search(query="red", limit=3)`; broken arguments are shown as
    they are.
    """
    called = call.get("function") or call.get("custom") or call
    given = called.get("arguments", called.get("input")) or {}
    if isinstance(given, str):
        with contextlib.suppress(msgspec.DecodeError):
            given = msgspec.json.decode(given)
    if isinstance(given, dict):
        pairs = ((name, msgspec.json.encode(value).decode()) for name, value in given.items())
        given = ", ".join(f"{name}={value}" for name, value in pairs)
    return f"{called.get('name', '?')}({given})"
