"""The trainer's side of the simulated mesh: asks, sink, staleness, and steps that take time.

Joins Asks, Sink and StalenessManager as `RolloutClient` and the train loop do. What a group brings
is its record of turns (see worker.py), which checks.py verifies before it trains. Driven by the
kernel: ticks, messages, and the ends of its own writes and steps.
"""

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import (
    Arrived,
    Asked,
    AskEnded,
    Asks,
    AsksSettings,
    Cancelled,
)
from rollmesh.serve.client.sink import Book, Keep, Kept
from rollmesh.testing.mesh_sim.endings import Endings
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.turns import GroupTurns
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupArrived,
    GroupAsked,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

TICK_S = 0.1
BEAT_S = 0.2


class Trained(msgspec.Struct, frozen=True):
    """One group in one step."""

    group_id: GroupId
    step: int
    oldest_step: int


class SimClient(Node):
    """One client with one sink; it freezes but does not crash (recovery is a later machine's)."""

    def __init__(self, kernel: Kernel, network: Network, num_groups: int) -> None:
        super().__init__("client")
        self._kernel = kernel
        self._network = network
        self._num_to_ask = num_groups
        self.asks = Asks(AsksSettings(client_id=self.name, sink=self.name, beat_s=BEAT_S))
        self.sink = network.machines.sink({"run": IntervalSet()})
        self.staleness = StalenessManager(
            StalenessSettings(batch=2, max_staleness=2, max_running=6)
        )
        self.asked: list[GroupId] = []
        self.endings = Endings()
        self.trained: list[Trained] = []
        self.num_steps = 0
        self.step_of_version = {0: 0}
        self.to_publish: list[int] = []
        """Steps whose weights wait for the publisher."""
        self._turns: dict[GroupId, GroupTurns] = {}
        self._is_training = False
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()

    def open_groups(self) -> int:
        """Asked and not ended."""
        return len(self.asked) - len(self.endings)

    @property
    def wants_more(self) -> bool:
        return len(self.asked) < self._num_to_ask

    def published(self, step: int) -> None:
        """The publisher brought the weights after `step` steps to the fleet."""
        self.staleness.step(StepPublished(step))

    def _tick(self) -> None:
        self._do_asks(self.asks.step(Ticked(), self._kernel.now_s()))
        while self.wants_more and self.staleness.capacity:
            self._ask()
        if self.asks.open and self._network.strikes("cancel"):
            group_id = self._kernel.rng.choice(list(self.asks.open))
            self._do_asks(
                self.asks.step(Cancelled(group_id, "cancelled: why not"), self._kernel.now_s())
            )
        self._train()
        self._kernel.after(TICK_S, self._tick, self)

    def _ask(self) -> None:
        group_id = GroupId("run", len(self.asked))
        self.asked.append(group_id)
        self.staleness.step(GroupAsked(group_id))
        asked = Asked(group_id=group_id, env="guess", num_samples=2, body=b"task")
        self._do_asks(self.asks.step(asked, self._kernel.now_s()))

    def _receive(self, source: str, packet: Packet) -> None:
        now_s = self._kernel.now_s()
        event = Received(source.encode(), packet.message, packet.body, packet.router)
        if source == "router":
            self._do_asks(self.asks.step(event, now_s))
            return
        for action in self.sink.step(event, now_s):
            self._do_sink(action)

    def _do_asks(self, actions: list[Send | AskEnded]) -> None:
        for action in actions:
            match action:
                case Send():
                    assert action.route == ROUTER
                    packet = Packet(action.message, self.asks.router, action.body)
                    self._network.send(self, "router", packet)
                case AskEnded():
                    for booked in self.sink.step(action, self._kernel.now_s()):
                        self._do_sink(booked)

    def _do_sink(self, action: Send | Keep | Book) -> None:
        match action:
            case Send():
                packet = Packet(action.message, "", action.body)
                self._network.send(self, action.route.decode(), packet)
            case Keep():
                if not self._network.strikes("not_kept"):
                    self._keep(action)
            case Book(group_id, reason):
                self.endings.add(group_id, reason)
                self.staleness.step(GroupEnded(group_id))

    def _keep(self, keep: Keep) -> None:
        # The journal's write: synchronous, as in the process.
        group_id = keep.message.group_id
        for action in self.sink.step(Kept(keep), self._kernel.now_s()):
            self._do_sink(action)
        turns = msgspec.msgpack.decode(keep.body, type=GroupTurns)
        assert all(turn.is_exact() for turn in turns.turns), f"{group_id}: tokens are not exact"
        self._do_asks(self.asks.step(Arrived(group_id), self._kernel.now_s()))
        self.endings.add(group_id, turns.reason)
        if turns.reason:
            self.staleness.step(GroupEnded(group_id))
            return
        self._turns[group_id] = turns
        oldest_step = self.step_of_version[turns.oldest_version()]
        self.staleness.step(GroupArrived(group_id, oldest_step))

    def _train(self) -> None:
        if self._is_training:
            return
        for action in self.staleness.step(TakeBatch(self.num_steps)):
            match action:
                case GroupStale(group_id):
                    self._network.num["stale"] += 1
                    self._turns.pop(group_id)
                case BatchTaken(step, group_ids):
                    self._is_training = True
                    for group_id in group_ids:
                        self._book_training(group_id, step)
                    delay_s = self._kernel.rng.uniform(0.05, 0.4)
                    self._kernel.after(delay_s, self._end_step, self)

    def _book_training(self, group_id: GroupId, step: int) -> None:
        turns = self._turns.pop(group_id)
        oldest_step = self.step_of_version[turns.oldest_version()]
        self.trained.append(Trained(group_id, step, oldest_step))

    def _end_step(self) -> None:
        self._is_training = False
        self.num_steps += 1
        self.to_publish.append(self.num_steps)
