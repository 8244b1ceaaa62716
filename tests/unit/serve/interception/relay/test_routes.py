"""The relay over real sockets: what it forwards, what it refuses, and which reader gets which
answer.
"""

import asyncio
import gzip
import random
import zlib
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.process import listen
from rollmesh.testing.upstreams import ProviderRequest, ProviderResponse, ScriptedProvider, events
from tests.unit.serve.interception.relay.conftest import PROVIDER_KEY, MakeRelay

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "guess"}]}
ANSWER = b'{ "id":"r1",  "choices":[{"message":{"role":"assistant","content":"4"}}]}\n'
CHUNK = b'{"choices":[{"index":0,"delta":{"content":"4"},"finish_reason":"stop"}]}'
LAST = {
    "/chat/completions": b"data: [DONE]\n\n",
    "/completions": b"data: [DONE]\n\n",
    "/responses": b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    "/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}
"""The end of a stream, by route."""
ROUTES = [*LAST]


async def test_an_answer_is_forwarded_byte_for_byte_with_status_and_headers(
    make_relay: MakeRelay,
) -> None:
    sent = ProviderResponse(
        (ANSWER,), 200, (("Content-Type", "application/json"), ("X-Request-Id", "q7"))
    )
    async with ScriptedProvider([sent]) as provider:
        relay = await make_relay(provider)
        body = msgspec.json.format(msgspec.json.encode(ASK), indent=3)
        async with relay.post(body, "/a/v1/chat/completions?beta=true", X_Own="1") as response:
            assert (response.status, await response.read()) == (200, ANSWER)
            assert response.headers["X-Request-Id"] == "q7"
            assert response.headers["Content-Length"] == str(len(ANSWER))
    [seen] = provider.seen
    assert (seen.method, seen.path, seen.body) == (
        "POST",
        "/v1/chat/completions?beta=true",
        body,
    )
    assert ("x-own", "1") in seen.headers


def secrets_in(seen: ProviderRequest, *secrets: str) -> list[str]:
    text = repr((seen.path, seen.headers, seen.body))
    return [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("route", ROUTES)
async def test_the_providers_key_replaces_the_sessions_key(
    make_relay: MakeRelay, route: str
) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse()) as provider:
        relay = await make_relay(provider)
        key, path = relay.opened.api_key, relay.opened.path_secret
        await relay.read(ASK, f"/v1{route}")
        await relay.read(ASK, f"/v1{route}", Authorization="", x_api_key=key)
        await relay.read(ASK, f"/s/{path}{route}?x={path}", Referer=f"http://h/s/{path}/v1")
        by_bearer, by_header, by_path = provider.seen
    assert [secrets_in(seen, key, path) for seen in provider.seen] == [[], [], []]
    assert ("authorization", f"Bearer {PROVIDER_KEY}") in by_bearer.headers
    assert ("x-api-key", PROVIDER_KEY) in by_header.headers
    assert len(secrets_in(by_path, PROVIDER_KEY)) == 1
    assert by_path.path == f"/v1{route}"


async def test_without_a_providers_key_none_is_sent(make_relay: MakeRelay) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse()) as provider:
        relay = await make_relay(provider.url + "/v1", key="")
        await relay.read(ASK)
    [seen] = provider.seen
    assert not {"authorization", "x-api-key"} & {name for name, _ in seen.headers}
    assert seen.path == "/v1/chat/completions"


@pytest.mark.parametrize("route", ROUTES)
async def test_stream_pieces_are_forwarded_at_once_and_the_end_when_the_answer_is_whole(
    make_relay: MakeRelay, route: str
) -> None:
    first, second, last = b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', LAST[route]
    # The last event is followed only by the end of the answer, which is held too.
    sent = msgspec.structs.replace(events(), pieces=(first, second, last, b""))
    async with ScriptedProvider([sent]) as provider:
        provider.holds = True
        relay = await make_relay(provider)
        async with relay.post({**ASK, "stream": True}, f"/v1{route}") as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await response.content.readexactly(len(first)) == first
            await provider.release()
            assert await response.content.readexactly(len(second)) == second
            await provider.release()
            await relay.until_received(len(first + second + last))
            for _ in range(20):  # all written bytes have arrived after a few iterations
                await asyncio.sleep(0)
            assert response.content.read_nowait() == b""
            await provider.release()
            assert await response.read() == last
    assert relay.routes.num_exchanges == {(route.strip("/"), "delivered"): 1}
    assert relay.session.is_busy is False


