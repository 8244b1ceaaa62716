"""A router's life: clients ask, workers run, some vanish, and messages come late or twice.

Owns a ledger on a clock that is turned by hand, and its peers: four clients of which one now and
then leaves for another, workers of which one now and then falls silent for good or comes back under
its name. Invariants: every group that is asked for ends; after `rest` nobody is left, and no group.
Driven by scale.py and by tests.
"""

import random
from collections import deque

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    CancelGroup,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    HeldGroup,
    RunGroup,
    WorkerBeat,
    WorkerHello,
    WorkerLeft,
)

NUM_CLIENTS, NUM_WORKERS = 4, 16
SLOTS, GROUP = 64, 4
WINDOW = 400
"""Groups under way; all slots are 256 groups."""
ASK_BYTES = 1000
TURNS_PER_BEAT = 2
TURNS_PER_LOSS, TURNS_PER_NEW_CLIENT = 8, 20
LONGEST_S = 3600.0
"""Of a group, by its deadline."""
SILENCE_S = LONGEST_S + 100.0
"""After it a router has forgotten who was silent, and when it was to look at what has ended."""
ENDED = (GroupState.DONE, GroupState.FAILED, GroupState.CANCELLED)


class WorkerPeer:
    """What one worker process knows."""

    def __init__(self, name: str, started_s: float) -> None:
        self.name = name
        self.started_s = started_s
        self.runs: dict[GroupId, int] = {}
        """Attempts, by group."""


