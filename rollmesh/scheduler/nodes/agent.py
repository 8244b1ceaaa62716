"""Node agent: reports each second that its machine and its GPUs are available.

    JOINING --answered--> JOINED, which repeats its join from time to time
    any --refused--> REFUSED

- A join is repeated until answered, and then periodically, since a scheduler that lost its journal
  knows no nodes.
- A refusal ends the agent with its reason. An unreachable scheduler is waited for.
- NodeMachine is pure; `serve` is its shell.
"""

import enum
import os
import threading
import time
from collections.abc import Callable, Mapping

from rollmesh.core.errors import UserError
from rollmesh.core.gpus import visible_gpus
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, check_dial, read_scheduler_keys
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.scheduling import JoinNode, NodeBeat, SchedulerAnswered
from rollmesh.wire.sockets import Dialer, wait

log = get_logger()

BEAT_S = 1.0
REJOIN_S = 10.0
"""A scheduler that does not know the node learns of it within this time."""
SILENT_S = 2 * REJOIN_S
"""Silence of the scheduler after which a warning is logged."""
SCHEDULER = b""
"""Route of an agent's only peer."""


class AgentPhase(enum.StrEnum):
    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"


class NodeMachine:
    def __init__(self, name: str, num_gpus: int, labels: tuple[str, ...] = ()) -> None:
        self.phase = AgentPhase.JOINING
        self.why = ""
        """Why it was refused."""
        self.num_answers = 0
        """Answers of the scheduler so far."""
        self._join = JoinNode(new_id("join"), name, num_gpus, labels, beats=True)
        self._next_beat_s = self._next_join_s = float("-inf")

    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        """Handle one event; unknown messages change nothing."""
        if isinstance(event, Received):
            self._on_message(event)
        if self.phase is AgentPhase.REFUSED or now_s < self._next_beat_s:
            return []
        self._next_beat_s = now_s + BEAT_S
        sends = []
        if self.phase is AgentPhase.JOINED:
            sends.append(Send(SCHEDULER, NodeBeat(self._join.name)))
        if self.phase is AgentPhase.JOINING or now_s >= self._next_join_s:
            self._next_join_s = now_s + REJOIN_S
            sends.append(Send(SCHEDULER, self._join))
        return sends

    def _on_message(self, event: Received) -> None:
        match event.message:
            case SchedulerAnswered(key, ok, error) if key == self._join.key:
                self.num_answers += 1
                self.phase = AgentPhase.JOINED if ok else AgentPhase.REFUSED
                self.why = error


def serve(scheduler: str, agent: NodeMachine, stop: threading.Event) -> None:
    """Send heartbeats until `stop` is set; UserError with the scheduler's reason if it refuses the
    node."""
    keys = read_scheduler_keys(role=Role.NODE)
    check_dial(scheduler, keys)
    dialer = Dialer(scheduler, new_id("node"), keys)
    try:
        phase, silence = agent.phase, SilenceWarning(scheduler)
        while not stop.is_set():
            received = [Received(SCHEDULER, each.message) for each in dialer.receive()]
            events: list[Received | Ticked] = [*received, Ticked()]
            for event in events:
                for send in agent.step(event, time.monotonic()):
                    dialer.send(Packet(send.message))
            silence.look(agent.num_answers, time.monotonic())
            if agent.phase is AgentPhase.REFUSED:
                raise UserError(agent.why)
            if agent.phase is not phase:
                phase = agent.phase
                log.info(f"node.{phase}", scheduler=scheduler)
            wait([dialer], None, BEAT_S / 4)
    finally:
        dialer.close()


class SilenceWarning:
    """Logs once that the scheduler does not answer, until it answers again."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._num_answers = 0
        self._since_s: float | None = None
        self._is_logged = False

    def look(self, num_answers: int, now_s: float) -> None:
        """Update with the number of answers so far."""
        if self._since_s is None or num_answers > self._num_answers:
            self._num_answers, self._since_s, self._is_logged = num_answers, now_s, False
        elif not self._is_logged and now_s - self._since_s >= SILENT_S:
            self._is_logged = True
            fix = (
                "check that it runs and that its address and our keys are right; dialling continues"
            )
            log.warning("scheduler.unheard", scheduler=self._scheduler, fix=fix)


def num_gpus(
    environment: Mapping[str, str] = os.environ,
    list_gpus: Callable[[], str] | None = None,
) -> int:
    """Number of usable GPUs of this machine; UserError if it cannot be determined."""
    found = len(visible_gpus(environment, list_gpus))
    if not found:
        raise UserError("no GPU found on this machine; give their number with --gpus N")
    return found
