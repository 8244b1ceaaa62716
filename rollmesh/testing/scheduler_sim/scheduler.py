"""The simulated scheduler process: the machine, its journal, and a death at any point of a step.

- The writes of a step are one transaction: a death before it loses the step, a death after it
  leaves a journal that knows what no message reported.
- A transaction is kept whole or not at all; time does not run back in the history.
- checks.py looks at the state after each step.
"""

import collections
from collections.abc import Callable, Sequence

import msgspec

from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.planning.policies.fair import Fair, FairSettings
from rollmesh.scheduler.planning.state import FleetState, PipelineState
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import (
    Action,
    HistoryRow,
    JournalTables,
    LogLine,
    SchedulerSettings,
    WriteRows,
)
from rollmesh.serve.coordinator.claims import Claims
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.testing.mesh_sim.kernel import Kernel, Killed, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim import checks
from rollmesh.testing.scheduler_sim.faults import FleetFaults
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.scheduling import TicketMoved, TicketState


class SimDatabase:
    """Rows that outlive the process."""

    def __init__(self) -> None:
        self._kept = JournalTables()
        self._last_s = float("-inf")

    def keep(self, write: WriteRows) -> None:
        self._kept.keep(write.rows)
        for row in write.rows:
            if isinstance(row, HistoryRow):
                assert row.at_s >= self._last_s, "history runs back"
                self._last_s = row.at_s

    def load(self) -> JournalTables | None:
        """Return the rows that a new incarnation begins with; None for the first."""
        tables = {table: dict(rows) for table, rows in self._kept.tables.items()}
        return JournalTables(tables) if tables else None

    def num_rows(self, table: str) -> int:
        return len(self._kept.tables.get(table, {}))


TICK_S = 0.25
HELD_UP_S = 0.3
FULL_S = (0.5, 6.0)
SETTINGS = SchedulerSettings(resize_deadline_s=8.0, slack_s=2.0, turn_s=3.0)


def quick(name: str) -> SchedulingPolicy:
    """Return the policy of that name; slices and patience are short, as steps are here."""
    if name == Fair.name:
        return Fair(FairSettings(quantum_s=4.0, hold_s=1.0, switch_s=1.0, reserve_after_s=8.0))
    return policies.make_policy(name)


class SchedulerParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the scheduler; a test may put a broken one in place of one."""

    scheduler: type[FleetScheduler] = FleetScheduler
    claims: type[Claims] = Claims
    coordinator: type[Coordinator] = Coordinator
    policy: Callable[[str], SchedulingPolicy] = quick
    settings: SchedulerSettings = SETTINGS


class SimScheduler(Node):
    """One scheduler process."""

    def __init__(
        self, kernel: Kernel, network: Network, parts: SchedulerParts, policy: str
    ) -> None:
        super().__init__("scheduler")
        self.disk = SimDatabase()
        self.notes = collections.Counter[str]()
        self.on_granted: Callable[[str], None] = lambda _: None
        """Called with the key of what is granted, each time that is sent."""
        self._kernel = kernel
        self._network = network
        self._parts = parts
        self._policy = policy
        self._begin_life()
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()

    def restart(self) -> None:
        super().restart()
        for machine in ("intent", "ticket", "worker", "pipeline"):
            self._network.transitions.forget(machine)
        self._begin_life()
        self.start()

    def fixed_of(self, pipeline_id: str) -> tuple[set[str], set[str]]:
        """Return fixed clusters that it waits for, and those that it has."""
        state = self.machine.state.fleet
        pipeline = state.pipelines.get(pipeline_id)
        waits = {r.cluster for r in state.requests.values() if r.pipeline_id == pipeline_id}
        return waits, set(pipeline.holds if pipeline else ())

    def leftovers(self) -> list[str]:
        """Return what should be gone when nothing is requested."""
        state = self.machine.state.fleet
        found = [f"request {key} waits" for key in state.requests]
        found += [f"GPU {gpu} is {owner}'s" for gpu, owner in state.owners.items()]
        found += [f"{each.pipeline_id} has demand" for each in _all(state) if each.demand]
        num = self.disk.num_rows("intents")
        return found + [f"{num} intents are on the disk"] * bool(num)

    def _begin_life(self) -> None:
        policy = self._parts.policy(self._policy)
        self.machine = self._parts.scheduler(
            self._parts.settings, policy, self.disk.load(), f"scheduler.{self.num_crashes}"
        )
        self._watched = checks.EvictionChecks(self.machine.state.fleet)
        self._arrived: list[Received | Ticked] = []
        self._unkept: list[Action] = []
        """Messages that wait for room on the disk."""
        self._unheard: list[Received | Ticked] = []

    def _tick(self) -> None:
        self._turn([Ticked()])
        self._kernel.after(TICK_S, self._tick, self)

    def _receive(self, source: str, packet: Packet) -> None:
        event = Received(source.encode(), packet.message, packet.body, packet.router)
        faults = self._network.faults
        may_be_held_up = isinstance(faults, FleetFaults) and faults.held_up > 0.0
        if not may_be_held_up and not self._arrived:
            self._turn([event])
            return
        self._arrived.append(event)
        if len(self._arrived) == 1:
            late_s = HELD_UP_S if self._network.strikes("held_up") else 0.0
            self._kernel.after(late_s, self._take, self)

    def _take(self) -> None:
        """Handle everything that has arrived, in one turn."""
        arrived, self._arrived = self._arrived, []
        self._turn(arrived)

    def _turn(self, events: Sequence[Received | Ticked]) -> None:
        if self._unkept:  # nothing is received while nothing can be written
            self._unheard += events
            return
        actions: list[Action] = []
        for number, event in enumerate(events, 1):
            now_s, is_last = self._kernel.now_s(self), number == len(events)
            step = self.machine.step(event, now_s, is_last)
            assert sum(isinstance(each, WriteRows) for each in step) <= 1, "two transactions in one"
            actions += step
        assert not self.machine.state.problems, self.machine.state.problems
        if any(isinstance(each, WriteRows) for each in actions):
            self._look()
        if self._network.strikes("disk_full"):
            self._unkept = actions
            self._kernel.after(self._kernel.rng.uniform(*FULL_S), self._go_on, self)
        else:
            self._carry_out(actions)

    def _go_on(self) -> None:
        """There is room on the disk again."""
        actions, self._unkept = self._unkept, []
        unheard, self._unheard = self._unheard, []
        self._carry_out(actions)
        self._turn(unheard)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Write one transaction, then do the rest."""
        if rows := tuple(
            row for each in actions if isinstance(each, WriteRows) for row in each.rows
        ):
            self._die_if("killed_before_write")
            self.disk.keep(WriteRows(rows))
            self._die_if("killed_after_write")
        for action in actions:
            match action:
                case Send(route, message, body):
                    if isinstance(message, TicketMoved) and message.state is TicketState.GRANTED:
                        self.on_granted(message.key)
                    packet = Packet(message, "", body)
                    self._network.send(self, route.decode(), packet)
                case LogLine(event=event_name):
                    self.notes[event_name] += 1

    def _die_if(self, fault: str) -> None:
        if self._network.strikes(fault):
            raise Killed(self)

    def _look(self) -> None:
        state, transitions = self.machine.state.fleet, self._network.transitions
        checks.look_at_owners(state)
        self._watched.look(state)
        pipelines = {name: each.phase.value for name, each in state.pipelines.items()}
        transitions.watch("pipeline", pipelines)
        workers = {
            (name, worker.rank): worker.phase.value
            for name, each in state.pipelines.items()
            for worker in each.workers
        }
        transitions.watch("worker", workers)


def _all(state: FleetState) -> list[PipelineState]:
    return list(state.pipelines.values())