class Life:
    """`num_ended` of `num_asked` groups have ended for their clients."""

    def __init__(self, seed: int = 0) -> None:
        self.ledger = GroupScheduler(RouterConfig(), 0.0)
        self.num_asked = self.num_ended = 0
        self._now_s = 10.0
        self._beat_s = RouterConfig().beat_s
        self._random = random.Random(seed)
        self._num_turns = self._num_names = 0
        self._clients: list[str] = []
        self._workers: dict[str, WorkerPeer] = {}
        self._open: dict[GroupId, str] = {}
        """By group: its client."""
        self._sends: deque[Send] = deque()

    def run(self, num_groups: int) -> None:
        """Ask for so many more, and turn until all have ended."""
        while len(self._clients) < NUM_CLIENTS:
            self._clients.append(self._new_client())
        while len(self._workers) < NUM_WORKERS:
            self._new_worker()
        until = self.num_asked + num_groups
        while self.num_asked < until or self._open:
            self._turn(until)

    def rest(self) -> None:
        """All leave, and time goes by until the router has forgotten them; `run` brings others."""
        for client_id in self._clients:
            self._say(client_id, ClientLeft(client_id))
        for worker in self._workers.values():
            self._say(worker.name, WorkerLeft(worker.name, "the end", 1, worker.started_s))
        self._clients.clear()
        self._workers.clear()
        end_s = self._now_s + SILENCE_S
        while self._now_s < end_s:
            self._now_s += self._beat_s
            self.ledger.step(Ticked(), self._now_s)
        self._sends.clear()

    def _turn(self, until: int) -> None:
        self._num_turns += 1
        while self.num_asked < until and len(self._open) < WINDOW:
            self._ask()
        for worker in self._workers.values():
            self._work(worker)
        if self._num_turns % TURNS_PER_BEAT == 0:
            self._beat()
        if self._num_turns % TURNS_PER_LOSS == 0:
            self._lose_worker()
        if self._num_turns % TURNS_PER_NEW_CLIENT == 0:
            self._change_client()
        self._now_s += self._beat_s / TURNS_PER_BEAT
        self._sends += self.ledger.step(Ticked(), self._now_s)
        self._deliver()

    def _ask(self) -> None:
        client_id = self._clients[self.num_asked % NUM_CLIENTS]
        group_id = GroupId("r7f3a9c1", self.num_asked)
        self.num_asked += 1
        self._open[group_id] = client_id
        self._say_ask(group_id)
        chance = self._random.random()
        if chance < 0.02:
            self._say_ask(group_id)
        elif chance < 0.03:
            self._say(client_id, CancelGroup(group_id, "no longer wanted"))
        self._deliver()

    def _say_ask(self, group_id: GroupId) -> None:
        client_id = self._open[group_id]
        deadline_s = LONGEST_S if group_id.seq % 3 == 0 else 0.0
        sink = "tcp://127.0.0.1:40000"
        ask = AskGroup(group_id, client_id, "bench", GROUP, sink, 0, 0, deadline_s)
        self._say(client_id, ask, bytes(ASK_BYTES))

    def _work(self, worker: WorkerPeer) -> None:
        """Some of what it runs ends; now and then it is said twice, or handed back."""
        for group_id, attempt in list(worker.runs.items()):
            chance = self._random.random()
            if chance < 0.5:
                continue
            del worker.runs[group_id]
            if chance < 0.51:
                self._say(worker.name, GroupReturned(group_id, attempt, "no room"))
                continue
            for _ in range(2 if chance < 0.53 else 1):
                self._say(worker.name, GroupDelivered(group_id, attempt))

    def _beat(self) -> None:
        for client_id in self._clients:
            self._say(client_id, ClientBeat(client_id, 1))
        for worker in self._workers.values():
            beat = WorkerBeat(
                worker_id=worker.name,
                num_running=GROUP * len(worker.runs),
                accepting=True,
                unacked_bytes=0,
                loop_lag_s=0.0,
                rss_bytes=10**8,
                num_finished=1,
                num_calls=1,
                num_tokens=1,
                started_s=worker.started_s,
            )
            self._say(worker.name, beat)

    def _lose_worker(self) -> None:
        """One falls silent: for good, or its next process takes its name, or it says all anew."""
        name = self._random.choice(list(self._workers))
        worker = self._workers.pop(name)
        fate = self._random.randrange(3)
        if fate == 0:
            self._new_worker()
        elif fate == 1:
            self._new_worker(name)
        else:
            self._workers[name] = worker
            held = tuple(HeldGroup(each, attempt, False) for each, attempt in worker.runs.items())
            self._greet(worker, held)

    def _change_client(self) -> None:
        """One leaves with what it wants, and another comes."""
        at = self._random.randrange(NUM_CLIENTS)
        left, self._clients[at] = self._clients[at], self._new_client()
        self._say(left, ClientLeft(left))
        gone = [group_id for group_id, client_id in self._open.items() if client_id == left]
        for group_id in gone:
            self._end(group_id)

    def _new_client(self) -> str:
        self._num_names += 1
        client_id = f"client-{self._num_names}"
        self.ledger.step(Received(client_id.encode(), ClientHello(client_id)), self._now_s)
        return client_id

    def _new_worker(self, name: str = "") -> None:
        self._num_names += 1
        worker = WorkerPeer(name or f"worker-{self._num_names}", self._now_s)
        self._workers[worker.name] = worker
        self._greet(worker, ())

    def _greet(self, worker: WorkerPeer, held: tuple[HeldGroup, ...]) -> None:
        hello = WorkerHello(
            worker.name, "bench", SLOTS, 1, "elsewhere", held, started_s=worker.started_s
        )
        self._say(worker.name, hello)

    def _say(self, who: str, message: AnyMessage, body: bytes = b"") -> None:
        self._sends += self.ledger.step(Received(who.encode(), message, body), self._now_s)

    def _deliver(self) -> None:
        """What the router sent; what it says to those that are gone is lost."""
        while self._sends:
            send = self._sends.popleft()
            worker = self._workers.get(send.route.decode())
            match send.message:
                case RunGroup(group_id, attempt) if worker:
                    if group_id not in worker.runs:
                        worker.runs[group_id] = attempt
                        self._say(worker.name, GroupStarted(group_id, attempt))
                case CancelRun(group_id) if worker:
                    worker.runs.pop(group_id, None)
                case GroupFailed(group_id):
                    self._end(group_id)
                case GroupMoved(group_id, state) if state in ENDED:
                    self._end(group_id)
                case _:
                    pass

    def _end(self, group_id: GroupId) -> None:
        self.num_ended += self._open.pop(group_id, None) is not None
