"""A network that loses, duplicates and delays messages, around one real group scheduler.

The peers are minimal models of the protocol. The scheduler's invariants are asserted after every
step. (The simulator runs the real machines; this reaches states that correct peers do not.)
"""

import heapq
import random
from collections import Counter

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.workers import WorkerHealth
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AnyMessage,
    AskDrain,
    AskGroup,
    CancelGroup,
    CancelRun,
    ClientBeat,
    DrainWorker,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    HeldGroup,
    RouterHello,
    RunGroup,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)

SETTINGS = RouterConfig(
    beat_s=1.0, missed_beats=4, max_attempts=4, client_grace_s=20.0, max_queued_groups=12
)
NUM_WORKERS = 3
NUM_GROUPS = 12


class LossyNetwork:
    """One run with the random seed `seed`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.group_scheduler = GroupScheduler(SETTINGS, 0.0)
        self.num_restarts = 0
        self.pids = dict.fromkeys((f"w{n}" for n in range(NUM_WORKERS)), 1)
        self.frozen_until_s = dict.fromkeys(self.pids, 0.0)
        self.runs: dict[str, dict[GroupId, int]] = {name: {} for name in self.pids}
        self.delivered: set[GroupId] = set()
        self.open: dict[GroupId, tuple[int, int]] = {}
        """Groups that the client wants, with their known attempts and excused attempts."""
        self.ends: Counter[GroupId] = Counter()
        self.num_asked = 0
        self.num_excuses: Counter[GroupId] = Counter()
        """Attempts that were returned, or interrupted by a worker that left, as reported to the
        scheduler."""
        self.is_calm = False
        self._timers: list[tuple[float, int, str, AnyMessage]] = []
        self._count = 0

    def run(self, chaos_s: float, calm_s: float) -> None:
        """Run for a time with faults, then for a time without."""
        while self.now_s < chaos_s + calm_s:
            self.is_calm = self.now_s >= chaos_s
            self.now_s += 0.5
            self._peers_act()
            self._deliver()
            self._take(self.group_scheduler.step(Ticked(), self.now_s))
            self.check()

    def check(self) -> None:
        """Assert the invariants that hold after every step."""
        table, membership = self.group_scheduler.table, self.group_scheduler.membership
        held_by: Counter[GroupId] = Counter()
        for worker in membership.workers:
            held_by.update(list(worker.groups))
            seated = sum(group.num_samples for group in worker.groups.values())
            assert worker.load <= seated
            assert all(g.worker_id == worker.worker_id for g in worker.groups.values())
            assert worker.state is WorkerHealth.LIVE or not worker.groups
        in_queue = {group.group_id for group in table.queue.of_env("guess")}
        assert len(in_queue) == len(table.queue)
        for group_id, group in table.groups.items():
            is_queued = group.state is GroupState.QUEUED
            assert held_by[group_id] == (not is_queued)
            places = (group_id in in_queue, group_id in table.held, group_id in table.suspects)
            assert sum(places) == is_queued
            assert 0 <= group.excused <= max(group.attempt, 0)
            assert group.tries <= SETTINGS.max_attempts
        assert len(held_by) + table.num_waiting == len(table.groups)
        waiting = [group for group in table.groups.values() if group.state is GroupState.QUEUED]
        assert table.num_waiting_bytes == sum(len(group.body) for group in waiting)
        assert sum(map(len, table.of_client.values())) == sum(
            bool(group.client_id) for group in table.groups.values()
        )
        counted = Counter(group.state for group in table.groups.values())
        for state in (GroupState.QUEUED, GroupState.ASSIGNED, GroupState.RUNNING):
            assert table.num_in[state] == counted[state]

    # network

    def _send(self, route: str, message: AnyMessage) -> None:
        self._put("router", route, message)

    def _put(self, target: str, route: str, message: AnyMessage) -> None:
        rng, copies = self.rng, 1
        if not self.is_calm:
            copies = rng.choices((0, 1, 2), (8, 84, 8))[0]
        for _ in range(copies):
            delay_s = 0.1 if self.is_calm else rng.expovariate(3.0)
            self._count += 1
            key = f"{target} {route}"
            heapq.heappush(self._timers, (self.now_s + delay_s, self._count, key, message))

    def _deliver(self) -> None:
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, key, message = heapq.heappop(self._timers)
            target, route = key.split()
            if target == "router":
                self._note_excuses(message)
                event = Received(route.encode(), message, b"task")
                self._take(self.group_scheduler.step(event, self.now_s))
                self.check()
            elif target in ("launch", "cli"):
                pass
            elif target == "c":
                self._client_receives(message)
            elif self.frozen_until_s[target] > self.now_s:
                self._put(target, "router", message)
            else:
                self._worker_receives(target, message)

    def _note_excuses(self, message: AnyMessage) -> None:
        if isinstance(message, GroupReturned):
            self.num_excuses[message.group_id] += 1
        elif isinstance(message, WorkerLeft):
            worker = self.group_scheduler.membership.workers.get(message.worker_id)
            self.num_excuses.update(list(worker.groups) if worker else ())

    def _take(self, sends: list[Send]) -> None:
        for send in sends:
            target = send.route.decode()
            if isinstance(send.message, RunGroup):
                worker = self.group_scheduler.membership.workers.at(send.route)
                assert worker is not None
                assert worker.state is WorkerHealth.LIVE
                most = SETTINGS.max_attempts + self.num_excuses[send.message.group_id]
                assert 1 <= send.message.attempt <= most
            self._put(target, "router", send.message)

    # peers

    def _peers_act(self) -> None:
        rng = self.rng
        if not self.is_calm and self.num_asked < NUM_GROUPS and rng.random() < 0.5:
            self.open[GroupId("r1", self.num_asked)] = (0, 0)
            self.num_asked += 1
        self._send("c", ClientBeat("c", len(self.open)))
        for group_id, (attempts, excused) in list(self.open.items()):
            if not self.is_calm and rng.random() < 0.01:
                self._end(group_id)
                self._send("c", CancelGroup(group_id, "enough"))
            elif rng.random() < 0.3:
                deadline_s = 30.0 if group_id.seq % 4 == 0 else 0.0
                sink = "tcp://sink"
                ask = AskGroup(group_id, "c", "guess", 4, sink, attempts, 0, deadline_s, excused)
                self._send("c", ask)
        for name in self.pids:
            self._worker_acts(name)
        if not self.is_calm and rng.random() < 0.01:
            self.num_restarts += 1
            self.group_scheduler = GroupScheduler(SETTINGS, self.now_s)

    def _worker_acts(self, name: str) -> None:
        rng, runs = self.rng, self.runs[name]
        if self.frozen_until_s[name] > self.now_s:
            return
        if not self.is_calm and rng.random() < 0.02:
            self.frozen_until_s[name] = self.now_s + rng.uniform(1.0, 8.0)
        if not self.is_calm and rng.random() < 0.02:
            if rng.random() < 0.5:
                self._send("launch", WorkerExited(name, self.pids[name], "killed by signal 9"))
            self._restart(name)
        if not self.is_calm and rng.random() < 0.01:
            self._send("cli", AskDrain(1, name, "an update"))
        lag_s = 99.0 if not self.is_calm and rng.random() < 0.02 else 0.0
        self._send(name, WorkerBeat(name, 4 * len(runs), True, 0, lag_s, 0, 0, 0, 0))
        for group_id, attempt in list(runs.items()):
            if rng.random() < 0.2:
                del runs[group_id]
                self.delivered.add(group_id)
                self._end(group_id)
                self._send(name, GroupDelivered(group_id, attempt))

    def _restart(self, name: str) -> None:
        self.pids[name] += 1
        self.runs[name].clear()
        self._hello(name)

    def _hello(self, name: str) -> None:
        holds = tuple(HeldGroup(each, attempt, False) for each, attempt in self.runs[name].items())
        pid = self.pids[name]
        self._send(name, WorkerHello(name, "guess", 8, pid, "here", holds, float(pid)))

    def _worker_receives(self, name: str, message: AnyMessage) -> None:
        runs = self.runs[name]
        match message:
            case RouterHello():
                if self.group_scheduler.membership.workers.get(name) is None:
                    self._hello(name)
            case RunGroup(group_id=group_id, attempt=attempt):
                if group_id in self.delivered:
                    self._send(name, GroupDelivered(group_id, attempt))
                elif group_id not in runs and not self.is_calm and self.rng.random() < 0.1:
                    self._send(name, GroupReturned(group_id, attempt, "not now"))
                else:
                    runs[group_id] = max(attempt, runs.get(group_id, 0))
                    self._send(name, GroupStarted(group_id, attempt))
            case CancelRun(group_id=group_id):
                runs.pop(group_id, None)
            case DrainWorker() if not runs:
                self._send(name, WorkerLeft(name, "drained"))
                self._restart(name)

    def _client_receives(self, message: AnyMessage) -> None:
        if isinstance(message, GroupFailed):
            self._end(message.group_id)
        elif isinstance(message, GroupMoved) and message.group_id in self.open:
            attempt, excused = self.open[message.group_id]
            known = (max(attempt, message.attempt), max(excused, message.excused))
            self.open[message.group_id] = known

    def _end(self, group_id: GroupId) -> None:
        if self.open.pop(group_id, None) is not None:
            self.ends[group_id] += 1
