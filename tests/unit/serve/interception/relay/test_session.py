"""One relayed session: retries, its limit, and its end."""

import asyncio
import contextlib
import weakref
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import InterceptionConfig, JournalConfig
from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.engine.connection import Headers
from rollmesh.runtime import blobs
from rollmesh.runtime.session_log import DeliveryChanged
from rollmesh.serve.interception import request
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.call import CallRequest, RelayCall
from rollmesh.serve.interception.relay.events import CallCompleted, decode
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider, events
from tests.disks import lose_files, no_room_in_memory, small_disk
from tests.unit.serve.interception.relay.conftest import MakeRelay
from tests.unit.serve.interception.relay.test_routes import ANSWER, ASK, CHUNK

USER = {"role": "user", "content": "guess"}


@pytest.mark.parametrize("status", [409, 429, 503])
async def test_a_marked_retry_of_a_failed_call_is_sent_again(
    make_relay: MakeRelay, status: int
) -> None:
    async with ScriptedProvider(
        [ProviderResponse((b"{}",), status), ProviderResponse((ANSWER,))]
    ) as provider:
        relay = await make_relay(provider)
        assert (await relay.read(ASK))[0] == status
        for n in ("1", "2"):
            assert await relay.read(ASK, x_stainless_retry_count=n) == (200, ANSWER)
    assert len(provider.seen) == 2


async def test_a_marked_retry_joins_its_running_call(make_relay: MakeRelay) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        provider.holds = provider.holds_first = True
        relay = await make_relay(provider)
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(relay.read(ASK, x_stainless_retry_count=n)) for n in ("0", "1")
            ]
            await provider.until(lambda: relay.routes.num_open == 2)
            await provider.release()
        assert [each.result() for each in asked] == [(200, ANSWER)] * 2
    assert len(provider.seen) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_sealing_ends_waiting_calls_and_refuses_new_ones(
    make_relay: MakeRelay, is_stream: bool
) -> None:
    async with ScriptedProvider(lambda _: events(b"1", b"2", b"3")) as provider:
        provider.holds, provider.holds_first = True, not is_stream
        relay = await make_relay(provider)
        if is_stream:
            async with relay.post({**ASK, "stream": True}) as response:
                await response.content.readuntil(b"\n\n")
                relay.session.seal("enough")
                assert b"this session is over: enough" in await response.read()
        else:
            waiting = asyncio.ensure_future(relay.read(ASK))
            await provider.until(lambda: len(provider.seen) == 1)
            relay.session.seal("enough")
            assert (await waiting)[0] == 410
        assert (await relay.read(ASK))[0] == 410
        await provider.until(lambda: provider.num_left == 1)
    states = {state for _, state in relay.routes.num_exchanges}
    assert states == {"sealed"}


async def test_sealing_ends_a_call_whose_body_is_still_arriving(make_relay: MakeRelay) -> None:
    async with ScriptedProvider([]) as provider:
        relay = await make_relay(provider)
        host, _, port = relay.base.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /s/{relay.opened.path_secret}/v1/messages HTTP/1.1\r\nHost: h\r\n"
        writer.write(head.encode() + b'Content-Length: 1000\r\n\r\n{"model"')
        while not relay.routes.num_open:  # noqa: ASYNC110 - no event tells that an exchange begins
            await asyncio.sleep(0)
        relay.session.seal("enough")
        assert b"this session is over: enough" in await reader.read()
        writer.close()
    assert relay.routes.num_exchanges == {("messages", "sealed"): 1}
    assert provider.seen == []


async def test_sealing_ends_a_call_whose_agent_does_not_read(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "DRAIN_CHECK_S", 0.01)
    async with ScriptedProvider(lambda _: events(b"x" * 30_000_000, b"2")) as provider:
        provider.holds = True
        relay = await make_relay(provider)
        async with relay.post({**ASK, "stream": True}) as response:
            relay.session.seal("enough")
            while relay.routes.num_open:  # noqa: ASYNC110 - no event tells that an exchange ends
                await asyncio.sleep(0)
            response.close()
    assert {state for _, state in relay.routes.num_exchanges} == {"sealed"}


