"""The scheduler's process: one loop that polls, drains, steps the machine, keeps and sends.

Owns the Hub, the machine, its journal and its time. Invariants: nothing is sent of a step before
its rows are on the disk; where these cannot be written nothing more is heard until they can; a turn
waits for nobody but the disk; whatever arrives, the loop goes on. Its time is the world's at the
start and never runs back, also not over lives. SIGTERM ends it at once: the journal holds all.
Driven by `rollmesh scheduler serve`.
"""

import os
from pathlib import Path

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import AddressError, ConfigError, JournalError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.process import Ready, Stop, announce, http_address, listen
from rollmesh.core.secret_file import hash_token
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.service.actions import Action, Event, Note, Write
from rollmesh.scheduler.service.face import board_of, face_of
from rollmesh.scheduler.service.journal import Journal
from rollmesh.scheduler.service.scheduler import Scheduler
from rollmesh.scheduler.service.settings import SchedulerSettings
from rollmesh.scheduler.service.status import Status, status_of
from rollmesh.serve.status_app import SnapshotCell
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, read_scheduler_keys
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.members import SCHEDULER, Access
from rollmesh.wire.scheduling import JoinNode
from rollmesh.wire.sockets import Doorbell, Hub, wait

log = get_logger()

STATUS_S = 1.0
STATUS_SHARE = 0.05
"""So much of the loop's time may go into snapshots."""
RETRY_S = 0.5
"""Between two tries to write what could not be written."""


class ServiceAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is started with."""

    bind: str
    http_bind: str
    journal: Path
    policy: SchedulingPolicy
    settings: SchedulerSettings = SchedulerSettings()
    nodes: tuple[JoinNode, ...] = ()
    """That are there without an agent."""
    listen_fd: int | None = None
    ready_fd: int | None = None
    operator_token: str = ""
    """Shown by the admission process; '': any peer registers pipelines."""


def run(ask: ServiceAsk) -> None:
    """Serve until SIGTERM or SIGINT.

    AddressError if an address is taken, or can be reached by others without keys; ConfigError if
    another process has the journal, or a node is not the one that it was.
    """
    setup("scheduler", ask.journal if ask.ready_fd is not None else None)
    clock, bell = SystemClock(), Doorbell()
    journal = Journal(ask.journal)
    try:
        listening = listen(ask.http_bind, ask.listen_fd)
    except AddressError as error:
        raise AddressError(f"http_bind = {error}") from None
    board = board_of(clock)
    face = face_of(listening, board)
    hub = open_hub(ask.bind)
    loop = ServiceLoop(ask, hub, journal, board, clock)
    stop = Stop(bell.ring)
    loop.join(ask.nodes)
    loop.turn()
    face.start()
    announce(ask.ready_fd, Ready("scheduler", os.getpid(), hub.address, http_address(listening)))
    log.info("scheduler.started", address=hub.address, http_address=http_address(listening))
    try:
        while not stop.is_asked:
            wait(loop.hears(), bell, loop.idle_s())
            loop.turn()
    finally:
        face.close()
        hub.close()
        journal.close()
        log.info("scheduler.stopped")


def open_hub(bind: str) -> Hub:
    """The scheduler's Hub; AddressError names the setting."""
    try:
        keys = read_scheduler_keys(role=Role.HUB)
        access = Access(keys, SCHEDULER) if keys else None
        return Hub(bind, keys, access=access)
    except AddressError as error:
        raise AddressError(f"bind = {error}") from None


