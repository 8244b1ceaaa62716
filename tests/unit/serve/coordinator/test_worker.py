"""One engine's way: what its shell says late changes nothing."""

import msgspec
import pytest

from rollmesh.serve.coordinator.events import CoordinatorSettings, Deed, EngineDone, EngineSeen
from rollmesh.serve.coordinator.worker import Step, Worker
from rollmesh.wire.fleet import EnginePhase, EngineRow
from rollmesh.wire.scheduling import WorkerPhase

URL = "http://e:0"
SETTINGS = CoordinatorSettings(pipeline_id="p", urls=(URL,))
ASLEEP_ROW = EngineRow(URL, "i", EnginePhase.ASLEEP, 0)


def done(serial: int, ok: bool = True) -> EngineDone:
    return EngineDone(url=URL, serial=serial, ok=ok, detail="" if ok else "why", policy_version=3)


def test_the_answer_to_a_call_that_was_overtaken_changes_nothing() -> None:
    worker = Worker(0, URL, SETTINGS)
    worker.want(True)
    call = worker.call(1, 0.0)
    assert call is not None
    assert call.deed is Deed.RESUME
    worker.want(False)
    worker.tend(ASLEEP_ROW, 0.0)
    assert worker.step is Step.DRAINING
    look = worker.call(2, 0.0)
    assert look is not None
    worker.on_done(done(1), ASLEEP_ROW, 0.1)
    assert worker.step is Step.DRAINING


def test_a_call_that_nobody_answers_is_made_again() -> None:
    worker = Worker(0, URL, SETTINGS)
    worker.want(True)
    assert worker.call(1, 0.0) is not None
    assert worker.call(2, SETTINGS.call_s - 1.0) is None
    assert worker.call(3, SETTINGS.call_s) is not None


def test_a_step_that_failed_is_the_one_that_is_tried_again() -> None:
    worker = Worker(0, URL, SETTINGS)
    worker.want(True)
    worker.call(1, 0.0)
    worker.on_done(done(1), None, 0.0)
    worker.call(2, 0.0)
    worker.on_done(done(2, ok=False), None, 0.0)
    assert (worker.step, worker.phase) == (Step.LOADING, WorkerPhase.WAKING)
    assert worker.truth().detail == "loading: why"
    assert worker.call(3, SETTINGS.retry_s / 2) is None
    again = worker.call(4, SETTINGS.retry_s)
    assert again is not None
    assert again.deed is Deed.LOAD


class TrustsTheTable(Worker):
    """The fault: what the table does not know to be asleep is awake."""

    def on_done(self, done: EngineDone, row: EngineRow | None, now_s: float) -> None:
        seen = done.seen and msgspec.structs.replace(done.seen, is_moving=False)
        super().on_done(msgspec.structs.replace(done, seen=seen), row, now_s)


@pytest.mark.parametrize(("kind", "is_found"), [(Worker, True), (TrustsTheTable, False)])
@pytest.mark.parametrize("phase", [EnginePhase.JOINING, EnginePhase.READY])
def test_what_is_found_without_weights_sleeps_though_a_new_router_knows_of_no_sleep(
    phase: EnginePhase, kind: type[Worker], is_found: bool
) -> None:
    """Its coordinator and its router died in the middle of a wake: it would stand on its GPUs and
    serve nobody."""
    worker = kind(0, URL, SETTINGS)
    assert worker.call(1, 0.0) is not None
    seen = EngineSeen(is_released=False, is_moving=True)
    worker.on_done(msgspec.structs.replace(done(1), seen=seen), EngineRow(URL, "i", phase, 0), 0.1)
    assert (worker.phase is WorkerPhase.LOST) is is_found
    assert (worker.step is Step.LEAVING) is is_found
    assert worker.is_out is is_found
