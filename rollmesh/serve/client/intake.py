"""The client's thread: receives results, journals and acks them, and talks to the router.

- Nothing here waits for the program, which reaches the thread by two queues.
- A result is checked against its ask and written before it is acked. It is decoded once.
- While the program leaves many bytes untaken, further results stay with their workers, and those of
  earlier runs on the disk.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import msgspec

from rollmesh.core.errors import JournalError, WireError
from rollmesh.core.heap import SOME_FREED_BYTES, Heap
from rollmesh.core.ids import GroupId
from rollmesh.core.logs import get_logger, readable
from rollmesh.runtime.heap_trimmer import TrimPlan
from rollmesh.serve.client.arrivals import Action as SinkAction
from rollmesh.serve.client.arrivals import (
    Dropped,
    Keep,
    Malformed,
    RawResult,
    RecordDrop,
    ResultKept,
    ResultSink,
    StoredResult,
    Unopened,
    check_result,
)
from rollmesh.serve.client.asks import Action as AskAction
from rollmesh.serve.client.asks import (
    Arrived,
    Asked,
    AskEnded,
    AskMachine,
    AskSettings,
    Cancelled,
    Closed,
    ResultFailed,
    Waits,
)
from rollmesh.serve.client.journal import ClientJournal
from rollmesh.serve.client.journal_entries import (
    GroupParted,
    GroupTried,
    RunBegan,
    StateSaved,
    StepEntry,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import GroupFinished, ResultRefused
from rollmesh.wire.sockets import Dialer, Hub, WakeSignal, wait

log = get_logger()

JOIN_S = 5.0
MAX_UNTAKEN_BYTES = 256 * 2**20
"""Limit on the bytes of results in memory; past it the sink reads no more, and workers keep theirs.
"""
MAX_FILED_BYTES = 32 * 2**20
"""Limit on the bytes that `take` reads from the disk and hands out at a time."""
RECENT_BEATS = 90
"""The router repeats why groups wait every 60 heartbeats."""
LOG_REFUSED_S = 10.0
"""Interval of log lines about refused results, which carry their number."""
MAX_NAME = 100
"""Limit on the characters of a peer's name in the log."""
MAX_RESULTS = 64
"""Messages received before the router and the program get their turn."""


class Note(msgspec.Struct, frozen=True):
    """Command: write `entry`, then fulfil `written`."""

    entry: StepEntry
    written: Future[None]


class Cover(msgspec.Struct, frozen=True):
    """Command: this checkpoint is durable, and the journal may release what it covers."""

    saved: StateSaved


class Taken(msgspec.Struct, frozen=True):
    """Command: the results of these groups are not needed again."""

    group_ids: tuple[GroupId, ...]


Command = Asked | Cancelled | Note | Cover | Taken | GroupParted