async def test_a_session_over_its_memory_limit_accepts_no_more_calls(
    make_relay: MakeRelay,
) -> None:
    config = InterceptionConfig(max_session_bytes=50_000)
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider, config=config)
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 60_000}]}
        assert (await relay.read(ASK))[0] == 200
        for body in (long, ASK):
            status, raw = await relay.read(body)
            error = msgspec.json.decode(raw)["error"]
            assert (status, error["code"]) == (400, "session_over_limit")
            assert "interception.max_session_bytes = 50000" in error["message"]
    assert len(provider.seen) == 1
    assert relay.session.spent_because
    assert relay.account()["num_calls"] == 1


async def test_lost_contents_are_a_503_that_blames_no_upstream(
    make_relay: MakeRelay, tmp_path: Path
) -> None:
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider)
        long = {"role": "user", "content": "x" * 500_000}
        with no_room_in_memory(tmp_path):
            assert (await relay.read({"model": "m", "messages": [long]}))[0] == 200
            assert blobs.spill_over() >= 500_000
            lose_files(tmp_path)
            # One request continues from the lost content; the other has it elsewhere in its
            # history.
            for messages in ([long, USER], [USER, long]):
                status, raw = await relay.read({"model": "m", "messages": messages})
                error = msgspec.json.decode(raw)["error"]
                assert (status, error["code"]) == (503, "content_lost")
                assert relay.session.fault == error["message"]
        assert relay.upstreams.all[0].fault == ""


@pytest.mark.parametrize("sent", [ProviderResponse((ANSWER,)), events(CHUNK, CHUNK, b"[DONE]")])
async def test_an_answer_that_a_full_disk_refused_is_completed_once_it_is_written(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: ProviderResponse
) -> None:
    archive = GatewayJournal(tmp_path / "journal", JournalConfig())
    async with ScriptedProvider(lambda _: sent) as provider:
        relay = await make_relay(provider, archive=archive)
        with small_disk(monkeypatch, archive.folder, archive.journal.size_bytes):
            _, body = await relay.read(ASK)
            assert b"No space left" in body
            assert not body.endswith(sent.pieces[-1])
            assert relay.session.fault
            status, body = await relay.read(ASK, x_stainless_retry_count="1")
            assert (status, msgspec.json.decode(body)["error"]["code"]) == (507, "journal_full")
        for _ in range(2):
            again = await relay.read(ASK, x_stainless_retry_count="2")
            assert again == (200, b"".join(sent.pieces))
        assert (len(provider.seen), relay.session.fault) == (1, "")
    [call] = relay.account()["calls"]
    assert (call["state"], call["delivered"]) == ("whole", True)
    # Another process would restore one call, which was delivered in the end.
    records = [frames for _, frames in archive.journal.replay()]
    events = [event for frames in records if len(frames) > 1 for event in decode(frames[1])]
    assert isinstance(events[0], CallCompleted)
    assert events[1:] == [
        DeliveryChanged(0, is_undelivered=True),
        DeliveryChanged(0, is_undelivered=False),
    ]
    archive.close_journal()


async def test_an_answer_that_was_never_written_is_reported_as_unwritten(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = GatewayJournal(tmp_path / "journal", JournalConfig())
    async with ScriptedProvider(lambda _: ProviderResponse((ANSWER,))) as provider:
        relay = await make_relay(provider, archive=archive)
        with small_disk(monkeypatch, archive.folder, archive.journal.size_bytes):
            assert (await relay.read(ASK))[0] == 507
            [call] = relay.account()["calls"]
    assert (call["state"], call["delivered"], call["choices"]) == ("unwritten", False, [])
    assert "No space left" in call["error"]
    archive.close_journal()


class OnlyUpstream:
    """A transport without another upstream."""

    url = "http://upstream"
    has_other = False

    def redirect(self, status: int, headers: Headers) -> str:
        return "no"

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        return False

    def settle(self) -> None: ...

    def close(self) -> None: ...


async def test_the_failure_of_a_call_retains_no_reader() -> None:
    call = RelayCall(CallRequest(0, "/messages", None, (), "", 0.0), 10, lambda _: None)
    call.send_on(OnlyUpstream())
    call.on_error(EngineUnavailable("http://upstream: down: very"))

    async def ask() -> "weakref.ref[FakeClock]":
        request = FakeClock()  # any object that the reader references
        with contextlib.suppress(SessionError):
            await call.wait(0)
        return weakref.ref(request)

    assert (await ask())() is None
    with pytest.raises(SessionError, match="down") as caught:
        await call.wait_for_head()
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