@pytest.mark.parametrize("held", ["head", "stream"])
async def test_when_an_agent_disconnects_its_upstream_call_ends_at_once(
    make_relay: MakeRelay, held: str
) -> None:
    async with ScriptedProvider(lambda _: events(CHUNK, b"[DONE]")) as provider:
        provider.holds, provider.holds_first = True, held == "head"
        relay = await make_relay(provider)
        asking = asyncio.ensure_future(relay.read({**ASK, "stream": True}))
        await provider.until(lambda: len(provider.seen) == 1)
        asking.cancel()
        await provider.until(lambda: provider.num_left == 1)
        assert not relay.session.is_busy
        assert relay.upstreams.all[0].num_running == 0
        assert relay.routes.num_exchanges == {("chat/completions", "abandoned"): 1}
        # A cut answer is void: the retry is another call, and is answered completely.
        await provider.release(2)
        assert (await relay.read({**ASK, "stream": True}, x_stainless_retry_count="1"))[0] == 200
    assert [call["state"] for call in relay.account()["calls"]] == ["cut", "whole"]


@pytest.mark.parametrize("mark", [{"x_stainless_retry_count": "1"}, {"Idempotency_Key": "k"}])
@pytest.mark.parametrize("sent", [ProviderResponse((ANSWER,)), events(CHUNK, b"[DONE]")])
async def test_a_marked_retry_gets_the_same_bytes(
    make_relay: MakeRelay, mark: dict[str, str], sent: ProviderResponse
) -> None:
    async with ScriptedProvider(lambda _: sent) as provider:
        relay = await make_relay(provider)
        first = mark if "Idempotency_Key" in mark else {}
        one = await relay.read(ASK, **first)
        assert await relay.read(ASK, **mark) == one == (200, b"".join(sent.pieces))
        assert len(provider.seen) == 1
        await relay.read(ASK)
        await relay.read({**ASK, "seed": 1}, **mark)
        await relay.read(ASK, "/v1/responses", **mark)
    assert len(provider.seen) == 4


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 529])
async def test_upstream_errors_are_forwarded_with_their_status(
    make_relay: MakeRelay, status: int
) -> None:
    sent = ProviderResponse((b'{"error":{"message":"no"}}',), status, (("Retry-After", "7"),))
    async with ScriptedProvider([sent]) as provider:
        relay = await make_relay(provider)
        async with relay.post(ASK) as response:
            assert response.status == status
            assert response.headers["Retry-After"] == "7"
            assert await response.read() == sent.pieces[0]
    assert bool(relay.session.fault) == (status not in (400, 404))


@pytest.mark.parametrize("route", ROUTES)
async def test_an_unreachable_upstream_is_a_503_in_the_agents_dialect(
    make_relay: MakeRelay, route: str
) -> None:
    with listen("127.0.0.1:0") as unused:
        port = unused.getsockname()[1]
    relay = await make_relay(f"http://127.0.0.1:{port}")
    async with relay.post(ASK, f"/v1{route}") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        error = msgspec.json.decode(await response.read())
    assert "cannot connect" in error["error"]["message"]
    assert (error.get("type") == "error") == (route == "/messages")
    assert "cannot connect" in relay.session.fault