class IntakeThread:
    """The thread; it fills `arrivals`, which `take` empties."""

    def __init__(
        self, hub: Hub, dialer: Dialer, client_journal: ClientJournal, settings: AskSettings
    ) -> None:
        self._hub = hub
        self._dialer = dialer
        self._client_journal = client_journal
        self._asks = AskMachine(settings)
        self._sink = ResultSink(client_journal.ended, self._asks.find)
        self._heap, self._trims = Heap(), TrimPlan()
        self._refused_logged_s = -math.inf
        self._num_refused_logged = 0
        self._bell = WakeSignal()
        self._commands: deque[Command] = deque()
        self._held_asks: deque[Asked] = deque()
        self._fresh: list[Unopened] = []
        """Arrivals of this turn, handed over together because each hand-over has a cost."""
        self._num_fresh_bytes = 0
        self._acks: list[tuple[bytes, Packet]] = []
        self._arrivals: deque[Unopened] = deque()
        self._num_untaken_bytes = 0
        self._arrived = threading.Condition()
        self._on_arrival: Callable[[], None] | None = None
        self.has_router = threading.Event()
        """Set once a router has answered."""
        self._wait_reason = "", 0.0
        """The router's last message about groups that wait, and its time."""
        self._is_waiting = False
        self._is_disk_ill = False
        """The journal refused an entry and has taken none since."""
        self._closing = False
        self._close_lock = threading.Lock()
        self._is_closed = False
        self._leaves_for_good = False
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self, run_id: str, saved: StateSaved | None) -> list[Asked]:
        """Begin a run with this id and serve; return the open asks of earlier runs, which continue
        or end.

        `saved` as for ClientJournal.begin. Raises JournalError if the journal cannot be written.
        """
        settings = self._asks.settings
        began = RunBegan(run_id, settings.client_id, settings.sink)
        for result in self._client_journal.begin(began, saved):
            self._hand_out(result)
        reopened = self._client_journal.reopened()
        for asked in reopened:
            if settings.keep:
                self._do_asks(self._asks.step(asked, time.monotonic()))
            else:
                self._do_asks([AskEnded(asked.group_id, "cancelled: its client was restarted")])
        self._hand_over()
        self._thread.start()
        return reopened if settings.keep else []

    def watch(self, on_arrival: Callable[[], None] | None) -> None:
        """Have this called on the intake's thread when there is something to take again."""
        with self._arrived:
            self._on_arrival = on_arrival
            is_news = bool(self._arrivals or self._fault)
        if is_news and on_arrival:
            on_arrival()

    def close(self, *, for_good: bool = False) -> None:
        """Carry out all commands, say goodbye and end the thread.

        Idempotent: the first call decides whether it leaves for good, and later ones return after
        it.
        """
        with self._close_lock:
            if not self._is_closed:
                self._is_closed = self._end_thread(for_good)

    def _end_thread(self, for_good: bool) -> bool:
        """Return whether all is closed; False if the thread is stuck and still uses its sockets."""
        self._leaves_for_good = self._leaves_for_good or for_good
        self._closing = True
        self._bell.ring()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():  # stuck in a system call: its sockets are still its own
                log.error("intake.stuck", waited_s=JOIN_S)
                return False
        self._dialer.close()
        self._hub.close()
        self._client_journal.close()
        self._bell.close()
        return True

    def command(self, command: Command) -> None:
        """Pass a command to the thread, from any thread; ignored after `close`."""
        if self._closing:
            return
        self._commands.append(command)
        if self._fault:
            self._refuse_commands(self._fault)
        # The thread reads its commands after it has said that it waits, so none is missed.
        if self._is_waiting:
            self._bell.ring()

    def take(self, timeout_s: float, max_filed_bytes: float = math.inf) -> list[Unopened]:
        """Return what has arrived, waiting up to `timeout_s` for the first.

        After `max_filed_bytes` of results on disk the rest is left for the next call. Raises what
        ended the intake's thread once everything that had arrived is taken.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._arrivals or self._fault, timeout_s)
            was_full = self._is_full
            arrivals = list(self._taken_out(max_filed_bytes))
            if self._arrivals and self._on_arrival:
                self._on_arrival()
        if was_full:
            self._bell.ring()
        if not arrivals and self._fault:
            # A new error each time: one that is raised again gathers the frames of all its callers.
            raise self._fault.with_traceback(None)
        return arrivals

    def why_waiting(self) -> str:
        """Return why groups wait, as last sent by the router; '' if it has sent nothing lately."""
        reason, since_s = self._wait_reason
        is_recent = time.monotonic() - since_s < RECENT_BEATS * self._asks.beat_s
        return reason if is_recent else ""

    def load(self, filed: StoredResult) -> RawResult:
        """Read a result from the disk; JournalError if it cannot be read."""
        return self._client_journal.load(filed)

    def _taken_out(self, max_filed_bytes: float) -> Iterator[Unopened]:
        num_filed_bytes = 0
        while self._arrivals and num_filed_bytes <= max_filed_bytes:
            arrival = self._arrivals.popleft()
            if isinstance(arrival, StoredResult):
                num_filed_bytes += arrival.num_bytes
            elif isinstance(arrival, RawResult):
                self._num_untaken_bytes -= arrival.held_bytes
            yield arrival

    # the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                sockets: list[Hub | Dialer] = [self._dialer]
                if not self._is_full:
                    sockets.append(self._hub)
                self._is_waiting = True
                wait(sockets, self._bell, 0.0 if self._commands else self._asks.beat_s / 2)
                self._is_waiting = False
                self._turn()
            self._turn()
            self._do_asks(self._asks.step(Closed(self._leaves_for_good), time.monotonic()))
        except Exception as error:  # door: the program must learn how the thread ended
            log.exception("intake.failed")
            self._end(error.with_traceback(None))

    def _end(self, error: Exception) -> None:
        with self._arrived:
            self._fault = error
            self._arrived.notify_all()
            if self._on_arrival:
                self._on_arrival()
        self._refuse_commands(error)

    @property
    def _is_full(self) -> bool:
        return self._num_untaken_bytes + self._num_fresh_bytes > MAX_UNTAKEN_BYTES

    def _refuse_commands(self, error: Exception) -> None:
        """Fail commands that will not be carried out, so that a writer of notes does not wait."""
        with suppress(IndexError):  # also if another thread is here
            while True:
                command = self._commands.popleft()
                if isinstance(command, Note):
                    command.written.set_exception(error)

    def _turn(self) -> None:
        """Do everything that can be done now.

        The program receives new results before their acks are sent: it has more to do with them.
        """
        while self._commands:
            self._carry_out(self._commands.popleft())
        now_s = time.monotonic()
        for packet in self._dialer.receive():
            if not self.has_router.is_set():
                self.has_router.set()
            event = Received(ROUTER, packet.message, packet.body, packet.router)
            self._do_asks(self._asks.step(event, now_s))
        results = self._hub.receive(MAX_RESULTS)
        while not self._is_full and (result := next(results, None)):
            self._receive_result(*result)
        self._hand_over()
        self._send_acks()
        self._give_back_memory()
        self._send_held()
        self._do_asks(self._asks.step(Ticked(), time.monotonic()))
        self._hand_over()

    def _carry_out(self, command: Command) -> None:
        match command:
            case Asked():
                self._ask(command)
            case Cancelled(group_id):
                self._held_asks = deque(a for a in self._held_asks if a.group_id != group_id)
                ended = self._asks.step(command, time.monotonic())
                self._do_asks(ended or [AskEnded(group_id, command.reason)])
            case Note(entry, written):
                try:
                    self._client_journal.note(entry)
                    written.set_result(None)
                except JournalError as error:
                    self._log_refused_write(error)
                    written.set_exception(error)
            case Cover(saved):
                self._write_down(partial(self._client_journal.cover, saved))
            case Taken(group_ids):
                self._write_down(partial(self._client_journal.take, group_ids))
            case GroupParted():
                self._write_down(partial(self._client_journal.part, command))

    def _ask(self, asked: Asked) -> None:
        is_first = not self._held_asks
        self._held_asks.append(asked)
        if not is_first:
            return
        if self._client_journal.is_full:
            log.warning(
                "journal.full",
                size_bytes=self._client_journal.size_bytes,
                fix="raise journal.max_bytes or write checkpoints more often",
            )
        self._send_held()

    def _send_held(self) -> None:
        """Send held asks in order, as far as the budget and the disk allow them to be written."""
        while (
            self._held_asks and not self._client_journal.is_full and self._send(self._held_asks[0])
        ):
            self._held_asks.popleft()

    def _send(self, asked: Asked) -> bool:
        """Return whether it was sent: an ask that cannot be journaled is not sent."""
        if self._asks.settings.keep:
            try:
                self._client_journal.ask(asked)
            except JournalError as error:
                self._log_refused_write(error)
                return False
        self._do_asks(self._asks.step(asked, time.monotonic()))
        return True

    def _write_down(self, write: Callable[[], None]) -> None:
        try:
            write()
        except JournalError as error:
            # Until that is written, a new client on the folder does not know it.
            self._log_refused_write(error)

    def _receive_result(self, route: bytes, packet: Packet) -> None:
        event = Received(route, packet.message, packet.body, packet.router)
        for action in self._sink.step(event, time.monotonic()):
            if isinstance(action, Keep):
                self._keep(action, packet)
                continue
            if isinstance(action, Send) and isinstance(action.message, ResultRefused):
                assert isinstance(packet.message, GroupFinished)
                self._log_refused(packet.message, action.message.reason)
            self._do_sink(action)

    def _log_refused(self, message: GroupFinished, reason: str) -> None:
        """Log refused results, at most one line in LOG_REFUSED_S: a stranger may send many."""
        now_s = time.monotonic()
        if now_s < self._refused_logged_s + LOG_REFUSED_S:
            return
        num_refused = self._sink.num_refused - self._num_refused_logged
        self._refused_logged_s, self._num_refused_logged = now_s, self._sink.num_refused
        log.warning("result.refused", num_refused=num_refused, reason=reason, **_named(message))

    def _refuse_malformed(self, keep: Keep, why: str) -> None:
        """Report the attempt as failed; its group runs again if an attempt is left."""
        message, reason = keep.message, readable(f"malformed result: {why}")
        log.warning("result.malformed", reason=reason, **_named(message))
        for action in self._sink.step(Malformed(keep, reason), time.monotonic()):
            self._do_sink(action)
        failed = ResultFailed(message.group_id, message.attempt, message.worker_id, reason)
        self._do_asks(self._asks.step(failed, time.monotonic()))

    def _keep(self, keep: Keep, packet: Packet) -> None:
        try:
            record = check_result(keep.asked, keep.message, packet)
        except WireError as error:
            self._refuse_malformed(keep, str(error))
            return
        try:
            result = self._client_journal.keep(keep.message, packet, record)
        except JournalError as error:
            # Not acked: its worker sends it again.
            self._log_refused_write(error)
            return
        if self._is_disk_ill:
            self._is_disk_ill = False
            log.warning("journal.writes_again")
        for action in self._sink.step(ResultKept(keep), time.monotonic()):
            self._do_sink(action)
        self._do_asks(self._asks.step(Arrived(keep.message.group_id), time.monotonic()))
        self._hand_out(result)

    def _do_asks(self, actions: list[AskAction]) -> None:
        for action in actions:
            match action:
                case Send(_, message, body):
                    self._dialer.send(Packet(message, self._asks.router, body))
                case AskEnded():
                    for drop in self._sink.step(action, time.monotonic()):
                        self._do_sink(drop)
                case Waits(reason):
                    log.warning("groups.wait", reason=reason)
                    self._wait_reason = reason, time.monotonic()
                case GroupTried():
                    self._write_down(partial(self._client_journal.note, action))

    def _do_sink(self, action: SinkAction) -> None:
        match action:
            case Send(route, message):
                self._acks.append((route, Packet(message)))
            case RecordDrop(group_id, reason, retry_after_s):
                self._write_down(partial(self._client_journal.drop, group_id, reason))
                self._hand_out(Dropped(group_id, reason, retry_after_s=retry_after_s))
            case Keep():
                raise AssertionError("a result is kept with its packet")

    def _send_acks(self) -> None:
        for route, ack in self._acks:
            self._hub.send(route, ack)
        self._acks.clear()

    def _give_back_memory(self) -> None:
        """Trim the heap after peers left: zmq may hold much memory for them."""
        freed, now_s = self._hub.num_departed * SOME_FREED_BYTES, time.monotonic()
        if self._trims.is_due(freed, now_s):
            self._heap.trim()
            self._trims.trimmed(freed, now_s)

    def _log_refused_write(self, error: JournalError) -> None:
        """Log what the disk does not take, once until it takes an entry again."""
        if not self._is_disk_ill:
            self._is_disk_ill = True
            log.error("journal.failed", error=str(error), fix=f"{error.remedy}; nothing is lost")

    def _hand_out(self, arrival: Unopened) -> None:
        self._wait_reason = "", 0.0
        self._fresh.append(arrival)
        if isinstance(arrival, RawResult):
            self._num_fresh_bytes += arrival.held_bytes

    def _hand_over(self) -> None:
        """Hand new arrivals to the program."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        num_bytes, self._num_fresh_bytes = self._num_fresh_bytes, 0
        with self._arrived:
            is_first = not self._arrivals
            self._arrivals.extend(fresh)
            self._num_untaken_bytes += num_bytes
            self._arrived.notify()
            if is_first and self._on_arrival:
                self._on_arrival()


def _named(message: GroupFinished) -> dict[str, str | int]:
    """Return the group, worker and attempt that a result names, for a log line."""
    return {
        "group_id": readable(str(message.group_id)[:MAX_NAME]),
        "worker_id": readable(message.worker_id[:MAX_NAME]),
        "attempt": message.attempt,
    }
