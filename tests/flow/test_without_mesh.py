"""`rollmesh play` and `rollmesh eval --base-url`: an environment against an endpoint, without a
mesh.
"""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest

from rollmesh.serve.client.evaluation_files import RESULTS, Row
from rollmesh.serve.client.trajectories import TRAJECTORIES
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.upstreams import ChatAnswer, ChatEndpoint, ChatRequestSeen
from tests.flow.gateway_process import next_token

WITHIN_S = 60.0


async def rollmesh(folder: Path, *args: str, **variables: str) -> tuple[int, str, str]:
    """Run a verb; return its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollmesh.cli.main",
        *args,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def binary_search(seen: ChatRequestSeen) -> ChatAnswer:
    """A player that always wins."""
    low, high = 1, 7
    messages = seen.body["messages"]
    for reply, hint in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(reply["content"])
        low, high = (guess + 1, high) if hint["content"] == "higher" else (low, guess - 1)
    return ChatAnswer(str((low + high) // 2))


async def test_any_endpoint_is_evaluated(tmp_path: Path) -> None:
    async with ChatEndpoint(binary_search) as served:
        args = ["--base-url", served.endpoint.base_url, "--model", "theirs"]
        args += ["--api-key-env", "THEIR_KEY", "--env", "guess", "-n", "2", "--num-tasks", "7"]
        code, out, err = await rollmesh(tmp_path, "eval", *args, THEIR_KEY="sk-theirs")
    assert code == 0, err
    assert out.startswith("guess: 14 rollouts of 7 tasks")
    lines = (tmp_path / "runs/eval" / RESULTS).read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=Row) for line in lines]
    assert [row.reward for row in rows] == [1.0] * 14
    assert all(row.num_calls == row.metrics["num_guesses"] for row in rows)
    lines = (tmp_path / "runs/eval" / TRAJECTORIES).read_bytes().splitlines()
    first = msgspec.json.decode(lines[0])
    assert len(lines) == 14
    assert [each["role"] for each in first["messages"][:2]] == ["user", "assistant"]
    assert {each.body["model"] for each in served.requests} == {"theirs"}
    assert {each.headers["Authorization"] for each in served.requests} == {"Bearer sk-theirs"}


async def test_an_endpoint_that_fails_gives_no_reward_and_resume_repeats_its_task(
    tmp_path: Path,
) -> None:
    is_down = True

    def script(seen: ChatRequestSeen) -> ChatAnswer:
        return ChatAnswer(status=401, body=b"{}") if is_down else binary_search(seen)

    async with ChatEndpoint(script) as served:
        args = ["--base-url", served.endpoint.base_url, "--model", "theirs"]
        args += ["--env", "guess", "--num-tasks", "3", "--set", "worker.num_infra_retries=0"]
        code, _, err = await rollmesh(tmp_path, "eval", *args)
        assert code == 1
        assert "every rollout failed (3), most with infra_error" in err
        is_down = False
        again = await rollmesh(tmp_path, "eval", *args, "--resume")
    assert again[0] == 0, again[2]
    assert again[1].startswith("guess: 3 rollouts of 3 tasks")


async def test_a_task_is_played_and_the_conversation_printed(tmp_path: Path) -> None:
    async with ChatEndpoint(binary_search) as served:
        args = ["--base-url", served.endpoint.base_url]
        code, out, err = await rollmesh(tmp_path, "play", "guess", *args, "-n", "2")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("=== task guess-")
    assert lines[1:3] == [
        "user: Guess my number from 1 to 7. You have 3 guesses.",
        "assistant: 4",
    ]
    assert [line for line in lines if line.startswith("=== completed, reward 1, num_guesses ")]
    assert out.count("=== task ") == 2
    assert {each.body["model"] for each in served.requests} == {"policy"}  # the one that it lists


async def test_a_task_is_played_against_an_engine(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    (model / "model.safetensors").touch()
    async with ScriptedEngine(next_token) as engine:
        args = ["--engine", engine.url, "--model-dir", "model"]
        code, out, err = await rollmesh(tmp_path, "play", "guess", *args)
    assert code == 0, err
    assert "user: Guess my number" in out
    assert "=== completed, reward 0, num_guesses 3, num_unparsed 3" in out


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_without_a_model_a_tiny_one_is_made_and_played(tmp_path: Path) -> None:
    code, out, err = await rollmesh(tmp_path, "play", "guess")
    assert code == 0, err
    assert "=== completed, reward " in out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["play", "guess", "--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["play", "guess", "--engine", "http://h:1"], "--engine: needs --model-dir"),
        (["play", "gues"], "did you mean 'guess'?"),
        (["eval", "--base-url", "http://h:1", "--engine", "http://h:2"], "leave them out"),
        (["eval", "--base-url", "http://127.0.0.1:9", "--env", "guess"], "does not answer"),
        (["eval", "--model", "gpt", "--env", "guess"], "--model gpt: needs --base-url"),
        (
            ["eval", "--base-url", "http://h:1", "--api-key-env", "NO_SUCH"],
            "--api-key-env NO_SUCH: the variable is not set",
        ),
    ],
)
async def test_a_mistake_is_a_one_line_error(tmp_path: Path, args: list[str], message: str) -> None:
    code, _, err = await rollmesh(tmp_path, *args)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
