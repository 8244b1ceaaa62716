"""The ledger: which groups are asked for, which worker has each, and who is to be told.

Invariants: a group is with at most one worker, whole; no attempt begins beyond `max_attempts` and
those that are excused; nothing is given to a worker that is not live; a group that ended is
forgotten but for a short note, which keeps a late duplicate of its ask from running it again. Every
message may be lost, doubled or late: so asks and RunGroup are idempotent and said again until they
are confirmed, and after the router's restart what its peers re-assert is merged: asks that have
begun before wait three beats for the worker that claims them, and claims that no client asks for
are cancelled.

The life of a group is drawn in groups.py, that of a worker in workers.py; book.py keeps the groups,
deals.py gives them to workers, crew.py sees these come and go, suspects.py asks who killed whom.
Pure; driven by process.py and by the simulator, with a tick at least every half beat.
"""

import hmac
from collections.abc import Callable
from typing import Any

from rollmesh.core.config import RouterConfig
from rollmesh.serve.router.admission import MAX_QUEUED_BYTES, excused_in, mistake_in
from rollmesh.serve.router.book import CLIENT_LEFT, Book, waiting_for
from rollmesh.serve.router.causes import Causes
from rollmesh.serve.router.clients import Clients
from rollmesh.serve.router.crew import Crew
from rollmesh.serve.router.deals import CLAIM_BEATS, Deals
from rollmesh.serve.router.groups import Group
from rollmesh.serve.router.lives import Life
from rollmesh.serve.router.loads import Loads
from rollmesh.serve.router.notes import FOR_GOOD
from rollmesh.serve.router.takeover import Fate
from rollmesh.serve.router.workers import Worker, Workers, WorkerState, life_of
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AskDrain,
    AskGroup,
    AskRefused,
    AttemptFailed,
    CancelGroup,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    DrainAnswered,
    EnvFailed,
    GroupDelivered,
    GroupFailed,
    GroupLost,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    HeldGroup,
    RouterHello,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)

MAX_NAMES = 8
"""So many workers are named to one who drains another."""


