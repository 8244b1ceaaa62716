"""Answers on the wire, and the meaning of request headers: secrets, the admin token, retries."""

import asyncio
import weakref

import msgspec
import pytest

from rollmesh.serve.interception.request import (
    JSON,
    HttpRequest,
    find_secret,
    has_bearer,
    read_retry_mark,
)
from tests.unit.serve.interception.conftest import AgentSession, StartAgent
from tests.unit.serve.interception.http_client import MAX_BYTES, PATIENCE_S, serving, sized

ASK = {"messages": [{"role": "user", "content": "guess"}]}


async def raw_answer(
    agent: AgentSession, protocol: str, *headers: str, stream: bool
) -> tuple[bytes, bytes]:
    """Return the head and body of a raw answer, read until the server closes; fail if it does
    not."""
    body = msgspec.json.encode({**ASK, "stream": stream})
    lines = [
        f"POST /v1/chat/completions HTTP/{protocol}",
        "Host: x",
        f"x-api-key: {agent.opened.api_key}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    host, _, port = agent.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    raw = await reader.read()
    writer.close()
    head, _, rest = raw.partition(b"\r\n\r\n")
    return head.lower(), rest


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_without_chunks_and_closed(
    start_agent: StartAgent, stream: bool
) -> None:
    agent = await start_agent("I guess 4")
    head, body = await raw_answer(agent, "1.0", stream=stream)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert b"I guess 4" in body


async def test_a_connection_is_closed_on_the_clients_request(start_agent: StartAgent) -> None:
    agent = await start_agent("4", "5")
    head, body = await raw_answer(agent, "1.1", "Connection: close", stream=False)
    assert b"content-length: %d" % len(body) in head
    assert b"connection: close" in head
    head, body = await raw_answer(agent, "1.1", "Connection: close", stream=True)
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"\r\n0\r\n\r\n")


async def test_a_connection_is_kept_and_pipelined_requests_are_answered_in_order(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent("first", "second", "third")

    def request(stream: bool) -> bytes:
        body = msgspec.json.encode({**ASK, "stream": stream})
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        lines.append(f"x-api-key: {agent.opened.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    host, _, port = agent.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(True) + request(False))
    assert b"first" in await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert b" GMT\r\n" in await reader.readuntil(b"second")
    writer.write(request(True))
    assert b"third" in await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


class Pieces(list[bytes]):
    """A list that can be weakly referenced."""


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_does_not_retain_the_receiver_of_its_body(at_once: bool) -> None:
    async def handle(request: HttpRequest) -> None:
        assert request.is_whole is at_once
        pieces = Pieces()
        taking = asyncio.ensure_future(request.read_into(pieces, MAX_BYTES, PATIENCE_S))
        if not at_once:
            client.send(body[-1:])
        await taking
        assert b"".join(pieces) == body
        held = weakref.ref(pieces)
        del pieces, taking
        request.answer(200, request.header_lines(JSON), b"gone" if held() is None else b"held")

    body = b"x" * 1000
    async with serving(handle) as running:
        client = await running.client()
        sent = sized(body)
        client.send(sent if at_once else sent[:-1])
        assert await client.answer() == (200, b"gone")


@pytest.mark.parametrize(
    ("path", "headers", "secret"),
    [
        ("/v1/chat/completions", {b"authorization": b"Bearer k"}, "k"),
        ("/v1/chat/completions", {b"authorization": b"bearer k "}, "k"),
        ("/v1/chat/completions", {b"x-api-key": b"k"}, "k"),
        ("/v1/chat/completions", {b"authorization": b"Basic k", b"x-api-key": b"x"}, "x"),
        ("/s/p/v1/chat/completions", {b"authorization": b"Bearer sk-unused"}, "p"),
        ("/prefix/s/p/chat/completions", {}, "p"),
        ("/v1/chat/completions", {}, ""),
        ("/v1/s/p", {b"x-api-key": b"k"}, "k"),
    ],
)
def test_a_secret_is_found(path: str, headers: dict[bytes, bytes], secret: str) -> None:
    assert find_secret(path, headers) == secret


@pytest.mark.parametrize(
    ("token", "header", "is_good"),
    [
        (b"k", b"Bearer k", True),
        (b"k", b"bearer  k ", True),
        (b"k", b"Basic k", False),
        (b"k", b"k", False),
        (b"k", b"Bearer kk", False),
        (b"k", b"", False),
        (b"", b"Bearer ", False),
        (b"k", b"Bearer \xff", False),
    ],
)
def test_the_token_is_a_bearer_and_an_empty_one_never_matches(
    token: bytes, header: bytes, is_good: bool
) -> None:
    assert has_bearer(token, {b"authorization": header}) == is_good
    assert not has_bearer(token, {b"x-api-key": token})


KEY, COUNT = b"idempotency-key", b"x-stainless-retry-count"


@pytest.mark.parametrize(
    ("headers", "key", "is_resent"),
    [
        ({}, b"", False),
        ({KEY: b"k"}, b"k", True),
        ({KEY: b""}, b"", False),
        ({COUNT: b"0"}, b"", False),
        ({COUNT: b""}, b"", False),
        ({COUNT: b"1"}, b"", True),
        ({KEY: b"k", COUNT: b"0"}, b"k", True),
        ({KEY: b"", COUNT: b"2"}, b"", True),
    ],
)
def test_a_nonempty_key_or_count_marks_a_retry(
    headers: dict[bytes, bytes], key: bytes, is_resent: bool
) -> None:
    assert read_retry_mark(headers) == (key, is_resent)
