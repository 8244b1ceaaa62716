"""Time in which nobody can be served: while all engines sleep, and no longer."""

from rollmesh.engine.view import FleetView
from rollmesh.serve.server.process import FleetPauses
from rollmesh.testing.clock import FakeClock
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged


def test_only_time_in_which_all_engines_sleep_or_are_updated_is_a_pause() -> None:
    view, clock = FleetView(), FakeClock()
    pauses = FleetPauses(view, clock)
    epoch = 0

    def table(*phases: EnginePhase) -> None:
        nonlocal epoch
        epoch += 1
        rows = tuple(EngineRow(f"http://{at}", "i", each, 0) for at, each in enumerate(phases))
        view.update(FleetChanged(epoch, rows), "r")

    clock.advance(10.0)
    assert pauses.paused_s() == 0.0
    table(EnginePhase.READY, EnginePhase.ASLEEP)
    clock.advance(10.0)
    assert pauses.paused_s() == 0.0
    table(EnginePhase.ASLEEP, EnginePhase.ASLEEP)
    clock.advance(10.0)
    assert pauses.paused_s() == 10.0
    table(EnginePhase.UPDATING, EnginePhase.ASLEEP)
    clock.advance(5.0)
    table(EnginePhase.READY, EnginePhase.ASLEEP)
    clock.advance(100.0)
    assert pauses.paused_s() == 15.0
    table(EnginePhase.FENCED, EnginePhase.GONE)
    clock.advance(100.0)
    assert pauses.paused_s() == 15.0
