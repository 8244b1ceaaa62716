"""Sockets of admission: its own, which only its user can open, and requests to the scheduler."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.fleet_file import PipelineTable
from rollmesh.scheduler.admission.server import (
    AdmissionServer,
    Registered,
    TokenFiles,
    serve_waiting,
)
from rollmesh.scheduler.admission.transport import (
    AdmissionAnswer,
    AdmissionSocket,
    SchedulerQuestion,
    ask_admission,
    ask_scheduler,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    DrainNode,
    PipelineSpec,
    ReadScheduler,
    RegisterPipeline,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Hub, wait
from tests.unit.scheduler.admission.fleet import Fleet

PROMPT_S = 30.0


class Serving:
    """An admission server at a socket, in a thread."""

    def __init__(self, fleet: Fleet, path: Path) -> None:
        self.fleet = fleet
        self.is_broken = False
        self.listener = AdmissionSocket(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PROMPT_S)
        self.listener.close()

    def _serve(self) -> None:
        server = AdmissionServer(self._ask, TokenFiles(self.listener.path.parent))
        while not self._stop.wait(0.02):
            serve_waiting(self.listener, server)

    def _ask(self, question: SchedulerQuestion, patience_s: float) -> AdmissionAnswer:
        if self.is_broken:
            raise KeyError(question.key)
        return self.fleet.ask(question, patience_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A socket in a folder whose path is longer than a socket's address may be."""
    return tmp_path / ("deep" * 20) / "admission.sock"


@pytest.fixture
def serving(path: Path) -> Iterator[Serving]:
    serving = Serving(Fleet(), path)
    yield serving
    serving.close()


def question(name: str) -> RegisterPipeline:
    return RegisterPipeline(new_id("k"), PipelineSpec(pipeline_id=name, clusters={}, generation=()))


def test_only_its_user_can_open_the_socket(serving: Serving, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_question_is_answered_with_the_pipelines_place(serving: Serving, path: Path) -> None:
    table = msgspec.json.encode(PipelineTable(workers=2))
    answer = ask_admission(path, question("math"), table, PROMPT_S)
    assert (answer.ok, answer.error) == (True, "")
    spec = msgspec.json.decode(answer.body, type=Registered).spec
    assert serving.fleet.state.pipelines["math"].spec == spec


def test_a_mistake_is_answered_in_one_line(serving: Serving, path: Path) -> None:
    table = msgspec.json.encode(PipelineTable(workers=99))
    answer = ask_admission(path, question("math"), table, PROMPT_S)
    assert not answer.ok
    assert "math" in answer.error
    assert "\n" not in answer.error


def test_an_internal_error_does_not_end_the_server(serving: Serving, path: Path) -> None:
    serving.is_broken = True
    answer = ask_admission(path, AdmitPipeline("k1", "math"), b"", PROMPT_S)
    assert (answer.ok, answer.error) == (False, "admission failed: KeyError('k1')")
    serving.is_broken = False
    answer = ask_admission(path, AdmitPipeline("k2", "math"), b"", PROMPT_S)
    assert answer.error == "no pipeline 'math'"


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\2\x91\1", b"\0\0\0\1\x90"],
    ids=repr,
)
def test_an_invalid_question_is_dropped_and_the_next_is_answered(
    raw: bytes, serving: Serving, path: Path
) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)
        caller.sendall(raw)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""
    answer = ask_admission(path, AdmitPipeline("k", "math"), b"", PROMPT_S)
    assert answer.error == "no pipeline 'math'"


def test_a_stale_socket_is_replaced_and_one_in_use_is_not(serving: Serving, path: Path) -> None:
    with pytest.raises(AddressError, match="another process listens there; name another"):
        AdmissionSocket(path)
    left = path.with_name("left.sock")
    with socket.socket(socket.AF_UNIX) as gone:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        gone.bind(f"/proc/self/fd/{descriptor}/{left.name}")
        os.close(descriptor)
    AdmissionSocket(left).close()
    assert not left.exists()
    left.write_text("a file")
    with pytest.raises(AddressError, match="a file that is not a socket is there"):
        AdmissionSocket(left)


def test_a_missing_admission_process_is_one_line_that_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"none.sock: no answer of an admission process .* 0.3"):
        ask_admission(tmp_path / "none.sock", AdmitPipeline("k", "math"), b"", 0.3)


def test_only_questions_to_admission_are_answered(serving: Serving, path: Path) -> None:
    with pytest.raises(AddressError, match="no answer"):
        ask_admission(path, DrainNode("k", "a"), b"", 0.5)  # type: ignore[arg-type]  # no question to admission


def test_a_request_is_resent_with_its_key_until_it_is_answered() -> None:
    hub, asked = Hub("tcp://127.0.0.1:0"), list[ReadScheduler]()

    def answer_the_third() -> None:
        while len(asked) < 3:
            wait([hub], None, 0.1)
            for route, packet in hub.receive():
                assert isinstance(packet.message, ReadScheduler)
                asked.append(packet.message)
                key, body = ("another", b"") if len(asked) < 3 else (packet.message.key, b"seen")
                hub.send(route, Packet(SchedulerAnswered(key, True), body=body))

    answering = threading.Thread(target=answer_the_third, daemon=True)
    answering.start()
    answer = ask_scheduler(hub.address, ReadScheduler("k"), patience_s=PROMPT_S)
    answering.join(PROMPT_S)
    hub.close()
    assert (answer.ok, bytes(answer.body)) == (True, b"seen")
    assert set(asked) == {ReadScheduler("k")}


def test_an_unreachable_scheduler_is_one_line_with_its_address() -> None:
    hub = Hub("tcp://127.0.0.1:0")
    hub.close()
    with pytest.raises(AddressError, match=rf"{hub.address}: no answer within 0.2 s"):
        ask_scheduler(hub.address, ReadScheduler("k"), patience_s=0.2)
