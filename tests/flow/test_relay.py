"""A real gateway in relay mode: its journal, real SDKs, and a gateway in tokens mode as its
upstream.
"""

import asyncio
import io
import stat
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import psutil
import pytest

from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider
from tests.flow.gateway_process import (
    PATIENCE_S,
    Gateway,
    chat,
    finish,
    next_token,
    sampling,
    serving,
)
from tests.unit.serve.interception.relay.test_account import ask, provider_answer

ANSWER = b'{"choices":[{"message":{"content":"4"}}]}'


async def test_a_relayed_session_from_its_opening_to_its_deletion(tmp_path: Path) -> None:
    answers = [
        provider_answer("b", [1, 2], [3, 4], id="chatcmpl-1"),
        provider_answer("d", [1, 2, 3, 4, 5], [6], id="chatcmpl-2"),
    ]
    async with (
        ScriptedProvider(answers) as provider,
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


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_relay_in_front_of_a_gateway_records_the_same_samples(
    tmp_path: Path, is_stream: bool
) -> None:
    """The tokens that engines report in their chat routes are those that the relay records."""
    (tmp_path / "outer").mkdir()
    key_file = tmp_path / "key"
    async with (
        ScriptedEngine(next_token) as engine,
        sampling(tmp_path, engine) as inner,
    ):
        opened = await inner.open()
        key_file.touch(mode=0o600)
        key_file.write_text(opened["api_key"] + "\n")
        args = ["--capture", "relay", "--engine", inner.address]
        args += ["--upstream-key-file", str(key_file)]
        async with serving(tmp_path / "outer", *args) as outer:
            relayed = await outer.open()
            messages: list[Any] = [{"role": "user", "content": "guess"}]
            asked = {"stream": is_stream, "logprobs": True, "return_token_ids": True}
            for hint in ("higher", "lower"):
                reply = await chat(outer, relayed, {"messages": messages, **asked})
                messages = [*messages, reply, {"role": "user", "content": hint}]
            kept = await finish(outer, relayed)
        exact = await finish(inner, opened)
    [mine], [theirs] = exact["samples"], kept["samples"]
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert theirs[name] == mine[name]
    assert sum(mine["loss_mask"]) == 16


async def test_real_sdks_work_with_every_dialect_behind_a_relay(tmp_path: Path) -> None:
    """The fields that SDKs require of an answer are still there, plain and streamed."""
    (tmp_path / "outer").mkdir()
    hi: Any = [{"role": "user", "content": "hi"}]
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as inner:
        key_file = tmp_path / "key"
        key_file.touch(mode=0o600)
        key_file.write_text((await inner.open())["api_key"])
        args = ["--capture", "relay", "--engine", inner.address]
        args += ["--upstream-key-file", str(key_file)]
        async with serving(tmp_path / "outer", *args) as outer:
            opened = await outer.open()
            url = opened["base_url"]
            async with openai.AsyncOpenAI(api_key=opened["api_key"], base_url=url) as client:
                chat = client.chat.completions
                assert (await chat.create(model="m", messages=hi)).choices[0].message.content
                chunks = [c async for c in await chat.create(model="m", messages=hi, stream=True)]
                assert chunks[-1].choices[0].finish_reason == "length"
                assert (await client.responses.create(model="m", input="hi")).output
                async with client.responses.stream(model="m", input="hi") as events:
                    assert [each.type async for each in events][-1] == "response.incomplete"
            base = opened["path_url"].removesuffix("/v1")
            async with anthropic.AsyncAnthropic(api_key="unused", base_url=base) as other:
                request: Any = {"model": "m", "max_tokens": 8, "messages": hi}
                assert (await other.messages.create(**request)).stop_reason == "max_tokens"
                async with other.messages.stream(**request) as blocks:
                    assert (await blocks.get_final_message()).usage.output_tokens == 8
                counted = await other.messages.count_tokens(model="m", messages=hi)
                assert counted.input_tokens > 0
            account = await finish(outer, opened)
    # The answer to a request that an SDK retried is delivered as well: a 503 of a busy gateway.
    answered = [call for call in account["calls"] if call["delivered"] and call["status"] == 200]
    routes = [call["route"] for call in answered]
    assert routes == [r for r in ("/chat/completions", "/responses", "/messages") for _ in "ab"]


async def test_a_long_history_costs_a_relay_only_its_new_messages_and_its_account_nothing(
    tmp_path: Path,
) -> None:
    """No second copy of 20 MB that are sent again and then read back is ever in memory."""
    async with (
        ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider,
        serving(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        opened = await gateway.open()
        pid = gateway.process.pid

        async def growth(work: Any) -> float:
            """Growth of the peak over the memory that was resident before, in MB."""
            before = high_water_mb(pid, begins=True)
            await work
            provider.seen.clear()
            return high_water_mb(pid) - before

        shots = [shot(number) for number in range(41)]
        first = await growth(show(gateway, opened, shots[:40]))
        second = await growth(show(gateway, opened, shots))
        path = f"/admin/sessions/{opened['session_id']}"
        third = await growth(gateway.admin("POST", f"{path}/finish"))
        status, account = await gateway.admin("POST", f"{path}/finish")
        assert (status, account["messages"][:41]) == (200, shots)
        assert (await gateway.admin("DELETE", path))[0] == 200
    assert 20 < first < 50
    assert second < 6
    assert third < 6


def high_water_mb(pid: int, *, begins: bool = False) -> float:
    """Peak resident memory since marking began."""
    if begins:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def shot(number: int) -> dict[str, Any]:
    """A message that shows a screenshot of half a megabyte."""
    url = f"data:image/png;base64,{number:03}".ljust(500_000, "A")
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


async def show(gateway: Gateway, opened: dict[str, str], shots: list[Any]) -> None:
    """Make a call with this history."""
    url = opened["path_url"].removesuffix("/v1") + "/chat/completions"
    body = io.BytesIO(orjson.dumps({"messages": shots}))
    async with gateway.client.post(url, data=body) as response:
        assert response.status == 200


async def test_finished_sessions_that_are_not_deleted_use_disk_and_no_memory(
    tmp_path: Path,
) -> None:
    num_sessions, shots_each = 20, 4
    args = ["--capture", "relay", "--set", "interception.max_blob_bytes=1000000"]
    args += ["--set", f"interception.spill_folder={tmp_path}"]
    async with (
        ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider,
        serving(tmp_path, *args, "--engine", provider.url) as gateway,
    ):
        process = psutil.Process(gateway.process.pid)
        before = process.memory_info().rss
        opened = [await gateway.open() for _ in range(num_sessions)]
        shots = [shot(number) for number in range(num_sessions * shots_each)]
        for number, each in enumerate(opened):
            own = shots[number * shots_each :][:shots_each]
            await show(gateway, each, own)
            path = f"/admin/sessions/{each['session_id']}/finish"
            assert (await gateway.admin("POST", path))[1]["messages"][:-1] == own
            provider.seen.clear()
        num_spilled = 0.0
        while num_spilled < 500_000 * len(shots) - 1_500_000:
            figures = (await gateway.admin("GET", "/metrics"))[1]
            num_spilled = figure(figures, "rollmesh_spilled_bytes")
        async with asyncio.timeout(PATIENCE_S):  # freed memory is returned by a trim
            while process.memory_info().rss - before > 15_000_000:
                await gateway.admin("GET", "/metrics")
        assert figure(figures, 'rollmesh_held_bytes{what="accounts"}') < 100_000
        for number, each in enumerate(opened):
            path = f"/admin/sessions/{each['session_id']}"
            account = (await gateway.admin("POST", f"{path}/finish"))[1]
            assert account["messages"][:-1] == shots[number * shots_each :][:shots_each]
            assert (await gateway.admin("DELETE", path))[0] == 200
        figures = (await gateway.admin("GET", "/metrics"))[1]
        assert figure(figures, 'rollmesh_entries{table="blobs"}') == 0


def figure(exposed: str, name: str) -> float:
    """The figure's value."""
    return next(float(line.split()[-1]) for line in exposed.splitlines() if line.startswith(name))