class ServiceLoop:
    """One turn of it, and what a turn needs."""

    def __init__(
        self, ask: ServiceAsk, hub: Hub, journal: Journal, board: SnapshotCell[Status], clock: Clock
    ) -> None:
        self.incarnation = new_id("s")
        self._settings = ask.settings
        self._hub, self._journal, self._board, self._clock = hub, journal, board, clock
        revived = journal.load()
        self.scheduler = Scheduler(
            ask.settings,
            ask.policy,
            revived,
            self.incarnation,
            hash_token(ask.operator_token),
        )
        start_s = max(clock.unix_s(), self.scheduler.book.now_s)
        self._ahead_s = start_s - clock.now_s()
        """Of the machine's time before the clock's."""
        self._actions: list[Action] = []
        """That are not carried out yet."""
        self._is_stuck = False
        self._num_failed = 0
        self._failures = Occasional()
        self._next_tick_s = self._next_status_s = clock.now_s()

    def join(self, nodes: tuple[JoinNode, ...]) -> None:
        """Nodes that nobody else says to be there; ConfigError where one has changed."""
        book = self.scheduler.book
        for node in nodes:
            known = book.machines.get(node.name)
            if known and (len(known.node.gpus), known.node.labels) == (node.num_gpus, node.labels):
                continue
            ask = msgspec.structs.replace(node, key=f"{node.key}-{self.incarnation}")
            self._step(Received(b"", ask))
            if error := book.answers[ask.key].error:
                raise ConfigError(error)

    def turn(self) -> None:
        """Take what has arrived, then tick if it is time, then keep and send."""
        if self._is_stuck:
            self._carry_out()
            return
        arrived = list(self._hub.receive())
        for number, (route, packet) in enumerate(arrived, 1):
            event = Received(route, packet.message, packet.body, packet.router)
            self._step(event, is_last=number == len(arrived))
        now_s = self._clock.now_s()
        if now_s >= min(self._next_tick_s, self.scheduler.due_s - self._ahead_s):
            self._next_tick_s = now_s + self._settings.tick_s
            self._step(Ticked())
        self._carry_out()
        if now_s >= self._next_status_s:
            self._hang_status()

    def hears(self) -> list[Hub]:
        """Whose packets are worth a turn: nobody's while nothing can be written."""
        return [] if self._is_stuck else [self._hub]

    def idle_s(self) -> float:
        """How long nothing needs a turn, if nothing arrives."""
        if self._is_stuck:
            return RETRY_S
        due_s = min(self._next_tick_s, self.scheduler.due_s - self._ahead_s)
        return max(0.0, due_s - self._clock.now_s())

    def _step(self, event: Event, is_last: bool = True) -> None:
        now_s = self._clock.now_s() + self._ahead_s
        try:
            self._actions += self.scheduler.step(event, now_s, is_last)
        except Exception:  # door: one peer's message must not end the fleet
            self._num_failed += 1
            kind = type(event.message).__name__ if isinstance(event, Received) else "tick"
            if number := self._failures.number(kind):
                log.exception("step.failed", kind=kind, number=number)

    def _carry_out(self) -> None:
        """All that the steps since ask for: one transaction, then the rest."""
        rows = [row for each in self._actions if isinstance(each, Write) for row in each.rows]
        try:
            if rows:
                self._journal.keep(rows)
        except JournalError as error:
            if not self._is_stuck:
                log.error("journal.stuck", why=str(error), fix="nothing is done until it can be")
            self._is_stuck = True
            self._board.set_blocked(str(error))
            return
        if self._is_stuck:
            log.info("journal.unstuck")
            self._is_stuck = False
            self._board.set_blocked("")
        for action in self._actions:
            if isinstance(action, Send):
                packet = Packet(action.message, self.incarnation, action.body)
                self._hub.send(action.route, packet)
            elif isinstance(action, Note):
                say = log.warning if action.is_warning else log.info
                say(action.event, pipeline=action.pipeline_id, why=action.detail)
        self._actions = []

    def _hang_status(self) -> None:
        now_s = self._clock.now_s()
        counts = {
            "steps_failed": self._num_failed,
            "malformed": self._hub.num_malformed,
            "unsent": self._hub.num_unsent,
        }
        self._board.publish(status_of(self.scheduler, counts))
        spent_s = self._clock.now_s() - now_s
        self._next_status_s = now_s + max(STATUS_S, spent_s / STATUS_SHARE)
