"""The trainer's side of the simulated mesh: asks, sink, staleness, and steps that take time.

An asker (asker.py) with a StalenessManager, as the train loop is. What a group brings
is its record of turns (see worker.py), which checks.py verifies before it trains. Driven by the
kernel: ticks, messages, and the ends of its own writes and steps.
"""

from collections.abc import Callable

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import Asked, Asks, AsksSettings, Cancelled
from rollmesh.serve.client.sink import Keep
from rollmesh.testing.mesh_sim.asker import BEAT_S, TICK_S, Asker
from rollmesh.testing.mesh_sim.kernel import Kernel
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
from rollmesh.wire.machine import Ticked


class Trained(msgspec.Struct, frozen=True):
    """One group in one step."""

    group_id: GroupId
    step: int
    oldest_step: int


class SimClient(Asker):
    """One client with one sink; it freezes but does not crash (recovery is a later machine's)."""

    def __init__(self, kernel: Kernel, network: Network, num_groups: int) -> None:
        super().__init__("client", kernel, network)
        self._num_to_ask = num_groups
        self.asks = Asks(AsksSettings(client_id=self.name, sink=self.name, beat_s=BEAT_S))
        self.sink = network.machines.sink({"run": IntervalSet()})
        self.staleness = StalenessManager(
            StalenessSettings(batch=2, max_staleness=2, max_running=6)
        )
        self.asked: list[GroupId] = []
        self.trained: list[Trained] = []
        self.on_training: Callable[[Trained], None] = lambda _trained: None
        """Looks at each, as it happens."""
        self.num_steps = 0
        self.step_of_version = {0: 0}
        self.to_publish: list[int] = []
        """Steps whose weights wait for the publisher."""
        self._turns: dict[GroupId, GroupTurns] = {}
        self._is_training = False

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
        self._tell(Ticked())
        while self.wants_more and self.staleness.capacity:
            self._ask()
        if self.asks.open and self._network.strikes("cancel"):
            group_id = self._kernel.rng.choice(list(self.asks.open))
            self._tell(Cancelled(group_id, "cancelled: why not"))
        self._train()
        self._kernel.after(TICK_S, self._tick, self)

    def _ask(self) -> None:
        group_id = GroupId("run", len(self.asked))
        self.asked.append(group_id)
        self.staleness.step(GroupAsked(group_id))
        self._tell(Asked(group_id=group_id, env="guess", num_samples=2, body=b"task"))

    def _kept(self, keep: Keep) -> None:
        group_id = keep.message.group_id
        turns = msgspec.msgpack.decode(keep.body, type=GroupTurns)
        assert all(turn.is_exact() for turn in turns.turns), f"{group_id}: tokens are not exact"
        self.endings.add(group_id, turns.reason)
        if turns.reason:
            self.staleness.step(GroupEnded(group_id))
            return
        self._turns[group_id] = turns
        oldest_step = self.step_of_version[turns.oldest_version()]
        self.staleness.step(GroupArrived(group_id, oldest_step))

    def _booked(self, group_id: GroupId) -> None:
        self.staleness.step(GroupEnded(group_id))

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
        trained = Trained(group_id, step, oldest_step)
        self.trained.append(trained)
        self.on_training(trained)

    def _end_step(self) -> None:
        self._is_training = False
        self.num_steps += 1
        self.to_publish.append(self.num_steps)
