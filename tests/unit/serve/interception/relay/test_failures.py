"""Failed answers: what the agent receives, what is recorded, and what a retry does."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollmesh.core.config import InterceptionConfig, JournalConfig
from rollmesh.core.process import listen
from rollmesh.core.types import Outcome
from rollmesh.engine.http import target
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.events import RelayReplay, decode
from rollmesh.serve.interception.relay.upstreams import MAX_REDIRECTS, ForwardedRequest, redirected
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.upstreams import ProviderRequest, ProviderResponse, ScriptedProvider, events
from tests.unit.serve.interception.relay.conftest import PROVIDER_KEY, MakeRelay, Relay

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "guess"}]}
RETRY = {"x_stainless_retry_count": "1"}


def chunk(text: str, finish_reason: str | None, number: int = 3) -> bytes:
    """Return a chunk of a chat with one exact token."""
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": text},
        "finish_reason": finish_reason,
        "token_ids": [number],
        "logprobs": {"content": [{"logprob": -0.5}]},
    }
    return orjson.dumps({"id": "c1", "choices": [choice], "prompt_token_ids": [1, 2]})


def named(**data: Any) -> bytes:
    """Return a named event, as the newer APIs send it."""
    return orjson.dumps(data)


MESSAGE_START = named(type="message_start", message={"id": "m1", "content": [], "usage": {}})
BLOCK = named(type="content_block_start", index=0, content_block={"type": "text", "text": "4"})
CREATED = named(type="response.created", response={"id": "r1", "error": None, "output": []})
PART = {"type": "output_text", "text": "4"}
OUTPUT = [{"type": "message", "role": "assistant", "content": [PART]}]
COMPLETED = named(type="response.completed", response={"status": "completed", "output": OUTPUT})
BEGUN = {
    "/chat/completions": [chunk("4", None)],
    "/completions": [named(choices=[{"index": 0, "text": "4", "finish_reason": None}])],
    "/messages": [MESSAGE_START, BLOCK],
    "/responses": [CREATED, named(type="response.output_text.delta", delta="4")],
}
"""Unfinished streams, by route."""
FINISHED = {
    "/chat/completions": [chunk("4", "stop")],
    "/completions": [named(choices=[{"index": 0, "text": "4", "finish_reason": "stop"}])],
    "/messages": [MESSAGE_START, BLOCK, named(type="message_delta", delta={"stop_reason": "x"})],
    "/responses": [CREATED, COMPLETED],
}
"""Streams without their end event, for routes whose finish reason is not in that event."""
WHOLE = {
    "/chat/completions": [*FINISHED["/chat/completions"], b"[DONE]"],
    "/completions": [*FINISHED["/completions"], b"[DONE]"],
    "/messages": [*FINISHED["/messages"], named(type="message_stop")],
    "/responses": FINISHED["/responses"],
}
ROUTES = [*BEGUN]


def raw(data: bytes) -> ProviderResponse:
    """Return a stream of these bytes."""
    return ProviderResponse((data,), headers=(("Content-Type", "text/event-stream"),))


def outcome_of(relay: Relay) -> Outcome:
    """Return the outcome of a session whose finisher names none."""
    outcome: Outcome = relay.session.natural_outcome
    return outcome


async def answered(
    make_relay: MakeRelay, sent: ProviderResponse, route: str = "/chat/completions"
) -> tuple[Relay, bytes]:
    """Return a relay whose only call got this answer, and the bytes that the agent received."""
    async with ScriptedProvider([sent]) as provider:
        relay: Relay = await make_relay(provider)
        _, body = await relay.read({**ASK, "stream": True}, f"/v1{route}")
    return relay, body


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_without_its_end_event_is_cut_and_its_retry_is_a_new_call(
    make_relay: MakeRelay, route: str
) -> None:
    sent = [events(*BEGUN[route]), events(*WHOLE[route])]
    async with ScriptedProvider(sent) as provider:
        relay = await make_relay(provider)
        _, body = await relay.read({**ASK, "stream": True}, f"/v1{route}")
        last = orjson.loads(body.rpartition(b"data: ")[2])
        assert "error" in last, "the agent must not take half an answer for a whole one"
        assert "ended without its end event" in relay.session.fault
        assert outcome_of(relay) is Outcome.INFRA_ERROR
        again = await relay.read({**ASK, "stream": True}, f"/v1{route}", **RETRY)
        assert again == (200, b"".join(sent[1].pieces))
        assert outcome_of(relay) is Outcome.COMPLETED
    assert len(provider.seen) == 2
    account = relay.account()
    assert [call["state"] for call in account["calls"]] == ["cut", "whole"]
    assert "ended without its end event" in account["calls"][0]["error"]
    is_sampled = route == "/chat/completions"
    assert [sample["token_ids"] for sample in account["samples"]] == [[1, 2, 3]] * is_sampled


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_with_a_finish_reason_is_whole_without_an_end_event(
    make_relay: MakeRelay, route: str
) -> None:
    sent = events(*FINISHED[route])
    relay, body = await answered(make_relay, sent, route)
    assert body == b"".join(sent.pieces)
    assert outcome_of(relay) is Outcome.COMPLETED
    account = relay.account()
    assert account["calls"][0]["state"] == "whole"
    assert len(account["samples"]) == (route == "/chat/completions")


FAILED_STREAMS = {
    "vllm": ("/chat/completions", b'data: {"error": {"message": "boom", "code": 500}}\n\n', True),
    "older vllm": ("/completions", b'data: {"object": "error", "message": "boom"}\n\n', True),
    "sglang": (
        "/chat/completions",
        b'data: {"error": {"object": "error", "message": "boom"}}\n\n',
        True,
    ),
    "no done": ("/chat/completions", b'data: {"error": {"message": "boom"}}\n\n', False),
    "a text": ("/chat/completions", b'data: {"error": "boom"}\n\n', True),
    "openrouter": (
        "/chat/completions",
        b'data: {"choices":[{"delta":{},"finish_reason":"error","error":{"message":"boom"}}]}\n\n',
        True,
    ),
    "aborted": (
        "/chat/completions",
        b'data: {"choices":[{"delta":{},"finish_reason":"abort"}],"note":"boom"}\n\n',
        True,
    ),
    "anthropic": (
        "/messages",
        b'event: error\ndata: {"type":"error","error":{"type":"x","message":"boom"}}\n\n',
        False,
    ),
    "anthropic, named alone": ("/messages", b"event: error\ndata: boom\n\n", False),
    "responses, failed": (
        "/responses",
        b'data: {"type":"response.failed","response":{"error":{"message":"boom"}}}\n\n',
        False,
    ),
    "responses, error": (
        "/responses",
        b'event: error\ndata: {"type":"error","message":"boom","code":"server_error"}\n\n',
        False,
    ),
}


@pytest.mark.parametrize("kind", FAILED_STREAMS)
async def test_a_stream_with_an_error_event_is_forwarded_unchanged_and_is_no_answer(
    make_relay: MakeRelay, kind: str
) -> None:
    route, event, has_done = FAILED_STREAMS[kind]
    begun = b"".join([b"data: %b\n\n" % each for each in BEGUN[route]])
    sent = raw(begun + event + (b"data: [DONE]\n\n" if has_done else b""))
    async with ScriptedProvider([sent, events(*WHOLE[route])]) as provider:
        relay = await make_relay(provider)
        answer = await relay.read({**ASK, "stream": True}, f"/v1{route}")
        assert answer == (200, b"".join(sent.pieces))
        assert "abort" in relay.session.fault or "boom" in relay.session.fault
        assert outcome_of(relay) is Outcome.INFRA_ERROR
        await relay.read({**ASK, "stream": True}, f"/v1{route}", **RETRY)
    assert len(provider.seen) == 2, "its retry is a new call"
    account = relay.account()
    assert [call["state"] for call in account["calls"]] == ["failed", "whole"]
    assert account["calls"][0]["choices"] == []
    assert account["calls"][0]["error"]
    assert len(account["samples"]) == (route == "/chat/completions")


FAILED_BODIES = {
    "/chat/completions": b'{"error": {"message": "boom", "type": "server_error", "code": 500}}',
    "/completions": b'{"object": "error", "message": "boom", "code": 500}',
    "/messages": b'{"type": "error", "error": {"type": "api_error", "message": "boom"}}',
    "/responses": b'{"id": "r", "status": "failed", "error": {"message": "boom"}, "output": []}',
}


@pytest.mark.parametrize("route", ROUTES)
async def test_an_error_object_with_status_200_is_a_failed_call(
    make_relay: MakeRelay, route: str
) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse((FAILED_BODIES[route],))) as provider:
        relay = await make_relay(provider)
        assert await relay.read(ASK, f"/v1{route}") == (200, FAILED_BODIES[route])
        await relay.read(ASK, f"/v1{route}", **RETRY)
    assert len(provider.seen) == 2
    assert "boom" in relay.session.fault
    assert outcome_of(relay) is Outcome.INFRA_ERROR
    account = relay.account()
    assert [call["state"] for call in account["calls"]] == ["failed", "failed"]
    assert account["samples"] == account["messages"] == []


JSON = (("Content-Type", "application/json"),)
UNREAD = {
    "html": (
        ProviderResponse((b"<html>busy</html>",), headers=(("Content-Type", "text/html"),)),
        "text/html",
    ),
    "cut json": (ProviderResponse((b'{"choices": [{"mess',), headers=JSON), "not JSON"),
    "no body": (ProviderResponse((b"",), headers=JSON), "the body is empty"),
    "a list": (ProviderResponse((b"[]",), headers=JSON), "not an object"),
    "no answer": (
        ProviderResponse((b'{"detail": "?"}',), headers=JSON),
        "not an answer of /chat/completions",
    ),
    "empty stream": (raw(b""), "the stream is empty"),
    "comments": (raw(b": hi\n\n: hi\n\n"), "the stream is empty"),
    "no chunks": (raw(b"data: ?\n\ndata: [DONE]\n\n"), "1 of 2 data lines"),
}


@pytest.mark.parametrize("kind", UNREAD)
async def test_an_unreadable_answer_with_status_200_is_recorded_with_the_reason(
    make_relay: MakeRelay, kind: str
) -> None:
    sent, reason = UNREAD[kind]
    relay, _ = await answered(make_relay, sent)
    assert outcome_of(relay) is Outcome.INFRA_ERROR
    [call] = relay.account()["calls"]
    assert call["state"] == "unread"
    assert reason in call["unread"]
    assert reason in call["error"]


@pytest.mark.parametrize("bad", [b"ping", b'{"choices":[{"del', b"7"])
async def test_one_unreadable_line_does_not_lose_the_answer(
    make_relay: MakeRelay, bad: bytes
) -> None:
    """Its text is kept; it trains only if the engine's token count shows that the line had no
    token.
    """
    used = named(choices=[], usage={"completion_tokens": 2})
    for num_tokens, more in ((1, [used]), (1, []), (2, [used])):
        good = (
            [chunk("a", None, 3), chunk("b", "stop", 4)]
            if num_tokens == 2
            else [chunk("ab", "stop")]
        )
        sent = events(good[0], bad, *good[1:], *more, b"[DONE]")
        relay, body = await answered(make_relay, sent)
        assert body == b"".join(sent.pieces)
        assert outcome_of(relay) is Outcome.COMPLETED
        account = relay.account()
        [call] = account["calls"]
        assert call["state"] == "whole"
        assert "1 of" in call["unread"]
        assert call["choices"][0]["message"]["content"] == "ab"
        is_sure = num_tokens == 2
        assert ("whole_stream" in call["choices"][0]["lacks"]) is not is_sure
        assert len(account["samples"]) == is_sure


@pytest.mark.parametrize("status", [401, 402, 403, 408, 409, 425, 429, 500, 503, 304])
async def test_a_last_call_that_the_provider_failed_to_serve_is_an_infra_error(
    make_relay: MakeRelay, status: int
) -> None:
    async with ScriptedProvider(
        [ProviderResponse((b'{"error":{"message":"no"}}',), status)]
    ) as provider:
        relay = await make_relay(provider)
        assert (await relay.read(ASK))[0] == status
    assert relay.session.fault == f"the upstream answered {status}"
    assert outcome_of(relay) is Outcome.INFRA_ERROR


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b'{"error":{"message":"no model x","code":"model_not_found"}}', Outcome.AGENT_ERROR),
        (b'{"object":"error","message":"The model `x` does not exist."}', Outcome.AGENT_ERROR),
        (b'{"type":"error","error":{"type":"not_found_error"}}', Outcome.AGENT_ERROR),
        (b'{"detail":"Not Found"}', Outcome.INFRA_ERROR),
        (b"<html>404</html>", Outcome.INFRA_ERROR),
    ],
)
async def test_a_404_blames_the_agent_only_if_the_api_itself_answered_it(
    make_relay: MakeRelay, body: bytes, outcome: Outcome
) -> None:
    async with ScriptedProvider([ProviderResponse((body,), 404)]) as provider:
        relay = await make_relay(provider)
        assert await relay.read(ASK) == (404, body)
    assert outcome_of(relay) is outcome


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_request_leaves_the_outcome_to_the_finisher(
    make_relay: MakeRelay, status: int
) -> None:
    """The agent may have ended by itself because the model's context was full."""
    async with ScriptedProvider(
        [ProviderResponse((b'{"error":{"message":"no"}}',), status)]
    ) as provider:
        relay = await make_relay(provider)
        await relay.read(ASK)
    assert outcome_of(relay) is Outcome.COMPLETED