async def test_another_upstream_takes_over_calls_whose_answer_has_not_begun(
    make_relay: MakeRelay,
) -> None:
    with listen("127.0.0.1:0") as unused:
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(dead, provider)
        assert await relay.read(ASK) == (200, ANSWER)
        assert await relay.read({**ASK, "seed": 1}) == (200, ANSWER)
        first, second = relay.upstreams.all
        assert (first.num_running, second.num_running) == (0, 0)
    assert len(provider.seen) == 2


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_the_upstream_cuts_ends_with_an_error_event(
    make_relay: MakeRelay, route: str
) -> None:
    sent = msgspec.structs.replace(events(b'{"n":1}', b"2"), is_cut=True)
    async with ScriptedProvider([sent]) as provider:
        provider.holds = True
        relay = await make_relay(provider)
        async with relay.post({**ASK, "stream": True}, f"/v1{route}") as response:
            status, body = response.status, await response.content.readexactly(15)
            await provider.release()
            body += await response.read()
    assert (status, body[:15]) == (200, b'data: {"n":1}\n\n')
    last = body[15:].removeprefix(b"data: 2\n\n")
    name, _, data = last.strip().rpartition(b"data: ")
    assert "closed before" in msgspec.json.decode(data)["error"]["message"]
    assert name == (b"event: error\n" if route == "/messages" else b"")
    assert relay.account()["calls"][0]["state"] == "cut"


async def test_a_stream_without_any_body_byte_is_retried_at_the_other_upstream(
    make_relay: MakeRelay,
) -> None:
    """While another upstream is left, the head of an answer alone does not begin it."""
    cut = msgspec.structs.replace(events(b""), pieces=(b"",), is_cut=True)
    good = events(CHUNK, b"[DONE]")
    async with ScriptedProvider([cut]) as one, ScriptedProvider([good]) as two:
        relay = await make_relay(one, two)
        answer = await relay.read({**ASK, "stream": True})
    assert answer == (200, b"".join(good.pieces))
    assert (len(one.seen), len(two.seen)) == (1, 1)


async def test_with_one_upstream_the_head_of_a_stream_is_forwarded_before_its_body(
    make_relay: MakeRelay,
) -> None:
    sent = events(CHUNK, b"[DONE]")
    sent = msgspec.structs.replace(sent, pieces=(b"", *sent.pieces))
    async with ScriptedProvider([sent]) as provider:
        provider.holds = True
        relay = await make_relay(provider)
        async with relay.post({**ASK, "stream": True}) as response:
            # The agent has status and headers before any body byte was sent.
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            await provider.release(2)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_gzipped_request_is_forwarded_uncompressed_without_its_encoding_header(
    make_relay: MakeRelay,
) -> None:
    plain = msgspec.json.encode(ASK)
    async with ScriptedProvider([ProviderResponse()]) as provider:
        relay = await make_relay(provider)
        answer = await relay.read(gzip.compress(plain), Content_Encoding="gzip")
        assert answer == (200, b"{}")
        assert provider.seen[0].body == plain
        assert "content-encoding" not in dict(provider.seen[0].headers)


async def test_requests_without_sampling_are_forwarded_and_not_recorded(
    make_relay: MakeRelay,
) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse((b'{"input_tokens":3}',))) as provider:
        relay = await make_relay(provider)
        counted = await relay.read(ASK, "/v1/messages/count_tokens?beta=true")
        key = {"x-api-key": relay.opened.api_key}
        async with relay.client.get(relay.base + "/v1/models", headers=key) as response:
            listed = response.status, await response.read()
    assert counted == listed == (200, b'{"input_tokens":3}')
    assert [seen.path for seen in provider.seen] == [
        "/v1/messages/count_tokens?beta=true",
        "/v1/models",
    ]
    assert relay.session.num_calls == 0


async def test_other_routes_keys_and_too_large_bodies_are_not_forwarded(
    make_relay: MakeRelay,
) -> None:
    async with ScriptedProvider([]) as provider:
        relay = await make_relay(provider, config=InterceptionConfig(max_body_bytes=1000))
        answers = [
            await relay.read(ASK, "/v1/files"),
            await relay.read(ASK, "/v1/chat/completions/../../admin"),
            await relay.read(ASK, Authorization="Bearer sk-wrong"),
            await relay.read(ASK, "/s/wrong/v1/messages"),
            await relay.read(b"x" * 1001),
        ]
    assert [status for status, _ in answers] == [404, 404, 401, 401, 413]
    assert provider.seen == []


