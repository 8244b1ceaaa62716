"""One client's task from start to account: engine, gateway, session, client, verdict.

In relay mode the chat endpoint behind the gateway is a second gateway, in tokens mode.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.testing.engine import AgentScript, ScriptedAgent, ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from tests.clients.exactness import calls_of, faults, num_extending
from tests.clients.gateway import Gateway, Opened
from tests.clients.harnesses import Command, Visit
from tests.clients.matrix import Ran
from tests.clients.roster import RELAY, STREAM, Row
from tests.clients.script import ANSWER, COMMANDS, REASONINGS, bash, task, write_files

CLIENT_S = 90.0
ROOM = ("--set", "model.max_context_tokens=131072")
"""The test vocabulary makes some 30,000 tokens of opencode's prompt."""


class Ended(NamedTuple):
    """The end of a client's process."""

    code: int
    output: str
    """Output of stdout and stderr, in order."""


Visiting = Callable[[Row, Path, Opened], Awaitable[Ended]]
"""Runs the row's client on the task."""


class Deployment(NamedTuple):
    """A model, its engine and the gateway in front of it."""

    agent: ScriptedAgent
    engine: ScriptedEngine
    gateway: Gateway


def model_folder(folder: Path) -> Path:
    """Write a model with some words of the task as single tokens, so that its texts could be split
    otherwise.
    """
    return write_model_folder(folder, [ANSWER, *COMMANDS, *REASONINGS] * 9)


@contextlib.asynccontextmanager
async def open_deployment(
    folder: Path, script: AgentScript, *options: str
) -> AsyncIterator[Deployment]:
    """A stage whose model follows `script`; `options` go to the gateway."""
    model = model_folder(folder)
    agent = ScriptedAgent(load_tokenizer(model), script)
    async with (
        ScriptedEngine(agent.next_token) as engine,
        Gateway(
            folder / "token", engine.url, "--model-dir", str(model), *ROOM, *options
        ) as gateway,
    ):
        yield Deployment(agent, engine, gateway)


async def perform(row: Row, folder: Path) -> Ran:
    """Run the row's task in `folder`; AssertionError names in a line what is wrong."""
    script = task(row.client.use, row.client.ending)
    async with open_deployment(folder / "model", script) as deployment:
        return await perform_on(deployment, row, folder, start)


async def perform_on(deployment: Deployment, row: Row, folder: Path, visit: Visiting) -> Ran:
    """Like `perform`, on a deployment that has the row's script, and may have played it before."""
    deployment.engine.seen.clear()
    opened = await deployment.gateway.open(metadata={"client": row.id})
    if row.capture == RELAY:
        return await _perform_relayed(row, folder, deployment, opened)
    ended = await visit(row, folder, opened)
    account = await deployment.gateway.finish(opened)
    check_what_it_saw(row, ended)
    return judge(row, deployment, account)


async def _perform_relayed(row: Row, folder: Path, deployment: Deployment, behind: Opened) -> Ran:
    """`behind` is the endpoint's session; its account must be exact, the relay's need not be."""
    token_file = folder / "relay-token"
    async with Gateway(token_file, behind.path_url, "--capture", RELAY) as relay:
        opened = await relay.open()
        ended = await start(row, folder, opened)
        account = await relay.finish(opened)
    check_what_it_saw(row, ended)
    ran = judge(row, deployment, await deployment.gateway.finish(behind))
    num_relayed = account["num_calls"]
    assert num_relayed == ran.num_calls, f"{num_relayed} of {ran.num_calls} calls were relayed"
    kept = [choice["message"] for call in account["calls"] for choice in call["choices"]]
    assert ANSWER in json.dumps(kept, ensure_ascii=False), f"the relay kept {kept}"
    return ran._replace(forks=Counter(), healed=Counter())


async def start(row: Row, folder: Path, opened: Opened) -> Ended:
    """Run the row's client as a process."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    write_files(work)
    command = row.client.start(
        Visit(home, work, opened.base_url, opened.api_key, row.dialect, row.mode == STREAM)
    )
    return await run(command, work)


async def run(command: Command, work: Path) -> Ended:
    """Run a command; kill it when it takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command.argv,
        cwd=work,
        env=command.env,
        start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # agents have children
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"))


def check_what_it_saw(row: Row, ended: Ended) -> None:
    """AssertionError if the client failed, or did not see the model's output."""
    assert ended.code == 0, f"exit {ended.code}: {ended.output[-2000:]}"
    if row.client.reports:
        report = json.loads(ended.output.splitlines()[-1])
        wanted = [["bash", json.loads(bash(command).arguments)] for command in COMMANDS]
        assert report["final"] == ANSWER, report["final"]
        # Two calls of one turn may run in either order.
        assert sorted(report["calls"], key=str) == sorted(wanted, key=str), report["calls"]
        if row.client.sees_reasoning:
            assert [*filter(None, report["reasoning"])] == [*filter(None, REASONINGS)]
    else:
        assert ANSWER in ended.output, ended.output[-2000:]


def judge(row: Row, deployment: Deployment, account: dict[str, Any]) -> Ran:
    """Return the outcome; AssertionError if the account is not exact."""
    calls = calls_of(deployment.engine, deployment.agent)
    found = faults(calls, account["samples"], deployment.agent)
    assert not found, "; ".join(found)
    forks = Counter(fork["cause"] for fork in account["forks"])
    num_extended = num_extending(calls)
    assert len(calls) == 3 + row.client.num_asides, f"{len(calls)} calls"
    assert num_extended == 2, f"{num_extended} of the task's last two calls extend the one before"
    # An aside before anything was sampled leaves no line from which the task could fork.
    assert forks.total() <= row.client.num_asides, f"forks: {dict(forks)}"
    return Ran(row, len(calls), num_extended, forks, account["healed"])
