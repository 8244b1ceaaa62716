"""The verbs that query: they print the service's answer, and a refusal in one line."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.main import main
from rollmesh.scheduler.admission.server import AdmissionServer, TokenFiles, serve_waiting
from rollmesh.scheduler.admission.transport import (
    AdmissionAnswer,
    AdmissionSocket,
    SchedulerQuestion,
)
from rollmesh.scheduler.planning.state import ClusterRequest, PipelinePhase
from rollmesh.scheduler.service.explain import ExplainContext, explain_fleet
from rollmesh.wire.frames import Packet
from rollmesh.wire.scheduling import (
    DrainNode,
    GpuPriority,
    ReadScheduler,
    SchedulerAnswered,
    UndrainNode,
)
from rollmesh.wire.sockets import Hub, wait
from tests.unit.scheduler.admission.fleet import Fleet

FILE = """
bind = "{address}"
admission = "admission.sock"

[pipelines.math]
clusters.actor_train = [0, 1]
workers = 4

[pipelines.big]
workers = 99
"""


class AdmissionFleet(Fleet):
    """A scheduler that answers on its admission socket and on its hub."""

    def __init__(self) -> None:
        super().__init__()
        self.hub, self._socket = Hub("tcp://127.0.0.1:0"), AdmissionSocket(Path("admission.sock"))
        self._server = AdmissionServer(self.ask, TokenFiles(Path()))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def ask(self, question: SchedulerQuestion, patience_s: float = 1.0) -> AdmissionAnswer:
        if isinstance(question, ReadScheduler):
            seen = explain_fleet(
                self.state, ExplainContext(scheduler="i1", policy="fair"), question.pipeline_id
            )
            return AdmissionAnswer(ok=True, body=msgspec.json.encode(seen))
        if isinstance(question, DrainNode | UndrainNode) and question.name not in self.state.nodes:
            return AdmissionAnswer(ok=False, error=f"no node {question.name!r}")
        return super().ask(question, patience_s)

    def phase(self, name: str) -> PipelinePhase:
        return self.state.pipelines[name].phase

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self.hub.close()
        self._socket.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            wait([self.hub], None, 0.02)
            for route, packet in self.hub.receive():
                question = packet.message
                assert isinstance(question, DrainNode | UndrainNode | ReadScheduler)
                answer = self.ask(question)
                output = SchedulerAnswered(question.key, answer.ok, answer.error)
                self.hub.send(route, Packet(output, body=answer.body))
            serve_waiting(self._socket, self._server)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdmissionFleet]:
    """Write the fleet's file into a new working directory and serve it."""
    monkeypatch.chdir(tmp_path)
    fleet = AdmissionFleet()
    Path("scheduler.toml").write_text(FILE.format(address=fleet.hub.address))
    yield fleet
    fleet.close()


def test_pipelines_are_placed_by_the_file_and_admitted(
    fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduler", "register", "math"]) == 0
    output = capsys.readouterr().out
    assert output == "math: actor_train on 0 1; generation on 0-3\n"
    assert fleet.phase("math") is PipelinePhase.REGISTERED
    assert main(["scheduler", "admit", "math"]) == 0
    assert fleet.phase("math") is PipelinePhase.ADMITTED
    assert main(["scheduler", "unregister", "math"]) == 0
    assert not fleet.state.pipelines


def test_pipelines_of_the_file_are_registered_up_to_the_first_that_does_not_fit(
    fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduler", "register", "--admit"]) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith("generation on 0-3, admitted\n")
    assert "big" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert list(fleet.state.pipelines) == ["math"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["register", "maths"], "the fleet's file has no pipeline 'maths'; it has math, big"),
        (["admit", "maths"], "no pipeline 'maths'"),
        (["explain", "maths"], "no pipeline 'maths'; none is known"),
        (["drain", "c"], "no node 'c'"),
        (["drain", "c", "--undo"], "no node 'c'"),
        (["kill", "math"], "no run has the name math, so there is no process to kill"),
        (["status", "--fleet", "other.toml"], "`rollmesh scheduler init` writes one"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], output: str, fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduler", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert output in line
    assert not fleet.state.pipelines


def test_status_shows_nodes_and_pipelines(
    fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["scheduler", "register", "math"])
    capsys.readouterr()
    assert main(["scheduler", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "scheduler i1: fair, 8 of 8 GPUs free"
    assert [line.split() for line in lines if line.startswith("a ")] == [["a", "up", "0-3", "h200"]]
    (math,) = [line.split() for line in lines if line.startswith("math")]
    assert math == ["math", "registered", "0", "of", "4"]
    assert main(["scheduler", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_free"] == 8


def test_explain_shows_why_a_pipeline_waits(
    fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["scheduler", "register", "math"])
    fleet.state.requests["k"] = ClusterRequest(
        key="k",
        pipeline_id="math",
        cluster="actor_train",
        priority=GpuPriority.ACTOR_TRAINING,
        seq=1,
        asked_s=fleet.state.now_s,
    )
    capsys.readouterr()
    assert main(["scheduler", "explain", "math"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "math: registered"
    assert "  until it is admitted: rollmesh scheduler admit" in lines
    assert main(["scheduler", "explain", "math", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipelines"][0]["lines"] == lines


def test_a_killed_pipeline_has_no_processes_left(
    fleet: AdmissionFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["scheduler", "register", "math"])
    assert main(["scheduler", "kill", "math", "--dead"]) == 0
    assert "math: 0 processes killed, and its GPUs are free;" in capsys.readouterr().out
    assert not fleet.state.pipelines
