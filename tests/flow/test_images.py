"""Screenshots through a real gateway, in every dialect: an agent that sends an image at every turn.

The engine is scripted, so that each prompt can be checked: it has as many placeholders as images,
in the order in which the agent sent them, and each prompt begins with all tokens of the previous
turn.
"""

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.engine import AgentReply, ScriptedAgent, ScriptedEngine, ToolUse, steps
from rollmesh.testing.faults import Fault
from rollmesh.testing.model_folder import write_large_folder, write_model_folder
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider
from tests.clients.exactness import calls_of, faults
from tests.disks import lose_files
from tests.flow.gateway_process import PATIENCE_S, Gateway, finish, serving
from tests.flow.lasting_gateway import lasting

Json = dict[str, Any]

NUM_BYTES = 60_000
ELSEWHERE = "https://example.com/map.png"
CLICK = {"type": "object", "properties": {"at": {"type": "integer"}}}
SCRIPT = steps(
    *(
        AgentReply(f"Step {n}.", reasoning="I look.", uses=(ToolUse("click", f'{{"at":  {n}}}'),))
        for n in (1, 2, 3)
    ),
    AgentReply("Done."),
)


def shot(number: int) -> str:
    """The address of a screenshot, the same for the same number."""
    raw = b"\x89PNG" + random.Random(number).randbytes(NUM_BYTES)
    return "data:image/png;base64," + base64.b64encode(raw).decode()


class Chat:
    """An agent that uses Chat Completions."""

    path = "/chat/completions"

    def __init__(self) -> None:
        self.shown: list[Json] = []

    def body(self) -> Json:
        function = {"name": "click", "parameters": CLICK}
        return {"messages": self.shown, "tools": [{"type": "function", "function": function}]}

    def image(self, address: str) -> Json:
        return {"type": "image_url", "image_url": {"url": address}}

    def text(self, content: str) -> Json:
        return {"type": "text", "text": content}

    def ask(self, *parts: Json) -> None:
        self.shown.append({"role": "user", "content": list(parts)})

    def keep(self, answer_body: Json) -> list[str]:
        """Keep the answer; return the ids of its calls."""
        message = answer_body["choices"][0]["message"]
        self.shown.append(message)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def answer(self, call: str, *parts: Json) -> None:
        self.shown.append({"role": "tool", "tool_call_id": call, "content": list(parts)})

    def code_of(self, answer_body: Json) -> str:
        return str(answer_body["error"]["code"])


class Responses(Chat):
    """An agent that uses Responses, and sends all items each time."""

    path = "/responses"

    def body(self) -> Json:
        tool = {"type": "function", "name": "click", "parameters": CLICK}
        return {"input": self.shown, "tools": [tool], "store": False}

    def image(self, address: str) -> Json:
        return {"type": "input_image", "image_url": address, "detail": "auto"}

    def text(self, content: str) -> Json:
        return {"type": "input_text", "text": content}

    def keep(self, answer_body: Json) -> list[str]:
        self.shown += answer_body["output"]
        return [
            item["call_id"] for item in answer_body["output"] if item["type"] == "function_call"
        ]

    def answer(self, call: str, *parts: Json) -> None:
        item = {"type": "function_call_output", "call_id": call, "output": list(parts)}
        self.shown.append(item)


class Messages(Chat):
    """An agent that uses Anthropic's Messages."""

    path = "/messages"

    def body(self) -> Json:
        tool = {"name": "click", "input_schema": CLICK}
        return {"messages": self.shown, "tools": [tool], "max_tokens": 200}

    def image(self, address: str) -> Json:
        if not address.startswith("data:"):
            return {"type": "image", "source": {"type": "url", "url": address}}
        media_type, _, data = address.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": media_type, "data": data}
        return {"type": "image", "source": source}

    def keep(self, answer_body: Json) -> list[str]:
        self.shown.append({"role": "assistant", "content": answer_body["content"]})
        return [block["id"] for block in answer_body["content"] if block["type"] == "tool_use"]

    def answer(self, call: str, *parts: Json) -> None:
        result = {"type": "tool_result", "tool_use_id": call, "content": list(parts)}
        self.shown.append({"role": "user", "content": [result]})

    def code_of(
        self, answer_body: Json
    ) -> str:  # this dialect has no codes, only a type and a message
        assert answer_body["error"]["type"] == "invalid_request_error"
        return "unsupported_content"


