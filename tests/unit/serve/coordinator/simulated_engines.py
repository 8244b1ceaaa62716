"""A coordinator's machine between a real fleet table and toy engines, on a clock of its own.

Invariant: what the machine asks for is carried out at once, unless the test holds it. Driven by
test_machine.py, test_table.py and test_worker.py.
"""

import math

from rollmesh.engine.fleet import (
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
    ProbeEngine,
)
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.serve.coordinator.worker import (
    SCHEDULER,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorSettings,
    EngineOp,
    EngineOpDone,
    EngineSnapshot,
    RunEngineOp,
)
from rollmesh.wire.fleet import EngineRow, SleepEngine
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    CoordinatorHello,
    ResizeWorkers,
    WorkerChange,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)

TICK_S = 0.05
ME = b"coordinator-1"


class Toy:
    """An engine that does what it is told, at once."""

    def __init__(self) -> None:
        self.is_released = True
        self.policy_version = 0
        self.num_requests = 0
        self.kv_tokens = 0
        self.is_hung = False
        self.fails: dict[EngineOp, str] = {}
        self.done: list[EngineOp] = []
        self.life = 1

    def start_anew(self) -> None:
        """Its process has died, and another begins asleep."""
        self.life += 1
        self.is_released, self.num_requests = True, 0

    def obey(self, op: EngineOp, newest: int) -> str:
        """'' or why not."""
        if why := self.fails.get(op):
            return why
        self.done.append(op)
        if op is EngineOp.PAUSE:
            self.num_requests = 0
        elif op is EngineOp.RELEASE:
            assert not self.num_requests, "its memory was released under a request"
            self.is_released = True
        elif op is EngineOp.RESUME:
            self.is_released = False
        elif op is EngineOp.LOAD:
            self.policy_version = newest
        return ""


class SimulatedEngines:
    """See the module."""

    def __init__(
        self,
        num_engines: int = 2,
        *,
        is_asleep: bool = True,
        kind: type[Coordinator] = Coordinator,
        started_s: float = 0.0,
    ) -> None:
        self.urls = tuple(f"http://e:{rank}" for rank in range(num_engines))
        self.settings = CoordinatorSettings(pipeline_id="p", urls=self.urls, started_s=started_s)
        self.toys = {url: Toy() for url in self.urls}
        self.newest = 0
        self.now_s = 100.0
        self.heard: list[AnyMessage] = []
        """By the scheduler."""
        self.asked: list[AnyMessage] = []
        """By the router."""
        self.router = "r1"
        self.is_router_deaf = False
        self._resizes = 0
        self._pending: list[RunEngineOp] = []
        self.start_router(is_asleep=is_asleep)
        self.coordinator = kind(self.settings)

    def start_router(self, *, is_asleep: bool = True) -> None:
        """A new one, whose engines begin asleep."""
        self.router = f"{self.router}+"
        self.fleet = Fleet(FleetSettings(allow_hosts=("e",)))
        for url in self.urls:
            if is_asleep:
                self._step_fleet(Received(b"", SleepEngine(0, url, 0.0)))

    def restart(self) -> None:
        """The coordinator is killed and comes back."""
        self._pending.clear()
        self.coordinator = Coordinator(self.settings)

    def run(self, for_s: float) -> None:
        """Let time pass."""
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s += TICK_S
            self._step_fleet(Ticked())
            self._answer_calls()
            self.step(Ticked())

    def step(self, event: CoordinatorEvent) -> None:
        for action in self.coordinator.step(event, self.now_s):
            self._carry_out(action)

    def resize(
        self,
        wakes: bool,
        *ranks: int,
        epoch: int = 0,
        deadline_s: float = 20.0,
        turn_s: float = math.inf,
    ) -> ResizeWorkers:
        """The scheduler asks; the epoch is that of the ask where none is told."""
        self._resizes += 1
        epoch = epoch or self._resizes
        changes = tuple(WorkerChange(rank, wakes, epoch) for rank in ranks)
        ask = ResizeWorkers("p", self._resizes, changes, deadline_s, turn_s=turn_s)
        self.step(Received(SCHEDULER, ask))
        return ask

    def hear(self, message: AnyMessage) -> None:
        """The scheduler says something."""
        self.step(Received(SCHEDULER, message))

    # what came of it

    def row(self, rank: int) -> EngineRow:
        return next(row for row in self.fleet.table().engines if row.url == self.urls[rank])

    def toy(self, rank: int) -> Toy:
        return self.toys[self.urls[rank]]

    def truth(self, rank: int) -> WorkerTruth:
        return self.coordinator.truths()[rank]

    def phases(self) -> list[WorkerPhase]:
        return [truth.phase for truth in self.coordinator.truths()]

    def answers(self) -> list[WorkersResized]:
        return [message for message in self.heard if isinstance(message, WorkersResized)]

    def hellos(self) -> list[CoordinatorHello]:
        return [message for message in self.heard if isinstance(message, CoordinatorHello)]

    # the shell

    def _carry_out(self, action: CoordinatorAction) -> None:
        if isinstance(action, RunEngineOp):
            self._pending = [each for each in self._pending if each.url != action.url]
            self._pending.append(action)
        elif action.route == SCHEDULER:
            self.heard.append(action.message)
        else:
            assert action.route == ROUTER
            self.asked.append(action.message)
            if not self.is_router_deaf:
                self._step_fleet(Received(ME, action.message))

    def _answer_calls(self) -> None:
        calls, self._pending = self._pending, []
        for call in calls:
            toy = self.toys[call.url]
            if toy.is_hung:
                self._pending.append(call)
                continue
            why = toy.obey(call.op, self.newest)
            seen = EngineSnapshot(
                is_released=toy.is_released,
                policy_version=toy.policy_version,
                num_requests=toy.num_requests,
                kv_tokens=toy.kv_tokens,
            )
            self.step(
                EngineOpDone(
                    url=call.url,
                    serial=call.serial,
                    ok=not why,
                    detail=why,
                    seen=seen if call.op is EngineOp.LOOK else None,
                    policy_version=toy.policy_version,
                )
            )

    def _step_fleet(self, event: Received | EngineProbed | Ticked) -> None:
        for action in self.fleet.step(event, self.now_s):
            match action:
                case Send(route, message) if route == ME:
                    self.step(Received(ROUTER, message, b"", self.router))
                case ProbeEngine(url, serial) | ContinueEngine(url, serial):
                    self._step_fleet(self._probed(url, serial))
                case _:
                    pass

    def _probed(self, url: str, serial: int) -> EngineProbed:
        toy = self.toys[url]
        if toy.is_hung:
            return EngineProbed(url=url, serial=serial, ok=False, detail="no answer")
        return EngineProbed(
            url=url,
            serial=serial,
            ok=True,
            incarnation=f"life-{toy.life}",
            policy_version=-1 if toy.is_released else toy.policy_version,
        )
