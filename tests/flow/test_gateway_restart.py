"""Sessions survive a restart of their gateway: kill -9 during trajectories, seen by agents and in
accounts.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import ClientPayloadError
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.upstreams import ProviderRequest, ProviderResponse, ScriptedProvider, events
from tests.flow.gateway_process import PATIENCE_S, argv_of, finish, next_token
from tests.flow.lasting_gateway import LastingGateway, lasting, sampling_args
from tests.unit.serve.interception.relay.test_account import ask, provider_answer
from tests.unit.serve.interception.relay.test_routes import CHUNK

NUM_TURNS = 4
ACCOUNTED = ("samples", "unused", "messages", "forks", "healed", "num_calls", "outcome")


def openai_of(opened: dict[str, str]) -> AsyncOpenAI:
    return AsyncOpenAI(api_key=opened["api_key"], base_url=opened["base_url"], max_retries=4)


async def turn_by_chat(client: AsyncOpenAI, talk: list[Any]) -> str:
    answer = await client.chat.completions.create(model="m", messages=talk)
    talk.append({"role": "assistant", "content": answer.choices[0].message.content})
    talk.append({"role": "user", "content": "higher"})
    return answer.id


async def undisturbed(gateway: LastingGateway, seed: int) -> tuple[Any, list[str]]:
    """The account of an undisturbed talk, and the ids of its answers."""
    opened = await gateway.gateway.open(seed=seed)
    talk: list[Any] = [{"role": "user", "content": "guess"}]
    async with openai_of(opened) as client:
        ids = [await turn_by_chat(client, talk) for _ in range(NUM_TURNS)]
    return await finish(gateway.gateway, opened), [each.rpartition("-")[2] for each in ids]


def comparable(account: Any) -> dict[str, Any]:
    return {name: account[name] for name in ACCOUNTED}


async def test_an_openai_agent_does_not_notice_a_restart_of_its_gateway(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        calm, calm_ids = await undisturbed(gateway, 5)
        opened = await gateway.gateway.open(seed=5)
        talk: list[Any] = [{"role": "user", "content": "guess"}]
        async with openai_of(opened) as client:
            ids = [await turn_by_chat(client, talk)]
            # Killed while its second turn is sampled: the SDK's own retry continues.
            engine.hold()
            num_seen = engine.num_seen("/generate")
            running = asyncio.ensure_future(turn_by_chat(client, talk))
            await engine.until(lambda: engine.num_seen("/generate") > num_seen)
            await gateway.kill()
            await engine.release()
            await gateway.start()
            ids.append(await asyncio.wait_for(running, PATIENCE_S))
            await gateway.restart()
            ids.append(await turn_by_chat(client, talk))
            ids.append(await turn_by_chat(client, talk))
        await gateway.restart()
        account = await finish(gateway.gateway, opened)
        assert comparable(account) == comparable(calm)
        assert [each.rpartition("-")[2] for each in ids] == calm_ids
    prompts = [each.body["input_ids"] for each in engine.seen if each.path == "/generate"]
    lost = prompts[NUM_TURNS + 1]
    assert prompts[NUM_TURNS + 2] == lost, "sampled again after the same tokens"
    assert prompts[:NUM_TURNS] == [each for n, each in enumerate(prompts[NUM_TURNS:]) if n != 1]


async def test_an_answer_that_was_written_and_not_read_is_sent_again(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        opened = await gateway.gateway.open(seed=5)
        body = {"messages": [{"role": "user", "content": "guess"}]}
        raw = orjson.dumps(body)
        reader, writer = await asyncio.open_connection(*gateway.listening.getsockname())
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(raw)}\r\n"
        head += f"Authorization: Bearer {opened['api_key']}\r\n\r\n"
        num_bytes = gateway.num_journal_bytes()
        writer.write(head.encode() + raw)
        await asyncio.to_thread(gateway.wait_for_growth, num_bytes)
        await gateway.kill()
        seen = await reader.read()
        writer.close()
        await gateway.start()
        mark = {"x-stainless-retry-count": "1"}
        status, again = await gateway.gateway.call(opened, body, **mark)
        assert status == 200
        if seen:
            assert orjson.loads(seen.partition(b"\r\n\r\n")[2]) == again
        _, once_more = await gateway.gateway.call(opened, body, **mark)
        assert once_more == again
        account = await finish(gateway.gateway, opened)
    assert engine.num_seen("/generate") == 1
    assert (account["num_calls"], len(account["samples"])) == (1, 1)


async def test_an_anthropic_stream_resumes_from_its_history(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        opened = await gateway.gateway.open(seed=5)
        base = opened["path_url"].removesuffix("/v1")
        talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "guess"}]}]
        async with AsyncAnthropic(api_key="none", base_url=base, max_retries=4) as client:
            for _ in range(NUM_TURNS):
                async with client.messages.stream(
                    model="m", max_tokens=8, system="Be brief.", messages=talk
                ) as stream:
                    message = await stream.get_final_message()
                resent = [block.model_dump(include={"type", "text"}) for block in message.content]
                talk.append({"role": "assistant", "content": resent})
                talk.append({"role": "user", "content": "higher"})
                await gateway.restart()
        account = await finish(gateway.gateway, opened)
    [sample] = account["samples"]
    assert sum(sample["loss_mask"]) == 8 * NUM_TURNS
    assert (account["forks"], account["num_calls"]) == ([], NUM_TURNS)
    for at, is_trained in enumerate(sample["loss_mask"]):
        if is_trained:
            assert sample["token_ids"][at] == next_token(0, sample["token_ids"][:at])


async def test_sessions_are_the_same_after_a_restart(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        talks = []
        for number in range(3):
            opened = await gateway.gateway.open(metadata={"task": number}, seed=number)
            talk: list[Any] = [{"role": "user", "content": "guess"}]
            async with openai_of(opened) as client:
                node = await turn_by_chat(client, talk)
                await turn_by_chat(client, talk)
            talks.append((opened, node))
            path = f"/admin/sessions/{opened['session_id']}/reward"
            assert (await gateway.gateway.admin("POST", path, {"reward": number}))[0] == 200
            body = {"reward": 0.5, "node": node}
            assert (await gateway.gateway.admin("POST", path, body))[0] == 200
        (kept, _), (finished, _), (deleted, _) = talks
        account = await finish(gateway.gateway, finished)
        path = f"/admin/sessions/{deleted['session_id']}"
        assert (await gateway.gateway.admin("DELETE", path))[0] == 200
        path = f"/admin/sessions/{kept['session_id']}"
        _, before = await gateway.gateway.admin("GET", path)
        await gateway.restart()
        assert await finish(gateway.gateway, finished) == account
        _, again = await gateway.gateway.admin("GET", path)
        volatile = ("held_bytes",)
        assert {**again, **dict.fromkeys(volatile)} == {**before, **dict.fromkeys(volatile)}
        body = {"messages": [{"role": "user", "content": "guess"}]}
        assert (await gateway.gateway.call(finished, body))[0] == 410
        assert (await gateway.gateway.call(deleted, body))[0] == 401
        recovered = gateway.recovered()
    assert (recovered["num_open"], recovered["num_finished"], recovered["set_aside"]) == (1, 1, [])
    assert recovered["num_calls"] == 4


async def test_nothing_in_the_journal_opens_a_session(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        opened = await gateway.gateway.open()
        assert (
            await gateway.gateway.call(opened, {"messages": [{"role": "user", "content": "a"}]})
        )[0] == 200
        written = b"".join(each.read_bytes() for each in gateway.journal.glob("*.journal"))
        secret = opened["path_url"].rpartition("/s/")[2].partition("/")[0]
        assert opened["api_key"].encode() not in written
        assert secret.encode() not in written
        assert gateway.journal.stat().st_mode & 0o077 == 0
        assert all(each.stat().st_mode & 0o077 == 0 for each in gateway.journal.iterdir())


@pytest.mark.parametrize("is_torn", [True, False])
async def test_a_torn_record_is_reported_and_records_before_it_are_recovered(
    tmp_path: Path, is_torn: bool
) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        opened = await gateway.gateway.open(seed=5)
        body = {"messages": [{"role": "user", "content": "guess"}]}
        assert (await gateway.gateway.call(opened, body))[0] == 200
        await gateway.kill()
        [segment] = gateway.journal.glob("*.journal")
        whole = segment.read_bytes()
        segment.write_bytes(whole[:-7] if is_torn else whole)
        await gateway.start()
        recovered = gateway.recovered()
        account = await finish(gateway.gateway, opened)
    assert (recovered["torn_bytes"] > 0) == is_torn
    assert account["num_calls"] == (0 if is_torn else 1)


def answer_relayed(seen: ProviderRequest) -> ProviderResponse:
    """An answer that depends on its question only, with tokens."""
    texts = [each["content"] for each in orjson.loads(seen.body)["messages"]]
    prompt = [1 + n for n in range(2 * len(texts) - 1)]
    return provider_answer("b", prompt, [len(prompt) + 1], id=f"chatcmpl-{len(texts)}")


def relayed(account: Any) -> dict[str, Any]:
    """The account without the times of its calls."""
    calls = [{**call, "asked_s": 0} for call in account["calls"]]
    return {
        **{name: account[name] for name in ("samples", "messages", "forks", "outcome")},
        "calls": calls,
    }


@pytest.mark.parametrize("num_chars", [1, 40_000])
async def test_a_relayed_session_has_the_same_account_after_a_kill(
    tmp_path: Path, num_chars: int
) -> None:
    talks = [["a" * num_chars], ["a" * num_chars, "b", "c"], ["other"]]
    accounts = []
    async with (
        ScriptedProvider(answer_relayed) as provider,
        lasting(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        for is_shaken in (False, True):
            opened = await gateway.gateway.open()
            for texts in talks:
                body = ask(*texts, tools=[{"type": "function", "function": {"name": "f" * 90}}])
                status, answer = await gateway.gateway.call(opened, body)
                assert status == 200
                if is_shaken:
                    await gateway.restart()
                    mark = {"x-stainless-retry-count": "1"}
                    assert await gateway.gateway.call(opened, body, **mark) == (200, answer)
            accounts.append(relayed(await finish(gateway.gateway, opened)))
        assert accounts[1] == accounts[0]
        await gateway.restart()
        assert relayed(await finish(gateway.gateway, opened)) == accounts[0]
        recovered = gateway.recovered()
    assert len(provider.seen) == 2 * len(talks)
    assert (recovered["num_finished"], recovered["set_aside"]) == (2, [])


async def test_a_relayed_call_that_ran_during_the_kill_is_made_again(tmp_path: Path) -> None:
    async with (
        ScriptedProvider(answer_relayed) as provider,
        lasting(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        opened = await gateway.gateway.open()
        provider.holds = provider.holds_first = True
        async with openai_of(opened) as client:
            talk: list[Any] = [{"role": "user", "content": "a"}]
            running = asyncio.ensure_future(turn_by_chat(client, talk))
            await provider.until(lambda: len(provider.seen) == 1)
            await gateway.kill()
            provider.holds = provider.holds_first = False
            await gateway.start()
            assert await asyncio.wait_for(running, PATIENCE_S) == "chatcmpl-1"
        account = await finish(gateway.gateway, opened)
    assert [call["state"] for call in account["calls"]] == ["whole"]


async def test_a_relayed_stream_has_no_end_before_it_is_written(tmp_path: Path) -> None:
    """The gateway is killed when the endpoint's last event has arrived and the end of its answer
    has not.
    """
    whole = events(CHUNK, CHUNK, b"[DONE]")
    response = msgspec.structs.replace(whole, pieces=(*whole.pieces, b""))
    async with (
        ScriptedProvider(lambda _: response) as provider,
        lasting(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        opened = await gateway.gateway.open()
        provider.holds = provider.holds_first = True
        got = bytearray()

        async def read(num_tries: int) -> None:
            url = opened["base_url"] + "/chat/completions"
            headers = {"Authorization": f"Bearer {opened['api_key']}"}
            headers["x-stainless-retry-count"] = str(num_tries)
            raw = orjson.dumps({**ask("a"), "stream": True})
            async with gateway.gateway.client.post(url, data=raw, headers=headers) as response:
                async for data in response.content.iter_any():
                    got.extend(data)

        async def held_bytes() -> int:
            path = f"/admin/sessions/{opened['session_id']}"
            return int((await gateway.gateway.admin("GET", path))[1]["held_bytes"])

        reading = asyncio.ensure_future(read(0))
        await provider.until(lambda: len(provider.seen) == 1)
        due = await held_bytes()
        for piece in whole.pieces:
            await provider.release()
            due += len(piece)
            while await held_bytes() < due:
                pass
        shown = b"".join(whole.pieces[:2])
        while len(got) < len(shown):
            await held_bytes()
        await held_bytes()
        await gateway.kill()
        with pytest.raises(ClientPayloadError):
            await reading
        assert bytes(got) == shown
        provider.holds = provider.holds_first = False
        got.clear()
        await gateway.start()
        await read(1)
        assert bytes(got) == b"".join(whole.pieces)
        account = await finish(gateway.gateway, opened)
    assert [(call["state"], call["delivered"]) for call in account["calls"]] == [("whole", True)]


async def test_a_journal_of_another_capture_or_model_is_refused(tmp_path: Path) -> None:
    async with ScriptedEngine(next_token) as engine:
        args = sampling_args(tmp_path, engine)
        async with lasting(tmp_path, *args):
            pass
        argv = argv_of("--capture", "relay", "--engine", engine.url, "--port", "0")
        refused = await asyncio.create_subprocess_exec(
            *argv, "--admin-token-file", str(tmp_path / "token"), stderr=asyncio.subprocess.PIPE
        )
        _, output = await refused.communicate()
    assert refused.returncode == 2
    assert output.decode().count("\n") == 1
    assert f"--journal {tmp_path / 'token.journal'}: its sessions have " in output.decode()
    assert "name another folder" in output.decode()


async def test_two_gateways_do_not_share_a_journal_and_without_one_nothing_is_stored(
    tmp_path: Path,
) -> None:
    token = str(tmp_path / "token")
    async with (
        ScriptedProvider(answer_relayed) as provider,
        lasting(tmp_path, "--capture", "relay", "--engine", provider.url),
    ):
        argv = argv_of("--capture", "relay", "--engine", provider.url, "--port", "0")
        second = await asyncio.create_subprocess_exec(
            *argv, "--admin-token-file", token, stderr=asyncio.subprocess.PIPE
        )
        _, output = await second.communicate()
        assert (second.returncode, output.decode().count("\n")) == (2, 1)
        assert "another process writes this journal" in output.decode()
    async with (
        ScriptedProvider(answer_relayed) as provider,
        lasting(
            tmp_path / "other", "--capture", "relay", "--engine", provider.url, "--no-journal"
        ) as gateway,
    ):
        opened = await gateway.gateway.open()
        await gateway.restart()
        assert (await gateway.gateway.call(opened, ask("a")))[0] == 401
        assert not gateway.journal.exists()


async def test_many_agents_survive_kills_at_any_moment(tmp_path: Path) -> None:
    """Each kill follows growth of the journal by a random amount: between, during and after
    calls.
    """
    chance = random.Random(7)
    async with (
        ScriptedEngine(next_token) as engine,
        lasting(tmp_path, *sampling_args(tmp_path, engine)) as gateway,
    ):
        crowd = [await gateway.gateway.open(seed=number) for number in range(8)]

        async def talk(opened: dict[str, str]) -> None:
            messages: list[Any] = [{"role": "user", "content": opened["session_id"]}]
            async with openai_of(opened) as client:
                for _ in range(2 * NUM_TURNS):
                    await turn_by_chat(client, messages)

        async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as group:
            talks = [group.create_task(talk(opened)) for opened in crowd]
            for _ in range(3):
                grown = gateway.num_journal_bytes() + chance.randrange(500, 8000)
                await asyncio.to_thread(gateway.wait_for_growth, grown, talks)
                await gateway.restart()
        accounts = [await finish(gateway.gateway, opened) for opened in crowd]
    for account in accounts:
        [sample] = account["samples"]
        assert account["unused"] == []
        assert sum(sample["loss_mask"]) == 8 * 2 * NUM_TURNS
        for at, is_trained in enumerate(sample["loss_mask"]):
            if is_trained:
                assert sample["token_ids"][at] == next_token(0, sample["token_ids"][:at])
