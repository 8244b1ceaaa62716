"""The steps of one engine, and the leased requests that keep the router's engine table true."""

import msgspec
import pytest

from rollmesh.serve.coordinator.machine import FleetTableView
from rollmesh.serve.coordinator.worker import (
    CoordinatorSettings,
    EngineOp,
    EngineOpDone,
    EngineSnapshot,
    EngineWorker,
    WorkerStep,
)
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetAnswered, SleepEngine
from rollmesh.wire.machine import Send
from rollmesh.wire.scheduling import WorkerPhase

URL = "http://e:0"
SETTINGS = CoordinatorSettings(pipeline_id="p", urls=(URL,))
ASLEEP_ROW = EngineRow(URL, "i", EnginePhase.ASLEEP, 0)


def done(serial: int, ok: bool = True) -> EngineOpDone:
    return EngineOpDone(url=URL, serial=serial, ok=ok, detail="" if ok else "why", policy_version=3)


def test_the_answer_to_an_outdated_call_changes_nothing() -> None:
    worker = EngineWorker(0, URL, SETTINGS)
    worker.want(True)
    call = worker.call(1, 0.0)
    assert call is not None
    assert call.op is EngineOp.RESUME
    worker.want(False)
    worker.update(ASLEEP_ROW, 0.0)
    assert worker.step is WorkerStep.DRAINING
    look = worker.call(2, 0.0)
    assert look is not None
    worker.on_done(done(1), ASLEEP_ROW, 0.1)
    assert worker.step is WorkerStep.DRAINING


def test_an_unanswered_call_is_repeated() -> None:
    worker = EngineWorker(0, URL, SETTINGS)
    worker.want(True)
    assert worker.call(1, 0.0) is not None
    assert worker.call(2, SETTINGS.call_s - 1.0) is None
    assert worker.call(3, SETTINGS.call_s) is not None


def test_a_failed_step_is_retried() -> None:
    worker = EngineWorker(0, URL, SETTINGS)
    worker.want(True)
    worker.call(1, 0.0)
    worker.on_done(done(1), None, 0.0)
    worker.call(2, 0.0)
    worker.on_done(done(2, ok=False), None, 0.0)
    assert (worker.step, worker.phase) == (WorkerStep.LOADING, WorkerPhase.WAKING)
    assert worker.truth().detail == "loading: why"
    assert worker.call(3, SETTINGS.retry_s / 2) is None
    again = worker.call(4, SETTINGS.retry_s)
    assert again is not None
    assert again.op is EngineOp.LOAD


class TrustsTheTable(EngineWorker):
    """The fault: an engine counts as awake unless the table lists it as asleep."""

    def on_done(self, done: EngineOpDone, row: EngineRow | None, now_s: float) -> None:
        seen = done.seen and msgspec.structs.replace(done.seen, is_moving=False)
        super().on_done(msgspec.structs.replace(done, seen=seen), row, now_s)


@pytest.mark.parametrize(("kind", "is_found"), [(EngineWorker, True), (TrustsTheTable, False)])
@pytest.mark.parametrize("phase", [EnginePhase.JOINING, EnginePhase.READY])
def test_an_engine_found_without_weights_sleeps_even_if_a_new_router_does_not_list_it(
    phase: EnginePhase, kind: type[EngineWorker], is_found: bool
) -> None:
    """Coordinator and router died during a wake-up: the engine would hold its GPUs and serve no
    requests.
    """
    worker = kind(0, URL, SETTINGS)
    assert worker.call(1, 0.0) is not None
    seen = EngineSnapshot(is_released=False, is_moving=True)
    worker.on_done(msgspec.structs.replace(done(1), seen=seen), EngineRow(URL, "i", phase, 0), 0.1)
    assert (worker.phase is WorkerPhase.LOST) is is_found
    assert (worker.step is WorkerStep.LEAVING) is is_found
    assert worker.is_out is is_found


def answer(ask_id: int, phase: EnginePhase) -> FleetAnswered:
    return FleetAnswered(ask_id, True, "", 1, (EngineRow(URL, "i", phase, 0),))


def test_a_row_older_than_the_last_request_about_its_engine_is_ignored() -> None:
    table, worker = FleetTableView(SETTINGS), EngineWorker(0, URL, SETTINGS)
    table.update([worker], False, 0.0)
    assert not table.is_read
    table.take(answer(1, EnginePhase.READY), "r")
    worker.want(False)
    [send] = table.update([worker], False, 0.1)
    assert isinstance(send, Send)
    assert isinstance(send.message, SleepEngine)
    table.take(answer(1, EnginePhase.ASLEEP), "r")
    assert table.row(URL) is None
    table.take(answer(send.message.ask_id, EnginePhase.ASLEEP), "r")
    row = table.row(URL)
    assert row is not None
    assert row.phase is EnginePhase.ASLEEP


def test_an_older_table_of_the_same_router_changes_nothing() -> None:
    table = FleetTableView(SETTINGS)
    table.take(answer(5, EnginePhase.READY), "r")
    table.take(answer(4, EnginePhase.ASLEEP), "r")
    row = table.row(URL)
    assert row is not None
    assert row.phase is EnginePhase.READY
