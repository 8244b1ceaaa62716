"""The trainer's client in the simulated mesh: asks and a sink over the real journal, on a SimDisk.

    one incarnation: begin (replay, plan, repeat open requests) -> ask, receive, note -> killed

- A restarted client knows what the disk and checkpoints hold, and nothing else.
- A result is on the disk before it is acked; what the disk does not take is not acked.
"""

from collections import deque

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, JournalError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy
from rollmesh.serve.client.arrivals import Keep, ResultKept, StoredResult
from rollmesh.serve.client.asks import Arrived, Asked, AskMachine, AskSettings
from rollmesh.serve.client.journal import ClientJournal, History
from rollmesh.serve.client.journal_entries import (
    GroupParted,
    GroupTried,
    Published,
    RunBegan,
    StateSaved,
    StepTaken,
)
from rollmesh.testing.mesh_sim.disk import SimDisk
from rollmesh.testing.mesh_sim.kernel import Kernel, Killed
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.requesting_client import BEAT_S, RequestingClient
from rollmesh.testing.mesh_sim.rollouts import SimGroupTurns
from rollmesh.trainer.pacing.lifecycle import GroupRequest
from rollmesh.wire.frames import Buffer, Packet, encode_ask
from rollmesh.wire.messages import GroupAsk

MAX_BYTES = (4_000, 24_000, 24_000)
"""Byte budget of the journal; every third seed often reaches it."""
NUM_SAMPLES = 2
"""Rollouts of a group; all of them train."""


class TakenGroup(msgspec.Struct, frozen=True):
    """A group as the program takes it from its client."""

    group_id: GroupId
    turns: SimGroupTurns | None = None
    """None if it ended without a result."""
    reason: str = ""
    """Why it ended without one."""


class SimClient(RequestingClient):
    """The trainer's client: journal, requests and sink, without threads and sockets."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        super().__init__("client", kernel, network)
        self.disk = SimDisk(self, network)
        self.arrivals: deque[TakenGroup | StoredResult] = deque()
        self._held_asks: deque[Asked] = deque()
        self._num_asked = 0
        self.max_bytes = MAX_BYTES[kernel.seed % len(MAX_BYTES)]
        self.book = self._open_book()
        self.asks = self._new_asks()
        self.sink = network.machines.sink(self.book.ended, self.asks.find)

    @property
    def run_id(self) -> str:
        return f"run-{self.num_crashes}"

    def open_book(self) -> History:
        """State that earlier incarnations have left."""
        self.book = self._open_book()
        return self.book.history()

    def begin(self, saved: StateSaved) -> None:
        """Repeat open requests, and hand out results that no step took."""
        self.arrivals.clear()
        self._held_asks.clear()
        self._num_asked = 0
        self.asks = self._new_asks()
        try:
            self.arrivals += self.book.begin(RunBegan(self.run_id, self.name, self.name), saved)
        except JournalError:
            raise Killed(self) from None
        self.sink = self._network.machines.sink(self.book.ended, self.asks.find)
        for asked in self.book.reopened():
            self._tell(asked)

    def ask(
        self, turn: GroupRequest, asked_step: int, num_drawn: int, min_policy_version: int
    ) -> GroupId:
        """Ask for a group."""
        group_id = GroupId(self.run_id, self._num_asked)
        self._num_asked += 1
        body = GroupAsk(
            task=turn.task,
            sampling=SamplingPolicy(),
            seed=0,
            is_eval=turn.is_eval,
            min_policy_version=min_policy_version,
        )
        asked = Asked(
            group_id=group_id,
            env="guess",
            num_samples=NUM_SAMPLES,
            asked_step=asked_step,
            num_drawn=num_drawn,
            is_eval=turn.is_eval,
            again=turn.again,
            body=encode_ask(body),
        )
        is_first = not self._held_asks
        self._held_asks.append(asked)
        if is_first:
            self.say_held_asks()
        self._network.num["held_ask"] += bool(self._held_asks)
        return group_id

    def say_held_asks(self) -> None:
        """Groups for which there is room again."""
        while self._held_asks and not self.book.is_full and self._say(self._held_asks[0]):
            self._held_asks.popleft()

    def take(self, most: int) -> list[TakenGroup]:
        """Return what has ended, some of it at a time."""
        num = min(most, len(self.arrivals))
        return [self._open(self.arrivals.popleft()) for _ in range(num)]

    def open(self, filed: StoredResult) -> SimGroupTurns:
        """Read a result from the disk."""
        return msgspec.msgpack.decode(self.book.load(filed).body, type=SimGroupTurns)

    def note(self, entry: StepTaken | Published) -> None:
        """Journal an entry before its effect; a trainer whose disk refuses it ends."""
        try:
            self.book.note(entry)
        except JournalError:
            raise Killed(self) from None

    def part(self, parted: GroupParted) -> None:
        """Drop a result that no step takes."""
        try:
            self.book.part(parted)
        except JournalError:
            self._network.num["owed"] += 1

    def note_saved(self, saved: StateSaved) -> None:
        """Release what a durable checkpoint covers."""
        try:
            self.book.cover(saved)
        except JournalError:
            self._network.num["owed"] += 1

    def _new_asks(self) -> AskMachine:
        settings = AskSettings(client_id=self.name, sink=self.name, beat_s=BEAT_S, keep=True)
        return AskMachine(settings)

    def _open_book(self) -> ClientJournal:
        return self._network.machines.book(self.disk, self.max_bytes)

    def _open(self, arrival: TakenGroup | StoredResult) -> TakenGroup:
        if isinstance(arrival, StoredResult):
            return TakenGroup(arrival.group_id, self.open(arrival))
        return arrival

    def _say(self, asked: Asked) -> bool:
        try:
            self.book.ask(asked)
        except JournalError:
            self._network.num["refused_ask"] += 1
            return False
        self._tell(asked)
        return True

    def _tried(self, tried: GroupTried) -> None:
        try:
            self.book.note(tried)
        except JournalError:
            self._network.num["owed"] += 1

    def _fault_in(self, body: Buffer) -> str:
        try:
            msgspec.msgpack.decode(body, type=SimGroupTurns)
        except DECODE_ERRORS as error:
            return f"malformed result: {error}"
        return ""

    def _keep(self, keep: Keep) -> None:
        message = keep.message
        try:
            self.book.keep(message, Packet(message, "", keep.body))
        except JournalError:
            return  # not acked: its worker sends it again
        turns = msgspec.msgpack.decode(keep.body, type=SimGroupTurns)
        for action in self.sink.step(ResultKept(keep), self._kernel.now_s(self)):
            self._do_sink(action)
        self._tell(Arrived(message.group_id))
        self.arrivals.append(
            TakenGroup(message.group_id, turns if message.complete else None, turns.reason)
        )

    def _booked(self, group_id: GroupId, reason: str) -> None:
        try:
            self.book.drop(group_id, reason)
        except JournalError:
            self._network.num["owed"] += 1
        self.arrivals.append(TakenGroup(group_id, None, reason))
