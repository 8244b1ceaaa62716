"""The contract of the pair: `rollmesh gateway` in front of each engine, used as an agent uses it.

The samples of a session are compared with the engine itself, which must score the same tokens
alike.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.engines import WAIT_S, EngineUnderContract, Json, lines_of
from tests.contract.processes import EngineProcess, embedded_engine, gateway

CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"
HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": LOOK}]

ENDLESS: Json = {"max_tokens": 3000, "logit_bias": {"256": -100, "258": -100}}
"""Without end tokens; this many concurrent ones run for seconds."""


class Caller:
    """One session of a gateway, with admin calls."""

    def __init__(self, process: EngineProcess, token: str, opened: Json) -> None:
        self.opened = opened
        self._admin = {"Authorization": f"Bearer {token}"}
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        self.client = httpx.AsyncClient(base_url=process.address, headers=headers, timeout=WAIT_S)

    async def ask(self, path: str, **body: Any) -> Json:
        response = await self.client.post(f"/v1{path}", json={"model": "m", **body})
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    async def stream(self, path: str, **body: Any) -> list[Json]:
        """Yield the data of the stream's events."""
        return [event async for event in self.events(path, **body)]

    async def events(self, path: str, **body: Any) -> AsyncGenerator[Json, None]:
        asked = {"model": "m", "stream": True, **body}
        async with (
            self.client.stream("POST", f"/v1{path}", json=asked) as response,
            aclosing(lines_of(response)) as lines,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in lines:
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    async def samples(self) -> list[Json]:
        """The samples of the session, at its end."""
        found: list[Json] = (await self.account())["samples"]
        return found

    async def account(self) -> Json:
        """The account of the session, at its end."""
        path = f"/admin/sessions/{self.opened['session_id']}/finish"
        response = await self.client.post(path, json={}, headers=self._admin)
        assert response.status_code == 200, response.text
        account: Json = response.json()
        return account


class RunningGateway:
    """A running gateway."""

    def __init__(self, process: EngineProcess, token_file: Path) -> None:
        self._process = process
        self._token = token_file.read_text().strip()

    async def session(self, **asked: Any) -> Caller:
        """Open a session, once there is an engine for it."""
        headers = {"Authorization": f"Bearer {self._token}"}
        async with httpx.AsyncClient(base_url=self._process.address, timeout=WAIT_S) as client:
            while (await client.get("/healthz")).json()["status"] != "ok":
                pass
            opened = await client.post("/admin/sessions", json=asked, headers=headers)
        return Caller(self._process, self._token, opened.json())


@pytest.fixture(scope="session")
def door(
    address: str, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway in front of the engine under contract."""
    token_file = tmp_path_factory.mktemp("gateway") / "token"
    with gateway([address], model_folder, token_file) as process:
        yield RunningGateway(process, token_file)


async def assert_engine_scores_alike(engine: EngineUnderContract, samples: list[Json]) -> int:
    """Check that the engine scores each sampled token as recorded; return their number."""
    num_sampled = 0
    for sample in samples:
        answer = await engine.generate(
            sample["token_ids"],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        scored = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        sampled = [at for at, mask in enumerate(sample["loss_mask"]) if mask]
        recorded = [sample["logprobs"][at] for at in sampled]
        assert recorded == pytest.approx([scored[at] for at in sampled], abs=2e-3)
        num_sampled += len(sampled)
    return num_sampled


async def test_every_dialect_answers_and_records_what_was_sampled(
    engine: EngineUnderContract, door: RunningGateway
) -> None:
    caller = await door.session()
    asks: list[tuple[str, Json, str]] = [
        (CHAT, {"messages": HELLO, "max_tokens": 9}, "chat.completion.chunk"),
        (MESSAGES, {"messages": HELLO, "max_tokens": 9}, "message_stop"),
        (RESPONSES, {"input": "hello", "max_output_tokens": 9}, "response.incomplete"),
    ]
    num_reported = 0
    for path, body, last_kind in asks:
        usage = (await caller.ask(path, **body))["usage"]
        num_reported += usage.get("completion_tokens") or usage["output_tokens"]
        last = (await caller.stream(path, **body))[-1]
        assert (last.get("type") or last["object"]) in (last_kind, "response.completed")
    num_sampled = await assert_engine_scores_alike(engine, await caller.samples())
    assert num_reported < num_sampled <= 6 * 9
    await caller.client.aclose()


async def test_session_continues_when_weights_get_a_name_or_a_lower_number(
    engine: EngineUnderContract, door: RunningGateway
) -> None:
    caller = await door.session()
    before = (await engine.get("/model_info"))["weight_version"]
    try:
        for name in ("7", "step_8", "3"):
            renamed = await engine.post("/update_weight_version", new_version=name)
            assert renamed.status_code == 200
            messages = [{"role": "user", "content": f"hello {name}"}]
            await caller.ask(CHAT, messages=messages, max_tokens=5)
    finally:
        await engine.post("/update_weight_version", new_version=before)
    account = await caller.account()
    versions = [
        {each for each, mask in zip(s["policy_versions"], s["loss_mask"], strict=True) if mask}
        for s in account["samples"]
    ]
    assert versions == [{7}, {-1}, {3}]
    assert account["fell_back"] == 1
    await caller.client.aclose()


async def test_a_forced_call_under_a_grammar_is_returned_as_a_call(
    engine: EngineUnderContract, door: RunningGateway
) -> None:
    caller = await door.session(sampling="eval")
    body: Json = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
    body["regex"] = r' \{"at": 3\}\}\n?'
    (choice,) = (await caller.ask(CHAT, **body))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look",
        {"at": 3},
    )
    deltas = [event["choices"][0]["delta"] for event in await caller.stream(CHAT, **body)]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or ()]
    assert "".join(piece.get("arguments") or "" for piece in pieces) == '{"at": 3}'
    await caller.client.aclose()


async def test_a_schema_constrains_answers_in_every_dialect(
    engine: EngineUnderContract, door: RunningGateway
) -> None:
    caller = await door.session(sampling="eval")
    schema = {"enum": ["yes", "no"]}
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    chat = await caller.ask(CHAT, messages=HELLO, max_tokens=40, response_format=asked)
    assert json.loads(chat["choices"][0]["message"]["content"]) in ("yes", "no")
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    answer = await caller.ask(RESPONSES, input="hello", max_output_tokens=40, text=text)
    (item,) = answer["output"]
    assert json.loads(item["content"][0]["text"]) in ("yes", "no")
    await caller.client.aclose()


async def test_agents_that_disconnect_leave_nothing_running(
    engine: EngineUnderContract, door: RunningGateway
) -> None:
    async with AsyncExitStack() as stack:
        callers = [await door.session(sampling="eval") for _ in range(16)]
        for caller in callers:
            stack.push_async_callback(caller.client.aclose)
        async with AsyncExitStack() as leaving:
            for caller in callers:
                stream = caller.events(CHAT, messages=HELLO, **ENDLESS)
                leaving.push_async_callback(stream.aclose)
                await anext(stream)
            assert await engine.num_running() > 0
        await engine.until_idle()


async def is_caught(victim: EngineProcess) -> bool:
    """Whether `victim` is stopped in the middle of a turn."""
    async with httpx.AsyncClient(base_url=victim.address, timeout=WAIT_S) as client:
        await client.post("/pause_generation", json={"mode": "in_place"})
        (load,) = (await client.get("/v1/loads")).json()["loads"]
        if load["num_running_reqs"] == 0:
            await client.post("/continue_generation", json={})
        return bool(load["num_running_reqs"])


async def test_a_turn_whose_engine_dies_resumes_on_another_from_its_exact_tokens(
    engine: EngineUnderContract, address: str, model_folder: Path, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    # Under another version the engine would get no turn, and earlier tests have renamed the
    # weights.
    serving = (await engine.get("/model_info"))["weight_version"]
    with (
        embedded_engine(model_folder, "--weight-version", serving) as victim,
        gateway([victim.address, address], model_folder, token_file) as process,
    ):
        door = RunningGateway(process, token_file)
        callers: list[Caller] = []
        streams: list[AsyncGenerator[Json, None]] = []
        while not streams or not await is_caught(victim):
            callers.append(await door.session())
            streams.append(callers[-1].events(CHAT, messages=HELLO, max_tokens=400))
            await anext(streams[-1])
        victim.child.kill()
        events = [event async for event in streams[-1]]
        assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        num_sampled = await assert_engine_scores_alike(engine, await callers[-1].samples())
        assert num_sampled > 1
        for caller, stream in zip(callers, streams, strict=True):
            await stream.aclose()
            await caller.client.aclose()
    await engine.until_idle()
