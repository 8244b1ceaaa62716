"""Attacks through engines: servers that are no engine, and requests of a stranger to a real one."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import AddressError
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.wire.fleet import FleetAnswered, JoinEngine, ReadFleet, SleepEngine
from tests.flow.router_process import Peer, RouterProcess, until

SECRET = "AKIA-INTERNAL-SECRET-0123456789"


class Internal:
    """A service of the internal network that answers every request with a secret."""

    def __init__(self, status: int, body: str) -> None:
        asked = self.asked = list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(params=[f"{SECRET}", f'{{"error": {{"message": "{SECRET}"}}}}'])
def internal(request: pytest.FixtureRequest) -> Iterator[Internal]:
    service = Internal(403, request.param)
    yield service
    service.close()


def answer_to(peer: Peer, ask: JoinEngine | SleepEngine | ReadFleet) -> FleetAnswered:
    peer.received.clear()
    peer.send(ask)
    until(lambda: peer.of(FleetAnswered), peer)
    answer = peer.of(FleetAnswered)[0]
    assert isinstance(answer, FleetAnswered)
    return answer


@pytest.mark.parametrize("kind", ["join", "sleep"])
def test_a_router_sends_nothing_to_a_server_that_a_stranger_names(
    tmp_path: Path, internal: Internal, kind: str
) -> None:
    with RouterProcess(tmp_path) as router:
        stranger = Peer(router.ready.address, "stranger")
        for url in (internal.url, f"{internal.url}/latest/meta-data/iam?x="):
            ask = JoinEngine(1, url) if kind == "join" else SleepEngine(1, url, 0.0)
            answer = answer_to(stranger, ask)
            assert not answer.ok
            assert not answer.engines
        # Two probe periods of an engine that is joining.
        until(lambda: router.status()["counts"]["received"] >= 2)
        stranger.dialer.close()
    assert internal.asked == []


def test_no_body_of_a_server_reaches_peers_status_or_log(
    tmp_path: Path, internal: Internal, capfd: pytest.CaptureFixture[str]
) -> None:
    with RouterProcess(tmp_path, engine=internal.url) as router:
        member = Peer(router.ready.address, "member")

        def has_failed() -> bool:
            return "403" in answer_to(member, ReadFleet(2)).engines[0].detail

        until(has_failed, member)
        answer, status = answer_to(member, ReadFleet(3)), router.get("/status").decode()
        member.dialer.close()
    assert SECRET not in repr(answer)
    assert SECRET not in status
    logs = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    out, err = capfd.readouterr()
    assert not any(SECRET in text for text in (*logs, out, err))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/latest/meta-data",
        "http://127.0.0.1:1?x=",
        "http://127.0.0.1:1/#x",
        "http://user:word@127.0.0.1:1",
        "ftp://127.0.0.1:1",
        "http://127.0.0.1:1\r\nX: y",
        "http://127.0.0.1:99999",
    ],
)
async def test_an_engines_url_is_scheme_host_and_port(url: str) -> None:
    async with HttpClient() as http_client:
        with pytest.raises(AddressError) as refused:
            SglangBackend(url, http_client)
    assert len(str(refused.value).splitlines()) == 1
