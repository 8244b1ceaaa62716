"""A real gateway process between real sockets: driven as its README section drives it."""

import asyncio
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from rollmesh.core.process import Ready, listen
from rollmesh.testing.engine import ScriptedEngine, endless_token, logprob_of
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.testing.provider import ScriptedProvider, Told
from tests.house.source import ROOT
from tests.unit.serve.interception.relay.test_account import ask, tell

PATIENCE_S = 20.0
CONTEXT_TOKENS = 200


def argv_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "rollmesh.cli.main", "gateway", *words]


def next_token(policy_version: int, context: Sequence[int]) -> int:
    """Never ends a turn, and never leaves the test's vocabulary of bytes."""
    return endless_token(policy_version, context) % 250


class Gateway:
    """A running one, and its admin's side."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, token: str) -> None:
        self.process = process
        self.address = address
        self.token = token
        self.client = aiohttp.ClientSession()

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        raw = None if body is None else msgspec.json.encode(body)
        url = self.address + path
        async with self.client.request(method, url, data=raw, headers=headers) as response:
            answer = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, orjson.loads(answer) if is_json else answer.decode()

    async def open(self, **body: Any) -> dict[str, str]:
        status, opened = await self.admin("POST", "/admin/sessions", body)
        assert status == 201
        return dict(opened)

    async def call(self, opened: dict[str, str], body: Any, **headers: str) -> tuple[int, Any]:
        auth = {"Authorization": f"Bearer {opened['api_key']}", **headers}
        url = opened["base_url"] + "/chat/completions"
        async with self.client.post(url, data=msgspec.json.encode(body), headers=auth) as response:
            return response.status, orjson.loads(await response.read())

    async def until_ready(self) -> None:
        """Until some engine is; the gateway is asked again and again, since nothing is told."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.admin("GET", "/healthz"))[1]["status"] != "ok":
                pass