async def test_a_body_that_is_no_json_is_forwarded_and_recorded(make_relay: MakeRelay) -> None:
    async with ScriptedProvider([ProviderResponse((b"what?",), 400)]) as provider:
        relay = await make_relay(provider)
        assert await relay.read(b"{nonsense") == (400, b"what?")
    assert provider.seen[0].body == b"{nonsense"
    assert relay.account()["calls"][0]["body"] == "{nonsense"


async def test_an_answer_over_the_size_limit_is_cut(make_relay: MakeRelay) -> None:
    async with ScriptedProvider([ProviderResponse((b"x" * 900, b"x" * 900))]) as provider:
        relay = await make_relay(provider, config=InterceptionConfig(max_body_bytes=1000))
        status, body = await relay.read(ASK)
    assert status == 502
    assert b"longer than 1000 bytes" in body


async def test_a_compressed_answer_is_forwarded_unchanged_and_decoded_later(
    make_relay: MakeRelay,
) -> None:
    packed = zlib.compress(ANSWER, wbits=31)
    headers = (("Content-Type", "application/json"), ("Content-Encoding", "gzip"))
    async with ScriptedProvider([ProviderResponse((packed,), headers=headers)]) as provider:
        relay = await make_relay(provider)
        assert await relay.read(ASK, Accept_Encoding="gzip") == (200, packed)
        assert "accept-encoding" not in dict(provider.seen[0].headers)
    assert relay.account()["messages"][-1]["content"] == "4"


async def test_garbage_affects_neither_the_server_nor_another_session(
    make_relay: MakeRelay,
) -> None:
    """Send broken-off bytes, wrong lengths and wrong encodings; another session is answered
    throughout.
    """
    chance = random.Random(3)
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider)
        host, _, port = relay.base.removeprefix("http://").rpartition(":")
        key = relay.opened.api_key.encode()
        whole = msgspec.json.encode(ASK)
        for turn in range(120):
            reader, writer = await asyncio.open_connection(host, int(port))
            body = bytearray(whole)
            for _ in range(chance.randrange(4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            claimed = len(body) + chance.choice([0, 0, 0, -5, 9])
            head = b"POST /v1%b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\n" % (
                chance.choice(ROUTES).encode(),
                key,
            )
            framing = chance.choice(
                [
                    b"Content-Length: %d\r\n\r\n" % claimed,
                    b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
                    b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
                    b"X: \x00\x01\r\n\r\n",
                    b"",
                ]
            )
            writer.write((head + framing + bytes(body))[: chance.randrange(40, 400)])
            writer.write_eof()
            await reader.read()
            writer.close()
            if turn % 20 == 0:
                assert await relay.read({**ASK, "seed": turn}) == (200, ANSWER)
        assert relay.routes.num_open == 0
        assert not relay.session.is_busy
        assert relay.upstreams.all[0].num_running == 0
    assert ("unknown", "failed") not in relay.routes.num_exchanges


@pytest.mark.parametrize(
    "sent", [ProviderResponse((ANSWER,)), events(b"1", b'{"type":"message_stop"}')]
)
async def test_an_agent_of_http_1_0_gets_the_same_bytes(
    make_relay: MakeRelay, sent: ProviderResponse
) -> None:
    async with ScriptedProvider([sent]) as provider:
        relay = await make_relay(provider)
        host, _, port = relay.base.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = msgspec.json.encode(ASK)
        head = f"POST /s/{relay.opened.path_secret}/v1/messages HTTP/1.0\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = await reader.read()
        writer.close()
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Connection: close" in lines
    assert b"chunked" not in lines
    assert body == b"".join(sent.pieces)
