"""A coordinator's machine between a real fleet table and simulated engines, on a simulated clock.

- The machine's actions are carried out at once, unless the test holds them.
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


class SimulatedEngine:
    """An engine that carries out each operation at once."""

    def __init__(self) -> None:
        self.is_released = True
        self.policy_version = 0
        self.num_requests = 0
        self.kv_tokens = 0
        self.is_hung = False
        self.fails: dict[EngineOp, str] = {}
        self.done: list[EngineOp] = []
        self.incarnation = 1

    def restart_process(self) -> None:
        """Replace the process by a new one that begins asleep."""
        self.incarnation += 1
        self.is_released, self.num_requests = True, 0

    def execute(self, op: EngineOp, newest: int) -> str:
        """Carry out `op`; return '' or the error."""
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
    """A coordinator, a fleet table and simulated engines."""

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
        self.engines = {url: SimulatedEngine() for url in self.urls}
        self.newest = 0
        self.now_s = 100.0
        self.to_scheduler: list[AnyMessage] = []
        """Messages that the scheduler received."""
        self.to_router: list[AnyMessage] = []
        """Messages that the router received."""
        self.router = "r1"
        self.router_ignores = False
        self._resizes = 0
        self._pending: list[RunEngineOp] = []
        self.start_router(is_asleep=is_asleep)
        self.coordinator = kind(self.settings)

    def start_router(self, *, is_asleep: bool = True) -> None:
        """Start a new router, whose engines begin asleep."""
        self.router = f"{self.router}+"
        self.fleet = Fleet(FleetSettings(allow_hosts=("e",)))
        for url in self.urls:
            if is_asleep:
                self._step_fleet(Received(b"", SleepEngine(0, url, 0.0)))

    def restart(self) -> None:
        """Kill the coordinator and start it again."""
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
        """Send a resize from the scheduler; `epoch` 0 is the number of the resize."""
        self._resizes += 1
        epoch = epoch or self._resizes
        changes = tuple(WorkerChange(rank, wakes, epoch) for rank in ranks)
        ask = ResizeWorkers("p", self._resizes, changes, deadline_s, turn_s=turn_s)
        self.step(Received(SCHEDULER, ask))
        return ask

    def deliver(self, message: AnyMessage) -> None:
        """Deliver a message from the scheduler."""
        self.step(Received(SCHEDULER, message))

    # results

    def row(self, rank: int) -> EngineRow:
        return next(row for row in self.fleet.table().engines if row.url == self.urls[rank])

    def engine(self, rank: int) -> SimulatedEngine:
        return self.engines[self.urls[rank]]

    def truth(self, rank: int) -> WorkerTruth:
        return self.coordinator.truths()[rank]

    def phases(self) -> list[WorkerPhase]:
        return [truth.phase for truth in self.coordinator.truths()]

    def answers(self) -> list[WorkersResized]:
        return [message for message in self.to_scheduler if isinstance(message, WorkersResized)]

    def hellos(self) -> list[CoordinatorHello]:
        return [message for message in self.to_scheduler if isinstance(message, CoordinatorHello)]

    # the shell

    def _carry_out(self, action: CoordinatorAction) -> None:
        if isinstance(action, RunEngineOp):
            self._pending = [each for each in self._pending if each.url != action.url]
            self._pending.append(action)
        elif action.route == SCHEDULER:
            self.to_scheduler.append(action.message)
        else:
            assert action.route == ROUTER
            self.to_router.append(action.message)
            if not self.router_ignores:
                self._step_fleet(Received(ME, action.message))

    def _answer_calls(self) -> None:
        calls, self._pending = self._pending, []
        for call in calls:
            engine = self.engines[call.url]
            if engine.is_hung:
                self._pending.append(call)
                continue
            why = engine.execute(call.op, self.newest)
            seen = EngineSnapshot(
                is_released=engine.is_released,
                policy_version=engine.policy_version,
                num_requests=engine.num_requests,
                kv_tokens=engine.kv_tokens,
            )
            self.step(
                EngineOpDone(
                    url=call.url,
                    serial=call.serial,
                    ok=not why,
                    detail=why,
                    seen=seen if call.op is EngineOp.LOOK else None,
                    policy_version=engine.policy_version,
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
        engine = self.engines[url]
        if engine.is_hung:
            return EngineProbed(url=url, serial=serial, ok=False, detail="no answer")
        return EngineProbed(
            url=url,
            serial=serial,
            ok=True,
            incarnation=f"incarnation-{engine.incarnation}",
            policy_version=-1 if engine.is_released else engine.policy_version,
        )
