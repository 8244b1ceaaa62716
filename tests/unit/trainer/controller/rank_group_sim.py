"""Simulated ranks and their network on a virtual clock, for tests of faults of both.

A rank runs its messages in order, reports, and beats; it may crash, freeze, fail a call or stay in
one; a message may be lost in either direction. `Sim.run` continues until nothing is open.
"""

import random
from collections import Counter, deque

from rollmesh.trainer.controller.rank_group import (
    Action,
    CallAnswered,
    CallRaised,
    CallRequested,
    Event,
    RankExited,
    RankGroup,
    RankGroupSettings,
    RanksLost,
    SendToRank,
    TensorReport,
    TensorsQueried,
)
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    ControllerBeat,
    DropCall,
    FormGroup,
    HeldTensors,
    RankBeat,
    RankHello,
    RankLeft,
    RankMessage,
    RankReady,
    ReadTensors,
    RunCall,
    StageCall,
    TensorsReported,
)

BEAT_S = 1.0
SETTINGS = RankGroupSettings(
    start_s=60.0, beat_s=BEAT_S, silence_s=10.0, settle_s=5.0, report_timeout_s=5.0
)
GIVE_UP_S = 300.0


class SimRank:
    """One simulated rank process."""

    def __init__(self, number: int, chance: random.Random, trouble: float) -> None:
        self.number = number
        self.inbox: deque[RankMessage] = deque()
        self.outbox: deque[RankMessage] = deque([RankHello(number, 100 + number)])
        self.is_frozen = False
        self.is_ended = False
        self.ended_step = -1
        self.staged: list[int] = []
        """Received messages in order."""
        self.ran: list[int] = []
        self._chance = chance
        self._trouble = trouble
        self._num_received = 0
        self._num_delivered = 0

    def turn(self) -> None:
        """Handle one message."""
        if self.is_frozen or self.is_ended or not self.inbox:
            return
        message = self.inbox.popleft()
        self.ended_step = max(self.ended_step, getattr(message, "ended_step", -1))
        if isinstance(message, ControllerBeat) and message.num_sent != self._num_received:
            self._leave("messages were lost")
        self._num_received += 1
        self._do(message)

    def beat(self) -> None:
        """Send a heartbeat."""
        if not self.is_frozen and not self.is_ended:
            self.send(RankBeat(self.number, self.ended_step, self._num_delivered))

    def send(self, message: RankMessage) -> None:
        """Queue the message; it is counted even if the network loses it."""
        self.outbox.append(message)

    def take_sent(self) -> RankMessage:
        """Return the next message to deliver; a beat gets its count of earlier messages only
        now."""
        message = self.outbox.popleft()
        if isinstance(message, RankBeat):
            message = RankBeat(self.number, message.ended_step, self._num_delivered)
        self._num_delivered += 1
        return message

    def _do(self, message: RankMessage) -> None:
        fails = self._chance.random() < self._trouble
        match message:
            case FormGroup():
                self.send(RankReady(self.number, f"tcp://rank:{self.number}"))
            case StageCall(call_id=call_id):
                self.staged.append(call_id)
                self.send(CallStaged(self.number, call_id, "no such shard" if fails else ""))
            case RunCall(call_id=call_id):
                if not self.staged or self.staged[0] != call_id:
                    self._leave("a call was lost")
                    return
                self.staged.remove(call_id)
                self.ran.append(call_id)
                if fails and self._chance.random() < 0.3:
                    self.is_frozen = self._chance.random() < 0.5  # else it raises where others wait
                if not self.is_frozen:
                    self.send(CallEnded(self.number, call_id, "ValueError" if fails else ""))
            case DropCall(call_id=call_id):
                self.staged = [each for each in self.staged if each != call_id]
            case ReadTensors(ended_step=step, ask_id=ask_id):
                nothing = HeldTensors()
                self.send(TensorsReported(self.number, ask_id, step, 0, nothing, nothing))

    def _leave(self, why: str) -> None:
        self.send(RankLeft(self.number, why))
        self.is_ended = True


class Sim:
    """A rank group, its ranks, and a network that loses the fraction `loss` of the messages."""

    def __init__(self, seed: int, num_ranks: int, trouble: float, loss: float) -> None:
        self.now_s = 0.0
        routes = [b"%d" % number for number in range(num_ranks)]
        self.group = RankGroup(routes, SETTINGS, 0.0)
        self.ends: Counter[int] = Counter()
        """How often each call or query has ended."""
        self.broken: list[RanksLost] = []
        self.num_lost = 0
        self._chance = random.Random(seed)
        self._trouble, self._loss = trouble, loss
        self.ranks = [SimRank(n, self._chance, trouble) for n in range(num_ranks)]

    def run(self, num_calls: int) -> None:
        """Make random calls and queries until all have ended or no more progress is possible."""
        waiting: list[Event] = [
            CallRequested(n, "a", "b", n, (b"x",) * len(self.ranks)) for n in range(num_calls)
        ]
        waiting += [TensorsQueried(num_calls + n, n) for n in range(num_calls)]
        self._chance.shuffle(waiting)
        while self.now_s < GIVE_UP_S and (waiting or self.ends.total() < 2 * num_calls):
            if waiting and self._chance.random() < 0.1:
                self._step(waiting.pop())
            self._trouble_somebody()
            self._carry()
            self.now_s += 0.05
            self._step(Ticked())

    def _carry(self) -> None:
        for rank in self._chance.sample(self.ranks, len(self.ranks)):
            rank.turn()
            if self._chance.random() < 0.05 / BEAT_S:
                rank.beat()
            while rank.outbox and self._chance.random() < 0.7:
                message = rank.take_sent()
                if not self._is_lost():
                    self._step(Received(b"%d" % rank.number, message))

    def _trouble_somebody(self) -> None:
        if self._chance.random() < self._trouble * 0.01:
            rank = self._chance.choice(self.ranks)
            if self._chance.random() < 0.5:
                rank.is_frozen = True
            elif not rank.is_ended:
                rank.is_ended = True
                self._step(RankExited(rank.number, "killed by signal 9"))

    def _step(self, event: Event) -> None:
        for action in self.group.step(event, self.now_s):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case SendToRank(route, message):
                if not self._is_lost():
                    self.ranks[int(route)].inbox.append(message)
            case CallAnswered(call_id) | CallRaised(call_id):
                self.ends[call_id] += 1
            case TensorReport(ask_id):
                self.ends[ask_id] += 1
            case RanksLost():
                self.broken.append(action)

    def _is_lost(self) -> bool:
        lost = self._chance.random() < self._loss
        self.num_lost += lost
        return lost
