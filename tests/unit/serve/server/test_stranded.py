"""A worker that drains while no engine serves gives back what would never come to its end there."""

from rollmesh.core.ids import GroupId
from rollmesh.serve.server.duties import (
    Abort,
    Action,
    Duties,
    DutiesSettings,
    Ended,
    EnginesSeen,
    Left,
    WorkerState,
)
from rollmesh.serve.server.outbox import Forget
from rollmesh.wire.machine import ROUTER, Received, Send
from rollmesh.wire.messages import DrainWorker, RouterHello, RunGroup, WorkerLeft

ONE = GroupId("r1", 1)
STRANDED_S = 60.0
WHY = "it drains, and no engine serves"


class Endures(Duties):
    """The fault: one that drains waits for ever."""

    def _see_engines(self, any_serves: bool, now_s: float) -> list[Action]:
        del any_serves, now_s
        return []


def running(kind: type[Duties] = Duties, *, drains: bool = True) -> Duties:
    """One group runs there."""
    settings = DutiesSettings(worker_id="w1", env="guess", max_rollouts=8, stranded_s=STRANDED_S)
    duties = kind(settings)
    for message in (RouterHello(1.0), RouterHello(1.0), RunGroup(ONE, 1, 4, "tcp://sink")):
        duties.step(Received(ROUTER, message, b"ask", "i1"), 0.0)
    if drains:
        duties.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 0.0)
    return duties


def see(duties: Duties, now_s: float, *, any_serves: bool = False) -> list[Action]:
    return duties.step(EnginesSeen(any_serves), now_s)


def test_what_runs_is_given_back_once_no_engine_has_served_for_long() -> None:
    duties = running()
    assert see(duties, 100.0) == []
    assert see(duties, 100.0 + STRANDED_S - 0.1) == []
    assert see(duties, 100.0 + STRANDED_S) == [Abort(ONE, WHY)]
    assert see(duties, 101.0 + STRANDED_S) == [], "it is told once"
    gone = duties.step(Ended(ONE, False, 0), 102.0 + STRANDED_S)
    assert gone == [Forget(ONE), Send(ROUTER, WorkerLeft("w1", "drained: shrink")), Left()]


def test_were_it_to_wait_it_would_never_leave() -> None:
    duties = running(Endures)
    see(duties, 0.0)
    assert see(duties, 1e6) == []
    assert duties.state is WorkerState.DRAINING


def test_engines_that_come_back_meanwhile_have_it_finish_what_it_has() -> None:
    duties = running()
    see(duties, 0.0)
    see(duties, STRANDED_S - 1.0, any_serves=True)
    assert see(duties, STRANDED_S) == see(duties, 2 * STRANDED_S - 1.0) == []
    assert duties.running


def test_one_that_serves_waits_as_long_as_it_takes() -> None:
    duties = running(drains=False)
    see(duties, 0.0)
    assert see(duties, 1e6) == []
    duties.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 1e6)
    assert see(duties, 1e6) == [], "its time begins when it drains"
    assert see(duties, 1e6 + STRANDED_S) == [Abort(ONE, WHY)]
