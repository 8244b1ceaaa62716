"""A client beside the trainer in the simulated mesh: it asks, cancels, crashes and vanishes.

    one that keeps:  UP <--> DOWN, and returns with its journal, its name and its sink
    any other:       UP --crash, goodbye--> GONE for good; the next one is another client

Its journal (requests and ends) survives a crash. Its groups need no engine, and some kill their
worker.
"""

import msgspec

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import Asked, AskMachine, AskSettings, Cancelled, Closed
from rollmesh.serve.client.journal_entries import GroupTried
from rollmesh.testing.mesh_sim.kernel import Kernel
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.requesting_client import BEAT_S, TICK_S, RequestingClient
from rollmesh.testing.mesh_sim.rollouts import PLAIN, POISON
from rollmesh.wire.machine import Ticked

MAX_OPEN = 4
PATIENCE_S = 10.0
"""Patience with a full router: longer than the restart of all workers, one after the other."""


class TransientClient(RequestingClient):
    """One client with one sink."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        network: Network,
        num_groups: int,
        *,
        keep: bool,
        client_id: str = "",
    ) -> None:
        """`client_id` is its name at the router, if another client has it too."""
        super().__init__(name, kernel, network)
        self._client_id = client_id or name
        self.keep = keep
        self.asked: dict[GroupId, Asked] = {}
        """With the ends its journal: the groups that it asked for."""
        self._tries: dict[GroupId, GroupTried] = {}
        self._num_to_ask = num_groups
        self._weight = kernel.rng.randint(1, 3)
        self._begin_life()

    @property
    def is_gone(self) -> bool:
        """Leave for good: it wants nothing more."""
        return not self.alive and not self.keep

    @property
    def is_done(self) -> bool:
        """Return whether everything that it was to ask for was asked for and has ended."""
        has_all = len(self.endings) == len(self.asked) == self._num_to_ask
        return has_all and not self.asks.open and not self.asks.num_cancels

    def start(self) -> None:
        self._tick()

    def restart(self) -> None:
        super().restart()
        self._begin_life()
        for group_id, asked in self.asked.items():
            if group_id not in self.endings:
                tried = self._tries.get(group_id, GroupTried(group_id, 1, 0))
                again = msgspec.structs.replace(
                    asked, attempts=tried.attempts, excused=tried.excused
                )
                self._tell(again)
        self.start()

    def say_goodbye(self) -> None:
        """Leave with a goodbye."""
        self._tell(Closed())
        self.crash()

    def _tried(self, tried: GroupTried) -> None:
        self._tries[tried.group_id] = tried

    def _begin_life(self) -> None:
        settings = AskSettings(
            client_id=self._client_id,
            sink=self.name,
            beat_s=BEAT_S,
            weight=self._weight,
            keep=self.keep,
        )
        self.asks = AskMachine(settings)
        ended = IntervalSet()
        for group_id in self.endings.reasons:
            ended.add(group_id.seq)
        self.sink = self._network.machines.sink({self.name: ended}, self.asks.find)

    def _tick(self) -> None:
        self._tell(Ticked())
        while len(self.asked) < self._num_to_ask and len(self.asks.open) < MAX_OPEN:
            self._ask()
        if self.asks.open and self._network.strikes("cancel"):
            group_id = self._kernel.rng.choice(list(self.asks.open))
            self._tell(Cancelled(group_id, "cancelled: why not"))
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
        self._tell(asked)
