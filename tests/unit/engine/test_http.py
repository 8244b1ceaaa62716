"""The pooled client: which connection carries a call, targets, https, and its end."""

import asyncio
import errno
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from rollmesh.core.descriptors import shortage_of
from rollmesh.core.errors import AddressError, EngineUnavailable, LocalShortage
from rollmesh.engine import connection, http
from rollmesh.engine.http import HttpClient, target
from tests.shortage import no_descriptor_left
from tests.unit.engine.http_peer import (
    CHUNKED,
    OK,
    PATIENCE_S,
    ResponseRecorder,
    Unread,
    Wire,
    forever,
    get,
    serving,
)


async def test_request_is_its_head_and_the_pieces_of_its_body(client: HttpClient) -> None:
    requests: list[bytes] = []

    async def script(wire: Wire) -> None:
        requests.append(await wire.read())
        await wire.answer(OK)

    async with serving(script) as server:
        to = target("POST", f"{server.url}/generate?a=b", [("X-Key", "k")])
        response = await client.fetch(to, [b'{"a":', b"1}"], timeout_s=PATIENCE_S)
    assert (response.status, response.body) == (200, b"ok")
    host = server.url.removeprefix("http://").encode()
    head = b"POST /generate?a=b HTTP/1.1\r\nHost: %b\r\nX-Key: k\r\nContent-Length: 7\r\n\r\n"
    assert requests == [head % host + b'{"a":1}']


async def test_request_on_a_connection_closed_under_us_is_sent_again(client: HttpClient) -> None:
    closed = asyncio.Event()
    requests: list[bytes] = []

    async def script(wire: Wire) -> None:
        requests.append(await wire.read())
        await wire.answer(OK)
        if len(requests) == 1:
            requests.append(await wire.read())
            closed.set()
        else:
            await wire.gone()

    async with serving(script) as server:
        to = target("POST", server.url)
        for _ in range(2):
            assert (await client.fetch(to, [b"x"], timeout_s=PATIENCE_S)).body == b"ok"
        assert closed.is_set()
        assert server.num_connections == 2
    assert len(requests) == 3
    assert requests[1] == requests[2]


async def test_request_is_not_sent_again_when_the_server_had_time_to_work_on_it(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALE_S", 0.0)

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK)
        await wire.read()

    async with serving(script) as server:
        await get(client, server.url)
        with pytest.raises(EngineUnavailable, match="before the answer's end"):
            await get(client, server.url)
        assert server.num_connections == 1


async def test_first_request_of_a_connection_is_not_sent_again(client: HttpClient) -> None:
    async def script(wire: Wire) -> None:
        await wire.read()

    async with serving(script) as server:
        with pytest.raises(EngineUnavailable, match="before the answer's end"):
            await get(client, server.url)
        assert server.num_connections == 1


async def test_idle_connections_are_closed_in_time(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.02)
    gone = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK)
        await wire.gone()
        gone.set()

    async with serving(script) as server:
        await get(client, server.url)
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
        assert (await get(client, server.url)).body == b"ok"
        assert server.num_connections == 2


async def test_concurrent_calls_have_a_connection_each_and_later_calls_reuse_them(
    client: HttpClient,
) -> None:
    async with serving(forever) as server:
        for _ in range(3):
            await asyncio.gather(*[get(client, server.url) for _ in range(8)])
        assert server.num_connections == 8


async def test_call_begun_while_another_ends_uses_its_connection(client: HttpClient) -> None:
    second = ResponseRecorder()

    class First(ResponseRecorder):
        def on_end(self) -> None:
            client.send(to, (), second)

    async with serving(forever) as server:
        to = target("GET", server.url)
        client.send(to, (), First())
        await second.until(lambda: second.ends)
        assert server.num_connections == 1
    assert second.data == [b"ok"]


async def test_a_closed_call_disconnects_and_receives_nothing_more(client: HttpClient) -> None:
    gone = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(CHUNKED + b"1\r\na\r\n")
        await wire.gone()
        gone.set()

    recorder = ResponseRecorder()
    async with serving(script) as server:
        call = client.send(target("GET", server.url), (), recorder)
        await recorder.until(lambda: recorder.data)
        call.close()
        call.close()
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
    assert recorder.ends == []


async def test_call_closed_before_it_is_connected_is_never_sent(client: HttpClient) -> None:
    async with serving(forever) as server:
        recorder = ResponseRecorder()
        client.send(target("GET", server.url), (), recorder).close()
        await get(client, server.url)
        assert server.num_connections == 1
    assert (recorder.data, recorder.ends) == ([], [])


async def test_client_that_closes_ends_every_call_with_an_error() -> None:
    reached = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        reached.set()
        await wire.gone()

    client, running, late = HttpClient(), ResponseRecorder(), ResponseRecorder()
    async with serving(script) as server:
        to = target("GET", server.url)
        client.send(to, (), running)
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        client.send(to, (), late)
        await client.close()
        with pytest.raises(EngineUnavailable):
            await client.fetch(to, timeout_s=PATIENCE_S)
    assert [len(recorder.ends) for recorder in (running, late)] == [1, 1]
    assert None not in running.ends + late.ends


async def test_an_answer_that_takes_too_long_is_an_error(client: HttpClient) -> None:
    gone = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.gone()
        gone.set()

    async with serving(script) as server:
        with pytest.raises(EngineUnavailable, match=r"no answer within 0.05 s"):
            await client.fetch(target("GET", server.url), timeout_s=0.05)
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_refused_connection_is_unavailable(client: HttpClient) -> None:
    async with serving(forever) as server:
        pass
    with pytest.raises(EngineUnavailable, match="cannot connect"):
        await get(client, server.url)


