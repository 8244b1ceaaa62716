"""A node's agent: it says each second that its machine is there, with so many GPUs.

    JOINING --answered--> JOINED, which says its join again now and then;  any --refused--> REFUSED

Owns one node's name and its place in the scheduler. Invariants: a join is said again until it is
answered, and now and then after that, for a scheduler whose journal was lost knows no node; a
refusal ends the agent with its reason; a scheduler that is away is waited for. What a silent agent
means is the scheduler's to say. `Agent` is pure; driven by `serve`, the shell of
`rollmesh scheduler agent` and of Ray's actors.
"""

import enum
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from rollmesh.core.errors import UserError
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
"""A scheduler that has never heard of the node learns of it after so long."""
UNHEARD_S = 2 * REJOIN_S
"""A scheduler that says nothing for so long is told of."""
SCHEDULER = b""
"""The route of an agent's only peer."""
_NVIDIA_SMI = ("nvidia-smi", "-L")


class AgentPhase(enum.StrEnum):
    """See the module."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"


class Agent:
    """See the module."""

    def __init__(self, name: str, num_gpus: int, labels: tuple[str, ...] = ()) -> None:
        self.phase = AgentPhase.JOINING
        self.why = ""
        """It was refused."""
        self.num_heard = 0
        """Answers of the scheduler so far."""
        self._join = JoinNode(new_id("join"), name, num_gpus, labels, beats=True)
        self._next_beat_s = self._next_join_s = float("-inf")

    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        """Take one event; foreign messages change nothing."""
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
                self.num_heard += 1
                self.phase = AgentPhase.JOINED if ok else AgentPhase.REFUSED
                self.why = error


def serve(scheduler: str, agent: Agent, stop: threading.Event) -> None:
    """Beat until `stop` is set; UserError with the scheduler's reason if it refuses the node."""
    keys = read_scheduler_keys(role=Role.NODE)
    check_dial(scheduler, keys)
    dialer = Dialer(scheduler, new_id("node"), keys)
    try:
        phase, silence = agent.phase, Silence(scheduler)
        while not stop.is_set():
            heard = [Received(SCHEDULER, each.message) for each in dialer.receive()]
            events: list[Received | Ticked] = [*heard, Ticked()]
            for event in events:
                for send in agent.step(event, time.monotonic()):
                    dialer.send(Packet(send.message))
            silence.look(agent.num_heard, time.monotonic())
            if agent.phase is AgentPhase.REFUSED:
                raise UserError(agent.why)
            if agent.phase is not phase:
                phase = agent.phase
                log.info(f"node.{phase}", scheduler=scheduler)
            wait([dialer], None, BEAT_S / 4)
    finally:
        dialer.close()


class Silence:
    """Of a scheduler that does not answer: told of once, until it is heard again."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._num_heard = 0
        self._since_s: float | None = None
        self._is_told = False

    def look(self, num_heard: int, now_s: float) -> None:
        """So many answers have been heard until now."""
        if self._since_s is None or num_heard > self._num_heard:
            self._num_heard, self._since_s, self._is_told = num_heard, now_s, False
        elif not self._is_told and now_s - self._since_s >= UNHEARD_S:
            self._is_told = True
            fix = "does it run, are its address and our keys right? it is dialled on"
            log.warning("scheduler.unheard", scheduler=self._scheduler, fix=fix)


def num_gpus(
    environment: Mapping[str, str] = os.environ,
    list_gpus: Callable[[], str] | None = None,
) -> int:
    """GPUs of this machine that we may use; UserError where nobody says how many."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = [word.strip() for word in visible.split(",") if word.strip()]
        # As CUDA has it: what stands behind a number of no GPU is not seen either.
        found = len(list(itertools.takewhile(lambda word: not word.startswith("-"), words)))
    else:
        lines = (list_gpus or _listed)().splitlines()
        found = sum(line.startswith("GPU ") for line in lines)
    if not found:
        raise UserError("no GPU is seen here; say how many by --gpus N")
    return found


def _listed() -> str:
    try:
        told = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout if told.returncode == 0 else ""