AGENTS: list[type[Chat]] = [Chat, Responses, Messages]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads images."""
    return write_large_folder(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@asynccontextmanager
async def before(
    engine: ScriptedEngine, model: Path, tmp_path: Path, *args: str
) -> AsyncIterator[Gateway]:
    argv = ["--model-dir", str(model), "--engine", engine.url, *args]
    argv += ["--set", 'interception.image_hosts=["example.com"]']
    async with serving(tmp_path, *argv) as gateway:
        await gateway.until_ready()
        yield gateway


def encoded(agent: Chat, is_stream: bool = False) -> bytes:
    return orjson.dumps({**agent.body(), "stream": is_stream})


async def send(
    gateway: Gateway,
    opened: dict[str, str],
    agent: Chat,
    *,
    is_stream: bool = False,
    is_retry: bool = False,
) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {opened['api_key']}"}
    if is_retry:
        headers["x-stainless-retry-count"] = "1"
    url = opened["base_url"] + agent.path
    body = encoded(agent, is_stream)
    async with gateway.client.post(url, data=body, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("kind", AGENTS)
async def test_a_screenshot_at_every_turn_is_stored_once_and_tokens_after_it_are_exact(
    kind: type[Chat], folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agent, model = kind(), ScriptedAgent(tokenizer, SCRIPT)
    async with (
        ScriptedEngine(model.next_token) as engine,
        before(engine, folder, tmp_path) as gateway,
    ):
        opened = await gateway.open()
        shown = [shot(1), ELSEWHERE]
        agent.ask(agent.text("find it"), *map(agent.image, shown), agent.text("on these"))
        expected = []
        for number in (2, 1, 3):  # the second shows the first one's image
            expected.append(list(shown))
            status, first = await send(gateway, opened, agent)
            assert status == 200
            again = await send(gateway, opened, agent, is_retry=True)
            assert again == (200, first)
            (call,) = agent.keep(orjson.loads(first))
            shown.append(shot(number))
            agent.answer(call, agent.text("done"), agent.image(shot(number)))
        expected.append(list(shown))
        assert (await send(gateway, opened, agent))[0] == 200
        row = (await gateway.admin("GET", f"/admin/sessions/{opened['session_id']}"))[1]
        account = await finish(gateway, opened)
    asked = [request.body for request in engine.seen if request.path == "/generate"]
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [body["image_data"] for body in asked] == expected
    assert [body["input_ids"].count(place) for body in asked] == [len(each) for each in expected]
    once = sum(map(len, {*shown}))
    assert once < row["held_bytes"] < once + 20_000
    assert (account["forks"], faults(calls_of(engine, model), account["samples"], model)) == (
        [],
        [],
    )
    (sample,) = account["samples"]
    assert [account["images"][digest] for digest in sample["images"]] == shown
    assert len(account["messages"]) == 8


async def test_spilled_screenshots_reach_the_engine_and_the_account_intact(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agent, model = Chat(), ScriptedAgent(tokenizer, SCRIPT)
    settings = ("interception.max_blob_bytes=1", f"interception.spill_folder={tmp_path}")
    args = [arg for setting in settings for arg in ("--set", setting)]
    async with (
        ScriptedEngine(model.next_token) as engine,
        before(engine, folder, tmp_path, *args) as gateway,
    ):
        opened = await gateway.open()
        agent.ask(agent.text("look"), agent.image(shot(1)))
        for number in (2, 3, 4):
            status, raw = await send(gateway, opened, agent)
            assert status == 200
            await _until_spilled(gateway, sum([len(shot(n)) for n in range(1, number)]))
            (call,) = agent.keep(orjson.loads(raw))
            # The first message is edited, so that everything is read again.
            agent.shown[0] = {"role": "user", "content": [agent.image(shot(1))] * number}
            agent.answer(call, agent.image(shot(number)))
        assert (await send(gateway, opened, agent))[0] == 200
        account = await finish(gateway, opened)
    asked = [request.body for request in engine.seen if request.path == "/generate"]
    assert asked[-1]["image_data"] == [*[shot(1)] * 4, shot(2), shot(3), shot(4)]
    assert sorted(account["images"].values()) == sorted(map(shot, range(1, 5)))


async def test_a_screenshot_lost_on_disk_is_a_fault_of_the_machine_and_of_no_engine(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agent, model = Chat(), ScriptedAgent(tokenizer, SCRIPT)
    (spill_folder := tmp_path / "spill").mkdir()
    settings = ("interception.max_blob_bytes=1", f"interception.spill_folder={spill_folder}")
    args = [arg for setting in settings for arg in ("--set", setting)]
    async with (
        ScriptedEngine(model.next_token) as engine,
        before(engine, folder, tmp_path, *args) as gateway,
    ):
        opened, fresh = await gateway.open(), await gateway.open()
        agent.ask(agent.text("look"), agent.image(shot(1)))
        status, raw = await send(gateway, opened, agent)
        assert status == 200
        await _until_spilled(gateway, len(shot(1)))
        lose_files(spill_folder, gateway.process.pid)
        (call,) = agent.keep(orjson.loads(raw))
        first = agent.shown[:1]
        agent.answer(call, agent.text("nothing"))
        status, raw = await send(gateway, opened, agent)
        assert (status, orjson.loads(raw)["error"]["code"]) == (503, "content_lost")
        assert (await gateway.admin("GET", "/healthz"))[1]["engines"][0]["phase"] == "ready"
        # A request that sends the image again is answered, though another session holds the lost
        # one.
        agent.shown = first
        assert (await send(gateway, fresh, agent))[0] == 200
        _, row = await gateway.admin("GET", f"/admin/sessions/{opened['session_id']}")
        assert "cannot be read back" in row["fault"]


async def _until_spilled(gateway: Gateway, num_bytes: int) -> None:
    """Poll until all of its blobs are spilled."""
    async with asyncio.timeout(PATIENCE_S):
        while f"rollmesh_spilled_bytes {num_bytes}.0" not in await _figures(gateway):
            pass


async def _figures(gateway: Gateway) -> str:
    return str((await gateway.admin("GET", "/metrics"))[1])


async def test_a_turn_that_an_engine_cut_resumes_with_its_images(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agent, model = Chat(), ScriptedAgent(tokenizer, SCRIPT)
    agent.ask(agent.text("look"), agent.image(shot(1)))
    async with (
        ScriptedEngine(model.next_token) as engine,
        before(engine, folder, tmp_path) as gateway,
    ):
        opened = await gateway.open()
        engine.faults.append(Fault.CUT)
        status, raw = await send(gateway, opened, agent, is_stream=True)
        assert (status, raw.endswith(b"data: [DONE]\n\n")) == (200, True)
        account = await finish(gateway, opened)
    cut, rest = [request.body for request in engine.seen if request.path == "/generate"]
    assert rest["input_ids"][:-1] == cut["input_ids"]
    assert cut["image_data"] == rest["image_data"] == [shot(1)]
    assert faults(calls_of(engine, model), account["samples"], model) == []


@pytest.mark.parametrize("kind", AGENTS)
async def test_an_unreadable_image_is_a_one_line_error(
    kind: type[Chat], folder: Path, tmp_path: Path
) -> None:
    refused = [
        ("data:image/png;base64,AAA?" + "A" * 100_000, "its base64 is invalid"),
        ("data:text/html;base64,aGk=", "expected data:image/...;base64,..."),
        ("file:///etc/passwd", "expected a data: or http(s) address"),
    ]
    async with (
        ScriptedEngine() as engine,
        before(engine, folder, tmp_path, "--set", "interception.max_body_bytes=200000") as gateway,
    ):
        opened = await gateway.open()
        for address, why in refused:
            agent = kind()
            agent.ask(agent.text("look"), agent.image(address))
            status, raw = await send(gateway, opened, agent)
            message = orjson.loads(raw)["error"]["message"]
            assert (status, message.count("\n"), why in message, len(message) < 200) == (
                400,
                0,
                True,
                True,
            )
        large = kind()
        large.ask(large.text("look"), large.image("data:image/png;base64," + "A" * 200_000))
        assert (await send(gateway, opened, large))[0] == 413
        assert (await gateway.admin("GET", f"/admin/sessions/{opened['session_id']}"))[1][
            "held_bytes"
        ] == 0
    assert engine.num_seen("/generate") == 0


@pytest.mark.parametrize("kind", AGENTS)
async def test_a_text_only_model_refuses_images(kind: type[Chat], tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    async with ScriptedEngine() as engine, before(engine, model, tmp_path) as gateway:
        opened = await gateway.open()
        agent = kind()
        agent.ask(agent.text("look"), agent.image(shot(1)))
        status, raw = await send(gateway, opened, agent)
        body = orjson.loads(raw)
    assert (status, agent.code_of(body)) == (400, "unsupported_content")
    assert body["error"]["message"] == "this model reads text only, and a message shows an image"


@pytest.mark.parametrize("kind", AGENTS)
async def test_a_relay_passes_images_on_and_keeps_each_once(
    kind: type[Chat], tmp_path: Path
) -> None:
    agent = kind()
    agent.ask(agent.text("look"), agent.image(shot(1)), agent.image(ELSEWHERE))
    async with (
        ScriptedProvider([ProviderResponse(), ProviderResponse()]) as provider,
        serving(tmp_path, "--capture", "relay", "--engine", provider.url) as gateway,
    ):
        opened = await gateway.open()
        sent = [encoded(agent)]
        await send(gateway, opened, agent)
        agent.ask(agent.text("again"), agent.image(shot(1)))
        sent.append(encoded(agent))
        await send(gateway, opened, agent)
        row = (await gateway.admin("GET", f"/admin/sessions/{opened['session_id']}"))[1]
    assert [request.body for request in provider.seen] == sent
    assert len(shot(1)) < row["held_bytes"] < len(shot(1)) + 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", AGENTS)
async def test_a_gateway_killed_at_every_turn_recovers_the_screenshots_and_messages(
    kind: type[Chat], folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    accounts = []
    async with ScriptedEngine(ScriptedAgent(tokenizer, SCRIPT).next_token) as engine:
        args = ["--model-dir", str(folder), "--engine", engine.url]
        async with lasting(tmp_path, *args) as gateway:
            for is_shaken in (False, True):
                agent, opened = kind(), await gateway.gateway.open(seed=7)
                agent.ask(agent.text("look"), agent.image(shot(1)))
                for number in (2, 3, 4):
                    status, raw = await send(gateway.gateway, opened, agent)
                    assert status == 200
                    (call,) = agent.keep(orjson.loads(raw))
                    agent.answer(call, agent.image(shot(number)))
                    if is_shaken:
                        await gateway.restart()
                assert (await send(gateway.gateway, opened, agent))[0] == 200
                accounts.append(await finish(gateway.gateway, opened))
    calm, shaken = ({k: a[k] for k in ("samples", "forks", "healed", "images")} for a in accounts)
    assert shaken == calm
    asked = [request.body for request in engine.seen if request.path == "/generate"]
    assert asked[4:] == [{**body, "rid": asked[4 + n]["rid"]} for n, body in enumerate(asked[:4])]
