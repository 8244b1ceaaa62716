"""A real gateway process between real sockets, used as in its README section."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import orjson
import pytest

from rollmesh.core.process import listen
from rollmesh.testing.engine import ScriptedEngine, logprob_of
from rollmesh.testing.faults import Fault
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider
from tests.flow.gateway_process import (
    CONTEXT_TOKENS,
    PATIENCE_S,
    argv_of,
    next_token,
    sampling,
    serving,
)
from tests.unit.serve.interception.relay.test_account import ask


async def test_a_session_in_tokens_mode_trains_on_exactly_the_sampled_tokens(
    tmp_path: Path,
) -> None:
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
    assert [(each.get("temperature", 1.0), each["top_k"]) for each in asked] == [(1.0, 3)] * 2
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


async def test_the_context_length_is_that_of_the_model_folder(tmp_path: Path) -> None:
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        opened = await gateway.open()
        body = {"messages": [{"role": "user", "content": "x " * CONTEXT_TOKENS}]}
        status, answer = await gateway.call(opened, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    line = f"This model's maximum context length is {CONTEXT_TOKENS} tokens."
    assert answer["error"]["message"].startswith(line)


async def test_a_lost_engine_is_503_and_is_used_again_when_it_is_back(
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
            message = orjson.loads(await response.read())["error"]["message"]
            assert f"(last: {engine.url}: " in message
        await engine.restart()
        await gateway.until_ready()
        assert (await gateway.call(opened, body))[0] == 200


@pytest.mark.parametrize(
    ("token", "is_stream", "cause"), [(None, False, "HTTP 500: "), (10**6, True, "sent token ids")]
)
async def test_a_single_engine_that_fails_at_every_try_is_reported_at_once(
    tmp_path: Path, token: int | None, is_stream: bool, cause: str
) -> None:
    async with (
        ScriptedEngine(lambda _, __: token or 1) as engine,
        sampling(tmp_path, engine, engine_wait_s=10 * PATIENCE_S) as gateway,
    ):
        opened = await gateway.open()
        engine.faults.extend([] if token else [Fault.ERROR] * 1000)
        body = {"messages": [{"role": "user", "content": "guess"}], "stream": is_stream}
        async with asyncio.timeout(PATIENCE_S):
            status, answer = await gateway.call(opened, body)
    assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
    assert f"(last: {engine.url}: {cause}" in answer["error"]["message"]
    assert "/healthz" in answer["error"]["message"]


async def test_the_first_sigterm_lets_running_calls_end(tmp_path: Path) -> None:
    async with ScriptedProvider([ProviderResponse((b'{"id":1}',))]) as provider:
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
    async with ScriptedProvider([ProviderResponse()]) as provider:
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
    """Poll until the port refuses connections, which is the first thing that a terminated gateway
    does.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # closed while this connection was in its backlog
                continue
            writer.close()
            await asyncio.wait([asyncio.ensure_future(_closed(writer))])


async def _closed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--capture", "relay"], "--engine URL: name at least one engine"),
        (["--engine", "localhost:30000"], "--engine localhost:30000: not an http://"),
        (["--engine", "http://u:p@h"], "an engine's URL is scheme, host and port only"),
        (["--engine", "http://h"], "--model-dir DIR is missing"),
        (["--engine", "http://h", "--model-dir", "nowhere"], "--model-dir nowhere: no such folder"),
        (["--engine", "http://h", "--model-dir", ".", "--port", "0"], "no tokenizer.json in it"),
        (["--engine", "http://h", "--capture", "relay", "--port", "{port}"], "choose another"),
        (["--engine", "http://h", "--capture", "relay", "--port", "0", "--upstream-key-file", "k"],
         "k: no such file or directory"),
        (["--engine", "http://h", "--capture", "relay", "--set", "interception.x=1"],
         "unknown key 'interception.x'"),
        (["--engine", "http://h", "--model-dir", ".", "--upstream-key-file", "k"],
         "--upstream-key-file k: engines need no key; leave it out, or use --capture"),
        (["--engine", "http://h", "--capture", "relay", "--model-dir", "."],
         "--model-dir .: a relay renders no prompts; leave it out, or use --capture tokens"),
        (["--engine", "http://h", "--capture", "relay", "--port", "0", "--listen-fd", "3"],
         "--port 0: excluded by --listen-fd; leave one out"),
    ],
)  # fmt: skip
async def test_a_mistake_is_a_one_line_error(tmp_path: Path, args: list[str], message: str) -> None:
    with listen("127.0.0.1:0") as taken:
        port = str(taken.getsockname()[1])
        argv = argv_of("--admin-token-file", "token", *(arg.format(port=port) for arg in args))
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        _, raw = await process.communicate()
    assert (process.returncode, raw.count(b"\n")) == (2, 1)
    assert raw.decode().startswith("rollmesh: ")
    assert message in raw.decode()


async def test_a_token_file_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
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