GOOD = orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "4"}}]})


def moved(place: str, status: int = 307) -> ProviderResponse:
    return ProviderResponse((b"moved",), status, (("Location", place),))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_to_the_same_origin_is_followed_with_method_body_and_key(
    make_relay: MakeRelay, status: int
) -> None:
    def script(seen: ProviderRequest) -> ProviderResponse:
        return (
            ProviderResponse((GOOD,))
            if seen.path.startswith("/v2")
            else moved("/v2/chat?a=b", status)
        )

    async with ScriptedProvider(script) as provider:
        relay = await make_relay(provider)
        assert await relay.read(ASK) == (200, GOOD)
        assert relay.upstreams.all[0].num_running == 0
    first, second = provider.seen
    assert (second.method, second.path, second.body) == ("POST", "/v2/chat?a=b", first.body)
    assert ("authorization", f"Bearer {PROVIDER_KEY}") in second.headers
    assert relay.account()["calls"][0]["state"] == "whole"


async def test_a_redirect_to_another_origin_is_refused_and_gets_neither_key_nor_prompt(
    make_relay: MakeRelay,
) -> None:
    async with (
        ScriptedProvider([]) as other,
        ScriptedProvider(lambda _: moved(f"{other.url}/v1/chat/completions")) as provider,
    ):
        relay = await make_relay(provider)
        status, body = await relay.read(ASK)
        assert status == 503
        assert "redirects (307)" in orjson.loads(body)["error"]["message"]
        assert other.seen == []
        assert other.url.encode() not in body
        assert other.url in relay.session.fault, "the operator needs the address"
        assert outcome_of(relay) is Outcome.INFRA_ERROR


