"""A dialect that one `register` call adds is served by the gateway and by the relay."""

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.core.types import DialectName
from rollmesh.runtime.chat import Delta, Turn
from rollmesh.serve.interception.dialects.answer_parts import sse_event
from rollmesh.serve.interception.dialects.dialect import (
    AnswerStream,
    ApiSchema,
    DecodedRequest,
    Json,
    ReplyView,
    RequestBody,
    UpstreamChoice,
    object_schema,
)
from rollmesh.serve.interception.dialects.registry import COUNT_DIALECTS, DIALECTS, register
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider
from tests.unit.serve.interception.conftest import StartAgent
from tests.unit.serve.interception.relay.conftest import MakeRelay

ANSWER = msgspec.json.encode({"id": "toy-1", "text": "4"})
EVENTS = b'data: {"piece":"I guess"}\n\n', b'data: {"piece":" 4"}\n\n', b'data: {"type":"bye"}\n\n'


class ToyRequest:
    """A decoded request of the toy dialect."""

    def __init__(self, turn: Turn) -> None:
        self.turns: tuple[Turn, ...] = (turn,)
        self.is_streamed = turn.stream

    def whole(self, views: Sequence[ReplyView]) -> bytes:
        return msgspec.json.encode({"text": views[0].answer.content})

    def stream(self, views: Sequence[ReplyView]) -> AnswerStream:
        return ToyStream()


class ToyStream:
    """An answer stream of the toy dialect."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        return sse_event({"piece": delta.content})

    def end(self, choice: int, delta: Delta) -> bytes:
        return self.piece(choice, delta)

    def close(self) -> bytes:
        return sse_event({"type": "bye"})

    def error(self, error: SessionError) -> bytes:
        return sse_event({"toy_error": error.code})


class ToyBody(msgspec.Struct):
    """The request body of the toy dialect."""

    lines: list[str]
    stream: bool = False


TOY_SCHEMA = ApiSchema("ToyAnswer", ToyBody, object_schema(text={}), "ToyError", object_schema())


class ToyDialect:
    """A minimal dialect."""

    name: DialectName = "toy"
    route = "/toy"
    count_route = "/toy/count"
    history_key = "lines"
    end_events = frozenset({"bye"})
    error_events = frozenset[str]()
    prefers_x_api_key = True
    schema = TOY_SCHEMA

    def decode(self, request: RequestBody) -> DecodedRequest:
        body = msgspec.json.decode(request.body, type=ToyBody)
        lines = [msgspec.json.encode({"role": "user", "content": line}) for line in body.lines]
        turn = Turn(messages=lines, stream=body.stream, digest=request.digest, dialect=self.name)
        return ToyRequest(turn)

    def error(self, error: SessionError) -> bytes:
        return msgspec.json.encode({"toy_error": error.code})

    def error_event(self, error: SessionError) -> bytes:
        return sse_event({"toy_error": error.code})

    def read_answer(self, events: Sequence[Json]) -> list[UpstreamChoice]:
        text = "".join([str(event.get("piece") or event.get("text") or "") for event in events])
        return [UpstreamChoice({"text": text}, "stop")]


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    register(ToyDialect())
    yield
    del DIALECTS["/toy"], COUNT_DIALECTS["/toy/count"]


async def test_the_gateway_serves_streams_counts_and_refuses_in_a_new_dialect(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent("4", "5")
    status, answer = await agent.answer({"lines": ["guess"]}, "/v1/toy")
    assert (status, answer) == (200, {"text": "4"})
    events = await agent.events({"lines": ["guess", "again"], "stream": True}, "/v1/toy")
    assert "".join([data.get("piece", "") for _, data in events]) == "5"
    assert events[-1] == ("", {"type": "bye"})
    status, counted = await agent.answer({"lines": ["guess"]}, "/v1/toy/count")
    assert (status, list(counted)) == (200, ["input_tokens"])
    async with agent.post({"lines": []}, "/v1/toy", {"Authorization": "Bearer x"}) as response:
        assert (response.status, await response.json()) == (401, {"toy_error": "invalid_api_key"})
    agent.opened.session.seal("the test is over")
    nodes = agent.opened.session.record().nodes
    assert {node.dialect for node in nodes if node.dialect} == {"toy"}


async def test_the_openapi_document_has_a_new_dialect(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with agent.client.get(agent.base + "/openapi.json") as response:
        document = await response.json()
    assert {"/v1/toy", "/v1/toy/count"} <= set(document["paths"])
    assert {"ToyBody", "ToyAnswer", "ToyError"} <= set(document["components"]["schemas"])


async def test_the_relay_forwards_and_records_a_new_dialect(make_relay: MakeRelay) -> None:
    ask = {"lines": ["guess"], "temperature": 0.5}
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider)
        assert await relay.read(ask, "/v1/toy") == (200, ANSWER)
        assert await relay.read({"lines": ["guess", "4", "again"]}, "/v1/toy") == (200, ANSWER)
        assert provider.seen[0].path == "/v1/toy"
        account = relay.account()
    assert [call["route"] for call in account["calls"]] == ["/toy", "/toy"]
    assert account["calls"][0]["settings"] == {"temperature": 0.5}
    assert account["calls"][0]["choices"][0]["message"] == {"text": "4"}
    assert account["messages"] == ["guess", "4", "again", {"text": "4"}]
    assert account["forks"] == []


async def test_the_relay_finds_the_end_of_a_new_dialects_streams(make_relay: MakeRelay) -> None:
    kind = (("Content-Type", "text/event-stream"),)
    async with ScriptedProvider(lambda _: ProviderResponse(EVENTS, headers=kind)) as provider:
        relay = await make_relay(provider)
        assert await relay.read({"lines": ["guess"]}, "/v1/toy") == (200, b"".join(EVENTS))
        account = relay.account()
    assert account["calls"][0]["choices"][0]["message"] == {"text": "I guess 4"}
    assert account["calls"][0]["state"] == "whole"


async def test_the_relay_reports_its_own_errors_in_a_new_dialect(make_relay: MakeRelay) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider)
        relay.session.seal("the test is over")
        status, body = await relay.read({"lines": ["guess"]}, "/v1/toy")
    assert (status, msgspec.json.decode(body)) == (410, {"toy_error": "session_sealed"})


def test_a_route_is_registered_once() -> None:
    with pytest.raises(ValueError, match="/toy"):
        register(ToyDialect())
