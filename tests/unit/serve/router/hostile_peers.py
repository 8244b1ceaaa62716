"""Peers that send well-formed messages in any order, also those that no correct peer sends.

The invariants checked after each message are those of lossy_network.py.
"""

import math
import random
from collections.abc import Callable

from rollmesh.core.ids import GroupId
from rollmesh.wire.messages import (
    AnyMessage,
    AskDrain,
    AskGroup,
    CancelGroup,
    ClientBeat,
    ClientHello,
    ClientLeft,
    EnvFailed,
    GroupDelivered,
    GroupLost,
    GroupReturned,
    GroupStarted,
    HeldGroup,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)

HUGE = 2**62
WORKERS, CLIENTS = ("w0", "w1", "w2", ""), ("c", "d", "")
ATTEMPTS = (-1, 0, 1, 1, 2, 3)
COUNTS = (1, 2, 4, 4, 9, 0, -3, HUGE)
TIMES_S = (0.0, 0.0, 0.5, 5.0, 100.0, -1.0, math.nan, math.inf)
STARTS_S = (0.0, 1.0, 2.0, 2.0, 3.0, math.nan)


class HostilePeer:
    """Sends random messages."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def message(self) -> AnyMessage:
        """Return the next message."""
        one = self.rng.choice
        worker, client, attempt, count = one(WORKERS), one(CLIENTS), one(ATTEMPTS), one(COUNTS)
        group, pid, time_s, started_s = self._group(), one((1, 1, 2)), one(TIMES_S), one(STARTS_S)
        room = one((8, 8, 8, 0, -5, HUGE))
        holds = tuple(self._held() for _ in range(one((0, 1, 2))))
        ask = AskGroup(group, client, "guess", count, "s", attempt, one((0, 1, -5)), time_s)
        weights: dict[Callable[[], AnyMessage], int] = {
            lambda: ask: 8,
            lambda: CancelGroup(group, "why not"): 2,
            lambda: ClientHello(client, count, one((True, False))): 2,
            lambda: ClientBeat(client, 0): 2,
            lambda: ClientLeft(client): 1,
            lambda: WorkerHello(worker, "guess", room, pid, "h", holds, started_s): 3,
            lambda: WorkerHello(worker, "guess", room, pid, "h", holds, started_s, time_s): 1,
            lambda: _beat(worker, count, time_s, started_s): 4,
            lambda: _beat(worker, count, time_s, started_s, "worn"): 1,
            lambda: WorkerLeft(worker, "left"): 1,
            lambda: EnvFailed(worker, "guess", "broken"): 1,
            lambda: GroupStarted(group, attempt): 3,
            lambda: GroupDelivered(group, attempt): 2,
            lambda: GroupReturned(group, attempt, "back"): 2,
            lambda: GroupLost(group, attempt, "lost"): 2,
            lambda: WorkerExited(worker, pid, "killed"): 1,
            lambda: AskDrain(1, worker, "go"): 1,
        }
        return self.rng.choices(list(weights), list(weights.values()))[0]()

    def _group(self) -> GroupId:
        return GroupId("r", self.rng.randrange(6))

    def _held(self) -> HeldGroup:
        return HeldGroup(self._group(), self.rng.choice(ATTEMPTS), self.rng.random() < 0.3)


def _beat(
    worker: str, num_running: int, lag_s: float, started_s: float, state: str = "serving"
) -> WorkerBeat:
    return WorkerBeat(
        worker, num_running, True, 0, lag_s, 0, 0, 0, 0, state=state, started_s=started_s
    )