@pytest.mark.parametrize(
    "sent", [moved("https://other.example/v1"), moved("ftp://h/"), moved(""), moved("/x", 303)]
)
async def test_redirects_to_other_schemes_or_methods_are_refused(
    make_relay: MakeRelay, sent: ProviderResponse
) -> None:
    async with ScriptedProvider(lambda _: sent) as provider:
        relay = await make_relay(provider)
        status, body = await relay.read(ASK)
    assert (status, len(provider.seen)) == (503, 1)
    assert b"redirects" in body


SENT = target("POST", "http://host:8000/v1/chat/completions")


@pytest.mark.parametrize(
    ("place", "origin"),
    [
        ("/v2/chat", "http://host:8000"),
        ("chat?x=1#part", "http://host:8000"),
        ("https://host/v1", "https://host:443"),
        ("https://HOST:8443/v1", "https://host:8443"),
        ("http://host/v1", ""),
        ("http://host.example:8000/v1", ""),
        ("https://other/v1", ""),
        ("https://a:b@host/v1", ""),
        ("http://[/", ""),
        ("/with space", ""),
    ],
)
def test_a_redirect_is_allowed_on_its_origin_or_to_https_on_its_host(
    place: str, origin: str
) -> None:
    forwarded = ForwardedRequest(b"POST", b"/chat/completions", b"Authorization: Bearer k\r\n")
    found = redirected(SENT, forwarded, place)
    assert (found.origin if found else "") == origin
    if found:
        assert found.is_tls == origin.startswith("https")
        assert found.prelude.startswith(b"POST /")
        assert b"#" not in found.prelude
        secure = target("POST", "https://host/v1")
        assert redirected(secure, forwarded, "http://host/v1") is None