async def test_a_connection_that_does_not_open_in_time_is_unavailable() -> None:
    async with serving(Wire.gone) as server, HttpClient(connect_timeout_s=0.05) as client:
        with pytest.raises(EngineUnavailable, match="cannot connect: TimeoutError"):
            await get(client, server.url.replace("http:", "https:"))  # waits for TLS


# targets


@pytest.mark.parametrize(
    "url",
    ["", "engine:30000", "ftp://a", "http://", "http://a:b", "http://a/b c", "http://u:p@a/"],
)
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(AddressError):
        target("GET", url)


@pytest.mark.parametrize("header", [("a b", "c"), ("a:", "c"), ("a", "b\r\nc: d"), ("", "c")])
def test_a_header_cannot_inject_another(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="header"):
        target("GET", "http://a", [header])


def test_targets_of_one_server_share_its_connections() -> None:
    first, second = target("GET", "http://a:80/x"), target("POST", "http://a/y?z#f")
    assert first.origin == second.origin
    assert b" /y?z HTTP/1.1" in second.prelude
    assert target("GET", "https://a").port == 443
    assert b"Host: [::1]:9\r\n" in target("GET", "http://[::1]:9").prelude


# https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    assert openssl, "the tests of https need openssl to make a certificate"
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "cert.pem", folder / "key.pem"
    argv = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    argv += [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        str(pair[0]),
        "-keyout",
        str(pair[1]),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return pair


async def test_https_works_with_a_trusted_server(
    certificate: tuple[Path, Path],
) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with serving(forever, ours) as server, HttpClient(trusting) as client:
        for _ in range(2):
            assert (await get(client, server.url)).body == b"ok"
        large = [Unread(bytes(2**20))] * 8
        to = target("POST", server.url)
        assert (await client.fetch(to, large, timeout_s=PATIENCE_S)).body == b"ok"
        assert server.num_connections == 1


async def test_an_untrusted_https_server_is_refused(
    client: HttpClient, certificate: tuple[Path, Path]
) -> None:
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(*certificate)
    async with serving(forever, ours) as server:
        with pytest.raises(EngineUnavailable, match="certificate"):
            await get(client, server.url)


def test_the_client_runs_on_uvloop() -> None:
    """uvloop's transports do not inherit from asyncio's."""

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(OK)

    async def fetch() -> bytes:
        async with serving(script) as server, HttpClient() as client:
            return (await client.fetch(target("GET", server.url), timeout_s=PATIENCE_S)).body

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(fetch()) == b"ok"


def test_calls_closed_while_connecting_leave_no_connection() -> None:
    """uvloop does not notify a new connection whose connect call is cancelled."""

    async def main() -> None:
        async with serving(lambda wire: wire.gone()) as server, asyncio.timeout(PATIENCE_S):
            client = HttpClient()
            for num_turns in range(30):
                call = client.send(target("GET", server.url), (), ResponseRecorder())
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                call.close()
            await client.close()
            assert client.num_connections == 0

    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_call_without_a_descriptor_is_held_until_there_is_one(
    new_loop: Callable[[], asyncio.AbstractEventLoop], host: str
) -> None:
    async def check() -> None:
        recorder = ResponseRecorder()
        async with serving(forever) as server, HttpClient() as client:
            url = server.url.replace("127.0.0.1", host)
            with no_descriptor_left():
                client.send(target("GET", url), (), recorder)
                while len(client.held) < 1:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0)
                assert not recorder.ends
                assert "ulimit -n" in next(iter(client.held.values()))
                with pytest.raises(LocalShortage, match="RLIMIT_NOFILE is 3"):
                    await client.fetch(target("GET", url), timeout_s=0.1)
            await recorder.until(lambda: recorder.ends)
            assert (recorder.status, recorder.ends, client.held) == (200, [None], {})

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(check())


async def test_a_call_that_is_held_too_long_fails_with_the_remedy() -> None:
    recorder = ResponseRecorder()
    async with serving(forever) as server, HttpClient(shortage_wait_s=0.1) as client:
        with no_descriptor_left():
            client.send(target("GET", server.url), (), recorder)
            await recorder.until(lambda: recorder.ends)
    [error] = recorder.ends
    assert isinstance(error, LocalShortage)
    assert "ulimit -n" in str(error)
    assert not client.held


async def test_a_held_call_is_carried_by_a_connection_that_becomes_idle() -> None:
    first, held, may_answer = ResponseRecorder(), ResponseRecorder(), asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.read()
        await may_answer.wait()
        await wire.answer(OK)
        await wire.read()
        await wire.answer(OK)

    async with serving(script) as server, HttpClient() as client:
        client.send(target("GET", server.url), (), first)
        while not server.num_connections:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        with no_descriptor_left():
            client.send(target("GET", server.url), (), held)
            while not client.held:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
            may_answer.set()
            await held.until(lambda: held.ends)
        assert (first.ends, held.ends, server.num_connections) == ([None], [None], 1)


async def test_a_held_call_can_be_closed() -> None:
    recorder = ResponseRecorder()
    async with serving(forever) as server, HttpClient() as client:
        with no_descriptor_left():
            call = client.send(target("GET", server.url), (), recorder)
            while not client.held:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
            call.close()
            while client.held:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
    assert not recorder.ends


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM, errno.ENFILE])
def test_other_local_shortages_are_recognised(number: int) -> None:
    assert "this machine has no" in shortage_of(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ETIMEDOUT])
def test_a_peer_that_refuses_a_connection_is_not_excused_when_descriptors_are_short(
    number: int,
) -> None:
    with no_descriptor_left():
        assert not shortage_of(OSError(number, os.strerror(number)))
