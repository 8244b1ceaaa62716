"""The admission process answers each key, whatever it is asked, and loses nothing by dying."""

import threading
from collections.abc import Iterator

import msgspec
import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.asking import Answer, Question, ask
from rollmesh.scheduler.admission.desk import Desk
from rollmesh.scheduler.admission.fleet_file import PipelineTable
from rollmesh.scheduler.admission.process import answered, run, turn
from rollmesh.wire.frames import Packet
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    PipelineSpec,
    RegisterPipeline,
    SchedulerAnswered,
)
from rollmesh.wire.sockets import Hub, wait
from tests.unit.scheduler.admission.fleet import Fleet

PROMPT_S = 30.0


class Serving:
    """A desk at an address, in a thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.is_broken = False
        self.hub = Hub("tcp://127.0.0.1:0")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PROMPT_S)
        self.hub.close()

    def _serve(self) -> None:
        desk = Desk(self._ask)
        while not self._stop.is_set():
            wait([self.hub], None, 0.02)
            turn(self.hub, desk)

    def _ask(self, question: Question, patience_s: float) -> Answer:
        if self.is_broken:
            raise KeyError(question.key)
        return self.fleet.ask(question, patience_s)


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving(Fleet())
    yield serving
    serving.close()


def question(name: str) -> RegisterPipeline:
    return RegisterPipeline(new_id("k"), PipelineSpec(pipeline_id=name, clusters={}, generation=()))


def test_a_question_is_answered_with_where_the_pipeline_stands(serving: Serving) -> None:
    table = msgspec.json.encode(PipelineTable(workers=2))
    answer = ask(serving.hub.address, question("math"), table, PROMPT_S)
    assert (answer.ok, answer.error) == (True, "")
    spec = msgspec.json.decode(answer.body, type=PipelineSpec)
    assert serving.fleet.state.pipelines["math"].spec == spec


def test_a_mistake_is_answered_in_one_line(serving: Serving) -> None:
    table = msgspec.json.encode(PipelineTable(workers=99))
    answer = ask(serving.hub.address, question("math"), table, PROMPT_S)
    assert not answer.ok
    assert "math" in answer.error
    assert "\n" not in answer.error


def test_a_fault_of_ours_ends_nothing(serving: Serving) -> None:
    serving.is_broken = True
    answer = ask(serving.hub.address, AdmitPipeline("k1", "math"), b"", PROMPT_S)
    assert (answer.ok, answer.error) == (False, "admission failed at it: KeyError('k1')")
    serving.is_broken = False
    answer = ask(serving.hub.address, AdmitPipeline("k2", "math"), b"", PROMPT_S)
    assert answer.error == "no pipeline 'math'"


def test_an_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(AddressError, match=r"admission = tcp://0\.0\.0\.0:0: others can reach"):
        run("tcp://0.0.0.0:0", "tcp://127.0.0.1:1", None)


def test_what_was_said_again_while_we_were_busy_is_done_once() -> None:
    fleet = Fleet()
    once = Packet(AdmitPipeline("k1", "math"))
    heard = [(b"a", once), (b"a", once), (b"b", Packet(AdmitPipeline("k2", "math")))]
    told = list(answered(heard, Desk(fleet.ask)))
    assert [route for route, _ in told] == [b"a", b"a", b"b"]
    why = "no pipeline 'math'"
    assert [packet.message for _, packet in told] == [
        SchedulerAnswered(key, False, why) for key in ("k1", "k1", "k2")
    ]
    assert fleet.asked == [AdmitPipeline("k1", "math"), AdmitPipeline("k2", "math")]