async def test_a_redirect_loop_ends(make_relay: MakeRelay) -> None:
    async with ScriptedProvider(lambda _: moved("/v1/chat/completions")) as provider:
        relay = await make_relay(provider)
        status, body = await relay.read(ASK)
    assert (status, len(provider.seen)) == (503, MAX_REDIRECTS + 1)
    assert b"redirects more than" in body


async def test_after_a_refused_redirect_another_upstream_is_tried(
    make_relay: MakeRelay,
) -> None:
    async with (
        ScriptedProvider([moved("https://other.example/v1")]) as one,
        ScriptedProvider([ProviderResponse((GOOD,))]) as two,
    ):
        relay = await make_relay(one, two)
        assert await relay.read(ASK) == (200, GOOD)


async def test_errors_to_agents_name_no_upstream_host(make_relay: MakeRelay) -> None:
    with listen("127.0.0.1:0") as unused:
        port = unused.getsockname()[1]
    relay = await make_relay(f"http://127.0.0.1:{port}")
    _, body = await relay.read(ASK)
    assert orjson.loads(body)["error"]["message"] == "the upstream: cannot connect"
    assert str(port) in relay.session.fault


@pytest.mark.parametrize("silence_s", [0.0, 20.0])
async def test_an_upstream_that_sends_nothing_until_the_agent_gives_up_is_an_infra_error(
    make_relay: MakeRelay, silence_s: float
) -> None:
    clock = FakeClock()
    async with ScriptedProvider(lambda _: ProviderResponse((GOOD,))) as provider:
        provider.holds = provider.holds_first = True
        relay = await make_relay(provider, clock=clock)
        asking = asyncio.ensure_future(relay.read(ASK))
        await provider.until(lambda: len(provider.seen) == 1)
        clock.advance(silence_s)
        assert bool(relay.session.fault) == bool(silence_s), "even while the agent waits"
        asking.cancel()
        await provider.until(lambda: provider.num_left == 1)
    assert f"has sent nothing for {silence_s:.0f} s" in relay.session.fault
    assert outcome_of(relay) is Outcome.INFRA_ERROR