class Ledger:
    """See the module; `book` and `crew` are its read-only view."""

    def __init__(self, settings: RouterConfig, started_s: float) -> None:
        self.settings = settings
        self._patience_s = settings.beat_s * settings.missed_beats
        self._settled_s = started_s + CLAIM_BEATS * settings.beat_s
        self._ticked_s = started_s
        self.book = Book(self._patience_s, started_s)
        workers = Workers(slow_lag_s=2 * settings.beat_s)
        self.loads = Loads(workers)
        self.deals = Deals(self.book, workers, settings.beat_s, settings.max_attempts)
        self.crew = Crew(self.book, workers, self.deals, settings)
        self.clients = Clients(self.book, self.deals, settings)
        self.causes = Causes(self.book, workers, self.loads, settings.beat_s)
        self._handlers: dict[type, Callable[[bytes, Any, Buffer], None]] = {
            AskGroup: self._on_ask,
            CancelGroup: self._on_cancel,
            AttemptFailed: self._on_attempt_failed,
            ClientHello: self._on_client,
            ClientBeat: self._on_client,
            ClientLeft: self._on_client_left,
            WorkerHello: self._on_worker_hello,
            WorkerBeat: self._on_worker_beat,
            WorkerLeft: self._on_worker_left,
            GroupStarted: self._on_started,
            GroupDelivered: self._on_delivered,
            GroupReturned: self._on_returned,
            GroupLost: self._on_group_lost,
            EnvFailed: self._on_env_failed,
            WorkerExited: self._on_worker_exited,
            AskDrain: self._on_ask_drain,
        }

    def step(self, event: Received | Ticked, now_s: float) -> list[Send]:
        """What to send about `event`; messages that are not the ledger's change nothing."""
        self.book.now_s = now_s
        if isinstance(event, Ticked):
            self._on_tick(now_s)
        elif handler := self._handlers.get(type(event.message)):
            handler(event.route, event.message, event.body)
        self.deals.dispatch()
        return self.book.take_sends()

    def worker_routes(self) -> list[bytes]:
        """Where the live workers are, for what concerns them all."""
        return [w.route for w in self.crew.workers if w.state is WorkerState.LIVE]

    # clients

    def _on_client(self, route: bytes, message: ClientHello | ClientBeat, _: Buffer) -> None:
        if not message.client_id:
            return  # a group of no client's is nobody's
        is_new = self.book.hear_client(message.client_id, route)
        if isinstance(message, ClientHello):
            self.clients.introduce(message)
        if is_new or isinstance(message, ClientHello):
            self._hello(route)

    def _on_client_left(self, _: bytes, message: ClientLeft, __: Buffer) -> None:
        self.clients.see_off(message.client_id)

    def _on_ask(self, route: bytes, ask: AskGroup, body: Buffer) -> None:
        book = self.book
        book.num["asks"] += 1
        if mistake := mistake_in(ask, body):
            # Also where the group is here: it must not become nobody's, nor grow.
            book.num["refusals"] += 1
            book.send(route, GroupFailed(ask.group_id, f"bad_ask: {mistake}"))
            return
        group = book.groups.get(ask.group_id)
        if group and not _is_theirs(group, ask.ticket):
            book.num["refusals"] += 1
            book.send(route, GroupFailed(ask.group_id, "bad_ask: another client's group"))
            return
        book.hear_client(ask.client_id, route)
        if group:
            if not group.client_id:
                self._adopt(group, ask, body)
            elif (group.client_id, group.sink) != (ask.client_id, ask.sink):
                self._hand_over(group, ask)
            book.deadlines.set(group, ask.deadline_s, book.now_s)
            book.tell_client(group)
        elif answer := book.notes.late_answer(ask):
            book.send(route, answer)
        elif refusal := self._refusal(ask, body):
            book.num["refusals"] += 1
            book.send(route, refusal)
        else:
            self._admit(ask, body)

    def _refusal(self, ask: AskGroup, body: Buffer) -> GroupFailed | AskRefused | None:
        """Why this ask is not taken: for good, or for now."""
        env, group_id = ask.env, ask.group_id
        if ask.deadline_s < 0:
            return GroupFailed(group_id, "deadline: it had passed before the ask came")
        tries = max(ask.attempts, 0) - excused_in(ask)
        if tries >= self.settings.max_attempts and self._is_settled:
            return GroupFailed(group_id, f"attempts_exhausted: {tries} have begun")
        if error := self.loads.why_none(env):
            return GroupFailed(group_id, f"env_failed: {error}")
        num_waiting = self.book.num_waiting
        limit = self.settings.max_queued_groups
        # A client with less than its share is let in all the same, or one that floods us would keep
        # the others out; so at most twice as many wait.
        num_open = len(self.book.of_client.get(ask.client_id, ()))
        has_share = num_open >= limit // max(len(self.book.clients), 1)
        is_full = num_waiting >= (limit if has_share else 2 * limit)
        if is_full or self.book.num_waiting_bytes + len(body) > MAX_QUEUED_BYTES:
            reason = f"overloaded: {num_waiting} groups wait"
            return AskRefused(group_id, reason, 2 * self.settings.beat_s)
        return None

    def _admit(self, ask: AskGroup, body: Buffer) -> None:
        group = Group(
            group_id=ask.group_id,
            env=ask.env,
            num_samples=ask.num_samples,
            sink=ask.sink,
            client_id=ask.client_id,
            priority=ask.priority,
            body=body,
            attempt=max(ask.attempts, 0),
            excused=excused_in(ask),
            ticket=ask.ticket,
        )
        self.book.open(group)
        self.book.deadlines.set(group, ask.deadline_s, self.book.now_s)
        if group.attempt > 0 and not self._is_settled:
            self.book.hold(group)
        else:
            self.deals.place(group)
        # An assignment has said so itself.
        if group.state is GroupState.QUEUED:
            self.book.tell_client(group)

    def _adopt(self, group: Group, ask: AskGroup, body: Buffer) -> None:
        """A client asks for what a worker had claimed: they find each other again."""
        if group.group_id in self.book.takeover:
            self.book.takeover.note(group.group_id, Fate.KEPT, self.book.now_s)
        self.book.set_client(group, ask.client_id, body)
        group.sink, group.priority, group.env = ask.sink, ask.priority, ask.env
        group.ticket = ask.ticket
        group.attempt = max(group.attempt, ask.attempts)
        group.excused = max(group.excused, excused_in(ask))
        self.deals.adopt(group, max(ask.num_samples, 1))

    def _hand_over(self, group: Group, ask: AskGroup) -> None:
        """A client that came back listens elsewhere, or under another name."""
        is_queued = group.state is GroupState.QUEUED and group.group_id not in self.book.held
        if is_queued:
            self.book.unwait(group)
        self.book.set_client(group, ask.client_id)
        group.sink = ask.sink
        if group.worker_id:
            self.deals.look_again(group, 0)  # its worker hears of it with the next RunGroup
        if is_queued:
            self.book.wait(group)

    def _on_cancel(self, route: bytes, message: CancelGroup, _: Buffer) -> None:
        # The note keeps an ask that is still on its way from running: cancelled is for good.
        answer = GroupMoved(message.group_id, GroupState.CANCELLED, 0, "")
        if group := self.book.groups.get(message.group_id):
            if not _is_theirs(group, message.ticket):
                self.book.num["refusals"] += 1
                return
            self.deals.take_away(group, tell_worker=message.reason)
            self.book.end(group, answer)
        elif self.book.notes.is_theirs(message.group_id, message.ticket):
            self.book.notes.add(answer, FOR_GOOD, self.book.now_s, message.ticket)
            self.book.send(route, answer)
        else:
            self.book.num["refusals"] += 1

    def _on_attempt_failed(self, route: bytes, message: AttemptFailed, _: Buffer) -> None:
        group = self.book.groups.get(message.group_id)
        client = self.book.clients.get(group.client_id) if group else None
        worker = self.crew.workers.get(group.worker_id) if group else None
        if group is None or client is None or worker is None or client.route != route:
            return
        if message.worker_id != worker.worker_id or message.attempt < group.attempt:
            return
        # First, so that the worker drops the refused result before it may get the group again.
        self.book.send(worker.route, CancelRun(group.group_id, message.reason))
        worker.accepting = False  # until its next beat, so that others come first
        why = f"{worker.worker_id}: {message.reason}"
        self.deals.requeue(group, why, may_excuse=False)

    # workers

    def _on_worker_hello(self, route: bytes, hello: WorkerHello, _: Buffer) -> None:
        self._hello(route)
        if not hello.worker_id:
            return  # a group's worker of no name is none
        if hello.loads_for_s > 0:
            self.crew.hear_of_next(life_of(hello))
            self.loads.begin(hello, self.book.now_s)
            return
        self.loads.succeed(hello.worker_id, hello.env)
        self.crew.greet(hello, route)

    def _on_worker_beat(self, route: bytes, beat: WorkerBeat, _: Buffer) -> None:
        worker = self.crew.workers.get(beat.worker_id)
        if worker is None:
            self._hello(route)
            return
        if worker.life.may_be(Life(beat.worker_id, started_s=beat.started_s)):
            self.crew.hear(worker, beat)
        elif beat.started_s > worker.life.started_s or worker.state is not WorkerState.LIVE:
            self._hello(route)  # of another process, whose own hello is still to come

    def _on_worker_left(self, _: bytes, message: WorkerLeft, __: Buffer) -> None:
        life = Life(message.worker_id, message.pid, message.started_s)
        self.crew.see_off(life, message.reason)

    def _on_worker_exited(self, _: bytes, message: WorkerExited, __: Buffer) -> None:
        life = Life(message.worker_id, message.pid, message.started_s)
        self.crew.hear_of_exit(life, message.cause)
        if env := self.loads.hear_of_exit(message.worker_id, message.pid, message.cause):
            self._fail_waiting(env)

    def _on_ask_drain(self, route: bytes, ask: AskDrain, _: Buffer) -> None:
        worker, error = self.crew.workers.get(ask.worker_id), ""
        if worker is None:
            names = [each.worker_id for each in self.crew.workers]
            more = ", ..." if len(names) > MAX_NAMES else ""
            known = ", ".join(names[:MAX_NAMES]) + more or "none"
            error = f"no worker {ask.worker_id!r}; there are: {known}"
        elif worker.state is WorkerState.LOST:
            silent_s = self.book.now_s - worker.heard_s
            error = f"{ask.worker_id} has not been heard for {silent_s:.0f} s"
        else:
            self.crew.drain(worker, ask.reason)
        self.book.send(route, DrainAnswered(ask.ask_id, not error, error))

    def _on_env_failed(self, route: bytes, message: EnvFailed, _: Buffer) -> None:
        self._hello(route)  # says that it was heard; the worker repeats it until then
        life = Life(message.worker_id, message.pid, message.started_s)
        if worker := self.crew.find(life):
            self.crew.dismiss(worker, "could not load its environment")
        self.crew.hear_of_next(life)
        self.loads.fail(message.worker_id, message.env, message.error)
        self._fail_waiting(message.env)

    def _fail_waiting(self, env: str) -> None:
        """Tell all who wait for `env` that there is none, unless somebody else may bring it."""
        if error := self.loads.why_none(env):
            for group in waiting_for(env, self.book):
                self.deals.fail(group, f"env_failed: {error}")

    def _on_started(self, route: bytes, message: GroupStarted, _: Buffer) -> None:
        if worker := self._speaker(route):
            self.deals.claim(worker, HeldGroup(message.group_id, message.attempt, False))

    def _on_delivered(self, route: bytes, message: GroupDelivered, _: Buffer) -> None:
        group = self.book.groups.get(message.group_id)
        if group is None:
            self._on_late_delivery(message)
            return
        if not _is_theirs(group, message.ticket):
            self.book.num["refusals"] += 1
            return
        speaker = self.crew.workers.at(route)
        is_here = speaker is not None and speaker.worker_id == group.worker_id
        moved = GroupMoved(group.group_id, GroupState.DONE, message.attempt, group.worker_id)
        why = "" if is_here else f"attempt {message.attempt} was delivered"
        self.deals.take_away(group, tell_worker=why)
        self.book.end(group, moved, group.attempt)

    def _on_late_delivery(self, message: GroupDelivered) -> None:
        """Of a group that has ended: a client that had all it wanted may say goodbye first."""
        book, group_id = self.book, message.group_id
        is_theirs = book.notes.is_theirs(group_id, message.ticket)
        if is_theirs and book.notes.reason(group_id).startswith(CLIENT_LEFT):
            book.num_in[GroupState.CANCELLED] -= 1
            book.num_in[GroupState.DONE] += 1
            done = GroupMoved(group_id, GroupState.DONE, message.attempt, "")
            book.notes.add(done, message.attempt, book.now_s, message.ticket)

    def _on_returned(self, route: bytes, message: GroupReturned, _: Buffer) -> None:
        worker, group = self._speaker(route), self.book.groups.get(message.group_id)
        if not worker or not group or group.worker_id != worker.worker_id:
            return
        if group.attempt == message.attempt and group.state is GroupState.ASSIGNED:
            self.deals.hand_back(worker, group, message.reason)

    def _on_group_lost(self, route: bytes, message: GroupLost, _: Buffer) -> None:
        worker, group = self._speaker(route), self.book.groups.get(message.group_id)
        if not worker or not group or group.worker_id != worker.worker_id:
            return
        if self.clients.is_away(group.client_id):
            # To run it again would bring its result nowhere again.
            self.clients.let_go(group, f"infra_error: {message.reason}")
        elif message.attempt >= group.attempt:
            why = f"{worker.worker_id}: {message.reason}"
            self.deals.requeue(group, why, may_excuse=False)  # it ran, whatever it said before

    def _speaker(self, route: bytes) -> Worker | None:
        """The worker at `route`: since it speaks, it lives. A stranger is asked for its hello."""
        worker = self.crew.workers.at(route)
        if worker is None:
            self._hello(route)
            return None
        self.crew.hear(worker)
        return worker

    def _hello(self, route: bytes) -> None:
        self.book.send(route, RouterHello(self.settings.beat_s))

    # time

    def _on_tick(self, now_s: float) -> None:
        gap_s, self._ticked_s = now_s - self._ticked_s, now_s
        if gap_s > 2 * self.settings.beat_s:
            # We did not run, so we did not listen: nobody is late for that.
            for peer in [*self.crew.workers, *self.book.clients.values()]:
                peer.heard_s = min(peer.heard_s + gap_s, now_s)
        for group in self.book.deadlines.take_overdue(now_s):
            self.deals.fail(group, f"deadline: it has passed in attempt {group.attempt}")
        for env in self.loads.take_overdue(now_s):
            self._fail_waiting(env)
        self.crew.look_after_workers()
        self.causes.look()
        self.clients.look_after()
        if self._is_settled:
            self._release_held()
        self.deals.look_after_groups()
        self.book.notes.tear(now_s)

    @property
    def _is_settled(self) -> bool:
        """Whether workers had time to claim what began under an earlier router."""
        return self.book.now_s >= self._settled_s

    def _release_held(self) -> None:
        """Nobody claimed these: they run again, if an attempt is left."""
        for group in list(self.book.held.values()):
            if group.tries >= self.settings.max_attempts:
                self.book.takeover.note(group.group_id, Fate.EXHAUSTED, self.book.now_s)
                self.deals.fail(group, f"attempts_exhausted: {group.tries} have begun")
            else:
                self.book.takeover.note(group.group_id, Fate.AGAIN, self.book.now_s)
                self.book.unwait(group)
                self.deals.place(group)


def _is_theirs(group: Group, ticket: bytes) -> bool:
    """Whether a message with this ticket may change the group.

    The ticket of a group that a worker claimed and no client has asked for yet is not known.
    """
    return not group.client_id or hmac.compare_digest(group.ticket, ticket)
