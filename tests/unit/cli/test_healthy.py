"""`rollmesh healthy` queries the process, not only its port, and reports the failure."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from rollmesh.cli import healthy
from rollmesh.cli.main import main
from rollmesh.wire.sockets import Hub


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of a server that sends `answer` to its one caller, and disconnects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            caller, _ = listening.accept()
            with caller:
                caller.recv(1024)
                caller.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        yield listening.getsockname()[1]
        server.join()


def test_a_process_that_answers_2xx_is_healthy() -> None:
    with answering(b"HTTP/1.1 204 No Content\r\n\r\n") as port:
        assert main(["healthy", f"http://127.0.0.1:{port}/healthz"]) == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "returned status 503"),
        (b"nonsense\r\n", "nonsense"),
        (b"", "closed connection"),
    ],
)
def test_any_other_answer_is_reported(
    answer: bytes, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as port:
        address = f"http://127.0.0.1:{port}/healthz"
        assert main(["healthy", address]) == 1
    output = capsys.readouterr().out
    assert output.startswith(f"{address}: ")
    assert expected in output
    assert output.count("\n") == 1


def test_a_closed_port_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    for address in (f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{port}/"):
        assert main(["healthy", address]) == 1
        assert "refused" in capsys.readouterr().out


def test_a_health_check_of_a_hub_delivers_no_message() -> None:
    with closing(Hub("tcp://127.0.0.1:0")) as hub:
        assert main(["healthy", hub.address]) == 0
        assert list(hub.receive()) == []
        assert hub.num_malformed == 0


def test_an_open_port_alone_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(healthy, "TIMEOUT_S", 0.2)
        monkeypatch.setenv("ROLLMESH_HEALTH", f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        assert main(["healthy"]) == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1:80", "http://127.0.0.1/", "ftp://here:21"])
def test_an_address_that_is_no_health_url_is_a_user_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["healthy", address]) == 2
    assert "ROLLMESH_HEALTH" in capsys.readouterr().err