@pytest.mark.parametrize("silence_s", [0.0, 20.0])
async def test_leaving_a_stream_is_an_infra_error_only_if_the_stream_had_stalled(
    make_relay: MakeRelay, silence_s: float
) -> None:
    clock = FakeClock()
    async with ScriptedProvider(lambda _: events(chunk("4", None), b"[DONE]")) as provider:
        provider.holds = True
        relay = await make_relay(provider, clock=clock, config=InterceptionConfig(keepalive_s=15))
        async with relay.post({**ASK, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            clock.advance(silence_s)
            response.close()
        await provider.until(lambda: provider.num_left == 1)
    outcome = Outcome.INFRA_ERROR if silence_s else Outcome.COMPLETED
    assert outcome_of(relay) is outcome


@pytest.mark.parametrize(
    "sent", [ProviderResponse((b"<html>",)), raw(b'data: {"error":"boom"}\n\n')]
)
async def test_a_failed_answer_stays_failed_after_a_restart_of_the_gateway(
    make_relay: MakeRelay, tmp_path: Path, sent: ProviderResponse
) -> None:
    archive = GatewayJournal(tmp_path / "journal", JournalConfig())
    async with ScriptedProvider(lambda _: sent) as provider:
        relay = await make_relay(provider, archive=archive)
        await relay.read(ASK)
    replay = RelayReplay(lambda _: b"", 2**20)
    for _, frames in archive.journal.replay():
        for event in decode(frames[1]) if len(frames) > 1 else ():
            replay.take(event)
    again = relay.capture.create(relay.session.session_id, None, replay)
    assert again.fault == relay.session.fault != ""
    assert again.natural_outcome is Outcome.INFRA_ERROR
    archive.close_journal()
