"""The table as the coordinator reads it: nothing counts that the router said before it heard."""

from rollmesh.serve.coordinator.events import CoordinatorSettings
from rollmesh.serve.coordinator.table import Table
from rollmesh.serve.coordinator.worker import Worker
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetAnswered, SleepEngine
from rollmesh.wire.machine import Send

URL = "http://e:0"
SETTINGS = CoordinatorSettings(pipeline_id="p", urls=(URL,))


def answer(ask_id: int, phase: EnginePhase) -> FleetAnswered:
    return FleetAnswered(ask_id, True, "", 1, (EngineRow(URL, "i", phase, 0),))


def test_a_row_that_is_older_than_the_last_ask_about_it_is_none() -> None:
    table, worker = Table(SETTINGS), Worker(0, URL, SETTINGS)
    table.tend([worker], False, 0.0)
    assert not table.is_read
    table.take(answer(1, EnginePhase.READY), "r")
    worker.want(False)
    [send] = table.tend([worker], False, 0.1)
    assert isinstance(send, Send)
    assert isinstance(send.message, SleepEngine)
    table.take(answer(1, EnginePhase.ASLEEP), "r")
    assert table.row(URL) is None
    table.take(answer(send.message.ask_id, EnginePhase.ASLEEP), "r")
    row = table.row(URL)
    assert row is not None
    assert row.phase is EnginePhase.ASLEEP


def test_an_older_table_of_the_same_router_changes_nothing() -> None:
    table = Table(SETTINGS)
    table.take(answer(5, EnginePhase.READY), "r")
    table.take(answer(4, EnginePhase.ASLEEP), "r")
    row = table.row(URL)
    assert row is not None
    assert row.phase is EnginePhase.READY
