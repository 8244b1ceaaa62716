"""The coordinator's machine: resizes, in order and once; the truth, whatever happens."""

from rollmesh.serve.coordinator.events import Deed
from rollmesh.wire.fleet import EnginePhase
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.serve.coordinator.engine_yard import Yard


def test_a_fleet_that_sleeps_from_the_start_wakes_the_engine_that_is_told() -> None:
    yard = Yard()
    yard.run(1.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    ask = yard.resize(True, 1)
    yard.run(2.0)
    assert yard.phases() == [WorkerPhase.ASLEEP, WorkerPhase.AWAKE]
    assert [yard.row(rank).phase for rank in (0, 1)] == [EnginePhase.ASLEEP, EnginePhase.READY]
    assert yard.answers()[-1].resize_id == ask.resize_id
    assert not yard.answers()[-1].error
    assert yard.toy(0).done == [Deed.LOOK] * len(yard.toy(0).done)