@asynccontextmanager
async def serving(folder: Path, *words: str) -> AsyncIterator[Gateway]:
    reading, writing = os.pipe()
    token_file = folder / "token"
    fixed = ["--port", "0", "--admin-token-file", str(token_file), "--ready-fd", str(writing)]
    settings = ["--set", f"run.folder={folder}"]
    argv = argv_of(*words, *fixed, *settings)
    process = await asyncio.create_subprocess_exec(
        *argv, pass_fds=[writing], stdout=asyncio.subprocess.PIPE
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = await asyncio.to_thread(pipe.readline)
    address = msgspec.json.decode(told, type=Ready).address
    assert process.stdout
    assert (await process.stdout.readline()).startswith(f"rollmesh gateway: {address} ".encode())
    gateway = Gateway(process, address, token_file.read_text().strip())
    try:
        yield gateway
    finally:
        await gateway.client.close()
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0


async def test_a_relayed_session_from_its_opening_to_its_deletion(tmp_path: Path) -> None:
    told = [
        tell("b", [1, 2], [3, 4], id="chatcmpl-1"),
        tell("d", [1, 2, 3, 4, 5], [6], id="chatcmpl-2"),
    ]
    async with (
        ScriptedProvider(told) as provider,
        serving(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        opened = await gateway.open(metadata={"task": 7})
        assert set(opened) == {"session_id", "api_key", "base_url", "path_url"}
        assert opened["base_url"] == f"{gateway.address}/v1"
        assert (await gateway.call(opened, ask("a")))[0] == 200
        url = opened["path_url"].removesuffix("/v1") + "/chat/completions"
        async with gateway.client.post(url, data=orjson.dumps(ask("a", "b", "c"))) as response:
            assert response.status == 200
        path = f"/admin/sessions/{opened['session_id']}"
        status, row = await gateway.admin("GET", path)
        assert (status, row["state"], row["num_calls"]) == (200, "open", 2)
        assert row["metadata"] == {"task": 7}
        assert (await gateway.admin("POST", f"{path}/reward", {"reward": 1}))[0] == 200
        at = {"reward": 0.5, "node": "chatcmpl-2"}
        assert (await gateway.admin("POST", f"{path}/reward", at))[0] == 200
        status, account = await gateway.admin("POST", f"{path}/finish")
        assert (status, account["outcome"], account["num_calls"]) == (200, "completed", 2)
        [sample] = account["samples"]
        assert sample["token_ids"] == [1, 2, 3, 4, 5, 6]
        assert (sample["loss_mask"], sample["reward"]) == ([0, 0, 1, 1, 0, 1], 0.5)
        assert await gateway.admin("POST", f"{path}/finish") == (200, account)
        assert (await gateway.call(opened, ask("a")))[0] == 410
        figures = (await gateway.admin("GET", "/metrics"))[1]
        for line in [
            'rollmesh_exchanges_total{dialect="chat/completions",state="delivered"} 2.0',
            'rollmesh_sessions{state="finished"} 1.0',
            "rollmesh_calls_total 2.0",
            "rollmesh_live_legs 0.0",
        ]:
            assert line in figures
        assert (await gateway.admin("DELETE", path))[0] == 200
        assert [(await gateway.admin("GET", path))[0]] == [404]
        assert (await gateway.call(opened, ask("a")))[0] == 401
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


@asynccontextmanager
async def sampling(folder: Path, engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    model = write_model_folder(folder / "model")
    settings = orjson.loads((model / "config.json").read_bytes())
    settings["max_position_embeddings"] = CONTEXT_TOKENS
    (model / "config.json").write_bytes(orjson.dumps(settings))
    words = ["--model-dir", str(model), "--engine", engine.url]
    words += ["--set", "sampling.max_tokens=8", "--set", "interception.engine_wait_s=0.2"]
    async with serving(folder, *words) as gateway:
        await gateway.until_ready()
        yield gateway


async def test_a_session_in_tokens_trains_on_exactly_what_was_sampled(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token, weight_version="default") as engine,
        sampling(tmp_path, engine) as gateway,
    ):
        opened = await gateway.open(sampling={"top_k": {"policy": "force", "value": 3}}, seed=5)
        messages = [{"role": "user", "content": "guess"}]
        status, first = await gateway.call(opened, {"messages": messages, "temperature": 0})
        assert status == 200
        messages += [first["choices"][0]["message"], {"role": "user", "content": "higher"}]
        assert (await gateway.call(opened, {"messages": messages}))[0] == 200
        path = f"/admin/sessions/{opened['session_id']}"
        at = {"reward": 0.25, "node": first["id"]}
        assert (await gateway.admin("POST", f"{path}/reward", at))[0] == 200
        assert (await gateway.admin("POST", f"{path}/reward", {"reward": 1, "node": 99}))[0] == 404
        status, account = await gateway.admin("POST", f"{path}/finish", {"outcome": "truncated"})
        assert (status, account["outcome"], account["capture"]) == (200, "truncated", "tokens")
        figures = (await gateway.admin("GET", "/metrics"))[1]
    asked = [each.body["sampling_params"] for each in engine.seen if each.path == "/generate"]
    assert [(each["temperature"], each["top_k"]) for each in asked] == [(1.0, 3)] * 2 or [
        each.get("temperature", 1.0) for each in asked
    ] == [1.0] * 2
    [sample] = account["samples"]
    assert sum(sample["loss_mask"]) == 16
    for at_token, is_trained in enumerate(sample["loss_mask"]):
        token, context = sample["token_ids"][at_token], sample["token_ids"][:at_token]
        if is_trained:
            assert token == next_token(-1, context)
            assert sample["logprobs"][at_token] == logprob_of(-1, token)
    assert sample["reward"] == 0.25
    assert len(account["messages"]) == 4
    assert "rollmesh_sampled_tokens_total 16.0" in figures
    assert 'rollmesh_engines{phase="ready"} 1.0' in figures


async def test_the_context_is_as_long_as_the_models_folder_says(tmp_path: Path) -> None:
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        opened = await gateway.open()
        body = {"messages": [{"role": "user", "content": "x " * CONTEXT_TOKENS}]}
        status, told = await gateway.call(opened, body)
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    line = f"This model's maximum context length is {CONTEXT_TOKENS} tokens."
    assert told["error"]["message"].startswith(line)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_relay_before_a_gateway_keeps_the_same_samples(
    tmp_path: Path, is_stream: bool
) -> None:
    """What engines tell in their chat routes and what we know of the tokens are one."""
    (tmp_path / "outer").mkdir()
    key_file = tmp_path / "key"
    async with (
        ScriptedEngine(next_token) as engine,
        sampling(tmp_path, engine) as inner,
    ):
        opened = await inner.open()
        key_file.touch(mode=0o600)
        key_file.write_text(opened["api_key"] + "\n")
        words = ["--capture", "relay", "--engine", inner.address]
        words += ["--upstream-key-file", str(key_file)]
        async with serving(tmp_path / "outer", *words) as outer:
            relayed = await outer.open()
            messages: list[Any] = [{"role": "user", "content": "guess"}]
            asked = {"stream": is_stream, "logprobs": True, "return_token_ids": True}
            for word in ("higher", "lower"):
                said = await say(outer, relayed, {"messages": messages, **asked})
                messages = [*messages, said, {"role": "user", "content": word}]
            kept = await finish(outer, relayed)
        exact = await finish(inner, opened)
    [mine], [theirs] = exact["samples"], kept["samples"]
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert theirs[name] == mine[name]
    assert sum(mine["loss_mask"]) == 16


async def say(gateway: Gateway, opened: dict[str, str], body: Any) -> dict[str, str]:
    """The message that a call is answered with, plain or streamed."""
    auth = {"Authorization": f"Bearer {opened['api_key']}"}
    url = opened["base_url"] + "/chat/completions"
    async with gateway.client.post(url, data=orjson.dumps(body), headers=auth) as response:
        assert response.status == 200
        raw = await response.read()
    if not body["stream"]:
        return dict(orjson.loads(raw)["choices"][0]["message"])
    events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": text}


async def finish(gateway: Gateway, opened: dict[str, str]) -> Any:
    path = f"/admin/sessions/{opened['session_id']}/finish"
    status, account = await gateway.admin("POST", path)
    assert status == 200
    return account


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
async def test_the_readmes_commands_do_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    [commands] = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        here = commands.replace("http://127.0.0.1:8100", gateway.address)
        here = here.replace("admin.token", str(tmp_path / "token"))
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euc", here, stdout=asyncio.subprocess.PIPE
        )
        told, _ = await shell.communicate()
        assert shell.returncode == 0
        assert (await gateway.admin("GET", "/admin/sessions"))[1] == {"sessions": []}
    answers = [orjson.loads(line) for line in told.replace(b"}{", b"}\n{").splitlines()]
    chat, message, rewarded, finished, deleted = answers
    assert (chat["object"], message["type"]) == ("chat.completion", "message")
    assert (rewarded["metadata"], rewarded["reward"]) == ({"task": 7}, 1.0)
    assert finished["session_id"] == deleted["session_id"]
    assert [sample["reward"] for sample in finished["samples"]] == [1.0, 1.0]
    assert set(finished["samples"][0]) >= {"token_ids", "logprobs", "loss_mask", "policy_versions"}


async def test_an_engine_that_is_gone_is_503_and_taken_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        opened = await gateway.open()
        body = {"messages": [{"role": "user", "content": "guess"}]}
        await engine.die()
        async with gateway.client.post(
            opened["path_url"] + "/chat/completions", data=orjson.dumps(body)
        ) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
        await engine.restart()
        await gateway.until_ready()
        assert (await gateway.call(opened, body))[0] == 200


async def test_the_first_sigterm_lets_running_calls_end(tmp_path: Path) -> None:
    async with ScriptedProvider([Told((b'{"id":1}',))]) as provider:
        provider.holds = provider.holds_first = True
        async with serving(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway:
            opened = await gateway.open()
            running = asyncio.ensure_future(gateway.call(opened, ask("a")))
            await provider.until(lambda: len(provider.seen) == 1)
            gateway.process.terminate()
            await _until_refused(gateway.address)
            await provider.release()
            assert await running == (200, {"id": 1})
            assert await gateway.process.wait() == 0


async def test_the_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    async with ScriptedProvider([Told()]) as provider:
        provider.holds = provider.holds_first = True
        async with serving(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway:
            opened = await gateway.open()
            running = asyncio.ensure_future(gateway.call(opened, ask("a")))
            await provider.until(lambda: len(provider.seen) == 1)
            gateway.process.send_signal(signal.SIGTERM)
            await _until_refused(gateway.address)
            gateway.process.send_signal(signal.SIGTERM)
            assert await gateway.process.wait() == 1
            with pytest.raises(aiohttp.ClientError):
                await running


async def _until_refused(address: str) -> None:
    """Until nobody listens there any more: what a terminated gateway does first."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # closed while our connection was in its backlog
                continue
            writer.close()
            await asyncio.wait([asyncio.ensure_future(_closed(writer))])


async def _closed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--capture", "relay"], "--engine URL: name at least one engine"),
        (["--engine", "localhost:30000"], "--engine localhost:30000: not an http://"),
        (["--engine", "http://u:p@h"], "--engine h: name and password in a URL"),
        (["--engine", "http://h"], "--model-dir DIR is needed to capture tokens"),
        (["--engine", "http://h", "--model-dir", "nowhere"], "--model-dir nowhere: no such folder"),
        (["--engine", "http://h", "--model-dir", "."], "no tokenizer.json in it"),
        (["--engine", "http://h", "--capture", "relay", "--port", "{port}"], "choose another"),
        (["--engine", "http://h", "--capture", "relay", "--port", "0", "--upstream-key-file", "k"],
         "k: no such file or directory"),
        (["--engine", "http://h", "--capture", "relay", "--set", "interception.x=1"],
         "unknown key 'interception.x'"),
    ],
)  # fmt: skip
async def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], told: str) -> None:
    with listen("127.0.0.1:0") as taken:
        port = str(taken.getsockname()[1])
        argv = argv_of("--admin-token-file", "token", *(word.format(port=port) for word in words))
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        _, raw = await process.communicate()
    assert (process.returncode, raw.count(b"\n")) == (2, 1)
    assert raw.decode().startswith("rollmesh: ")
    assert told in raw.decode()


async def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "token").chmod(0o644)
    argv = argv_of("--engine", "http://h", "--capture", "relay", "--admin-token-file", "token")
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, raw = await process.communicate()
    assert (process.returncode, raw) == (
        2,
        b"rollmesh: token: others can read it; chmod 600 token\n",
    )
