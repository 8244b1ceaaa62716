"""A worker that drains while no engine serves returns the groups that could not end there."""

from rollmesh.core.ids import GroupId
from rollmesh.serve.server.outbox import Forget
from rollmesh.serve.server.worker_machine import (
    Abort,
    Action,
    EnginesSeen,
    GroupRunEnded,
    Left,
    WorkerMachine,
    WorkerMachineSettings,
    WorkerState,
)
from rollmesh.wire.machine import ROUTER, Received, Send
from rollmesh.wire.messages import DrainWorker, RouterHello, RunGroup, WorkerLeft

ONE = GroupId("r1", 1)
STRANDED_S = 60.0
WHY = "it drains, and no engine serves"


class Endures(WorkerMachine):
    """Simulates the fault: a draining worker waits forever."""

    def _see_engines(self, any_serves: bool, now_s: float) -> list[Action]:
        del any_serves, now_s
        return []


def running(kind: type[WorkerMachine] = WorkerMachine, *, drains: bool = True) -> WorkerMachine:
    """Run one group on the worker."""
    settings = WorkerMachineSettings(
        worker_id="w1", env="guess", max_rollouts=8, stranded_s=STRANDED_S
    )
    machine = kind(settings)
    for message in (RouterHello(1.0), RouterHello(1.0), RunGroup(ONE, 1, 4, "tcp://sink")):
        machine.step(Received(ROUTER, message, b"ask", "i1"), 0.0)
    if drains:
        machine.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 0.0)
    return machine


def see(machine: WorkerMachine, now_s: float, *, any_serves: bool = False) -> list[Action]:
    return machine.step(EnginesSeen(any_serves), now_s)


def test_what_runs_is_given_back_once_no_engine_has_served_for_long() -> None:
    machine = running()
    assert see(machine, 100.0) == []
    assert see(machine, 100.0 + STRANDED_S - 0.1) == []
    assert see(machine, 100.0 + STRANDED_S) == [Abort(ONE, WHY)]
    assert see(machine, 101.0 + STRANDED_S) == [], "it is told once"
    gone = machine.step(GroupRunEnded(ONE, False, 0), 102.0 + STRANDED_S)
    assert gone == [Forget(ONE), Send(ROUTER, WorkerLeft("w1", "drained: shrink")), Left()]


def test_were_it_to_wait_it_would_never_leave() -> None:
    machine = running(Endures)
    see(machine, 0.0)
    assert see(machine, 1e6) == []
    assert machine.state is WorkerState.DRAINING


def test_engines_that_come_back_meanwhile_have_it_finish_what_it_has() -> None:
    machine = running()
    see(machine, 0.0)
    see(machine, STRANDED_S - 1.0, any_serves=True)
    assert see(machine, STRANDED_S) == see(machine, 2 * STRANDED_S - 1.0) == []
    assert machine.running


def test_one_that_serves_waits_as_long_as_it_takes() -> None:
    machine = running(drains=False)
    see(machine, 0.0)
    assert see(machine, 1e6) == []
    machine.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 1e6)
    assert see(machine, 1e6) == [], "its time begins when it drains"
    assert see(machine, 1e6 + STRANDED_S) == [Abort(ONE, WHY)]
