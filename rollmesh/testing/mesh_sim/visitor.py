"""A client beside the trainer in the simulated mesh: it asks, changes its mind, crashes, vanishes.

    one that keeps:  UP <--> DOWN, and comes back with its journal, its name and its sink
    any other:       UP --crash, goodbye--> GONE for good; who comes then is another client

Joins Asks and Sink as `RolloutClient` does; its journal is what survives a crash: what it asked for
and what has ended. Its groups are errands (errands.py), some of which kill their worker. Invariant:
a group ends once in all its lives. Driven by the kernel and by mesh.py.
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
    Closed,
)
from rollmesh.serve.client.sink import Book, Keep, Kept
from rollmesh.testing.mesh_sim.endings import Endings
from rollmesh.testing.mesh_sim.errands import PLAIN, POISON
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

TICK_S = 0.1
BEAT_S = 0.2
MAX_OPEN = 4
PATIENCE_S = 5.0


class Visitor(Node):
    """One client with one sink."""

    def __init__(
        self, name: str, kernel: Kernel, network: Network, num_groups: int, *, keep: bool
    ) -> None:
        super().__init__(name)
        self.keep = keep
        self.asked: dict[GroupId, Asked] = {}
        """The journal: what it wanted."""
        self.endings = Endings()
        """The journal: how it ended."""
        self._kernel = kernel
        self._network = network
        self._num_to_ask = num_groups
        self._weight = kernel.rng.randint(1, 3)
        self._begin_life()
        network.attach(self, self._receive)

    @property
    def is_gone(self) -> bool:
        """It will never be back, and wants nothing more."""
        return not self.alive and not self.keep

    @property
    def is_done(self) -> bool:
        """All that it wanted has ended, and it wanted all that it was to want."""
        has_all = len(self.endings) == len(self.asked) == self._num_to_ask
        return has_all and not self.asks.open and not self.asks.num_cancels

    def start(self) -> None:
        self._tick()

    def restart(self) -> None:
        super().restart()
        self._begin_life()
        for group_id, asked in self.asked.items():
            if group_id not in self.endings:
                # How many attempts have begun, no journal says.
                again = msgspec.structs.replace(asked, attempts=1)
                self._do_asks(self.asks.step(again, self._kernel.now_s()))
        self.start()

    def say_goodbye(self) -> None:
        """It ends in good order."""
        self._do_asks(self.asks.step(Closed(), self._kernel.now_s()))
        self.crash()

    def _begin_life(self) -> None:
        settings = AsksSettings(
            client_id=self.name,
            sink=self.name,
            beat_s=BEAT_S,
            weight=self._weight,
            keep=self.keep,
        )
        self.asks = Asks(settings)
        ended = IntervalSet()
        for group_id in self.endings.reasons:
            ended.add(group_id.seq)
        self._sink = self._network.machines.sink({self.name: ended})

    def _tick(self) -> None:
        now_s = self._kernel.now_s()
        self._do_asks(self.asks.step(Ticked(), now_s))
        while len(self.asked) < self._num_to_ask and len(self.asks.open) < MAX_OPEN:
            self._ask()
        if self.asks.open and self._network.strikes("cancel"):
            group_id = self._kernel.rng.choice(list(self.asks.open))
            self._do_asks(self.asks.step(Cancelled(group_id, "cancelled: why not"), now_s))
        self._kernel.after(TICK_S, self._tick, self)

    def _ask(self) -> None:
        rng, group_id = self._kernel.rng, GroupId(self.name, len(self.asked))
        asked = Asked(
            group_id=group_id,
            env="guess",
            num_samples=rng.randint(1, 4),
            priority=rng.choice((0, 0, 1)),
            deadline_s=rng.uniform(0.2, 3.0) if self._network.strikes("deadline") else 0.0,
            patience_s=PATIENCE_S,
            body=POISON if self._network.strikes("poison") else PLAIN,
        )
        self.asked[group_id] = asked
        self._do_asks(self.asks.step(asked, self._kernel.now_s()))

    def _receive(self, source: str, packet: Packet) -> None:
        now_s = self._kernel.now_s()
        event = Received(source.encode(), packet.message, packet.body, packet.router)
        if source == "router":
            self._do_asks(self.asks.step(event, now_s))
            return
        for action in self._sink.step(event, now_s):
            self._do_sink(action)

    def _do_asks(self, actions: list[Send | AskEnded]) -> None:
        for action in actions:
            match action:
                case Send():
                    assert action.route == ROUTER
                    packet = Packet(action.message, self.asks.router, action.body)
                    self._network.send(self, "router", packet)
                case AskEnded():
                    for booked in self._sink.step(action, self._kernel.now_s()):
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

    def _keep(self, keep: Keep) -> None:
        now_s, message = self._kernel.now_s(), keep.message
        for action in self._sink.step(Kept(keep), now_s):
            self._do_sink(action)
        self._do_asks(self.asks.step(Arrived(message.group_id), now_s))
        self.endings.add(message.group_id, "" if message.complete else "incomplete")
