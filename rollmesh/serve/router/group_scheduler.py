"""The group scheduler: which groups are requested, which worker has each, and what peers are sent.

- A group is with at most one worker, whole. No attempt begins beyond `max_attempts` and the excused
  ones. Nothing is assigned to a worker that is not live.
- Every message may be lost, repeated or late: AskGroup and RunGroup are idempotent and are sent
  again until they are confirmed. A group that ended leaves a tombstone, so that a late duplicate of
  its ask does not run it again.
- After a restart of the router, the state that peers report is merged: groups that had begun wait
  three beats for the worker that claims them, and claims without a client are cancelled.
- An ask outside of its limits is refused for good.
- Pure; it needs a tick at least every half beat.
"""

import hmac
from collections.abc import Callable
from typing import Any

from rollmesh.core.config import RouterConfig
from rollmesh.serve.router.assignments import CLAIM_BEATS, Assignments
from rollmesh.serve.router.blocked_reasons import BlockedReasons, EnvLoads
from rollmesh.serve.router.group_table import (
    CLIENT_LEFT,
    FOR_GOOD,
    GroupTable,
    TakeoverOutcome,
    waiting_for,
)
from rollmesh.serve.router.groups import Group, Incarnation
from rollmesh.serve.router.membership import ClientMembership, WorkerMembership
from rollmesh.serve.router.workers import WorkerEntry, WorkerHealth, WorkerTable, incarnation_of
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

MAX_SAMPLES = 4096
"""Limit on the rollouts of a group: its worker begins all, and its sink gets all as one message."""
MAX_QUEUED_BYTES = 512 * 2**20
"""Limit on the bytes of waiting requests; past it requests are refused."""


def excused_in(ask: AskGroup) -> int:
    """Attempts that do not count, as far as the client knows."""
    return min(max(ask.excused, 0), max(ask.attempts, 0))


def mistake_in(ask: AskGroup, body: Buffer) -> str:
    """Return why no router would take this request; '' if it is acceptable."""
    if not 1 <= ask.num_samples <= MAX_SAMPLES:
        few, most = "num_samples must be at least 1", f"and at most {MAX_SAMPLES}"
        return f"{few} {most}, not {ask.num_samples}"
    if not ask.client_id:
        return "it names no client"
    return f"{len(body)} bytes; at most {MAX_QUEUED_BYTES}" if len(body) > MAX_QUEUED_BYTES else ""


MAX_NAMES = 8
"""Limit on the workers that are named in the answer to a drain."""


class GroupScheduler:
    """Receives messages and returns those to send; `table` and `membership` are read-only views."""

    def __init__(self, settings: RouterConfig, started_s: float) -> None:
        self.settings = settings
        self._patience_s = settings.beat_s * settings.missed_beats
        self._settled_s = started_s + CLAIM_BEATS * settings.beat_s
        self._ticked_s = started_s
        self.table = GroupTable(self._patience_s, started_s)
        workers = WorkerTable(slow_lag_s=2 * settings.beat_s)
        self.env_loads = EnvLoads(workers, settings.load_grace_s)
        self.assignments = Assignments(self.table, workers, settings)
        self.membership = WorkerMembership(self.table, workers, self.assignments, settings)
        self.clients = ClientMembership(self.table, self.assignments, settings)
        self.blocked_reasons = BlockedReasons(self.table, workers, self.env_loads, settings.beat_s)
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
        """Return what to send about `event`; other messages than the scheduler's change nothing."""
        self.table.now_s = now_s
        if isinstance(event, Ticked):
            self._on_tick(now_s)
        elif handler := self._handlers.get(type(event.message)):
            handler(event.route, event.message, event.body)
        self.assignments.dispatch()
        return self.table.take_sends()

    def worker_routes(self) -> list[bytes]:
        """Return the addresses of the live workers, for messages to all of them."""
        return [w.route for w in self.membership.workers if w.state is WorkerHealth.LIVE]

    # messages of clients

    def _on_client(self, route: bytes, message: ClientHello | ClientBeat, _: Buffer) -> None:
        if not message.client_id:
            return  # a group without a client
        is_new = self.table.client_seen(message.client_id, route)
        if isinstance(message, ClientHello):
            self.clients.introduce(message)
        if is_new or isinstance(message, ClientHello):
            self._hello(route)

    def _on_client_left(self, _: bytes, message: ClientLeft, __: Buffer) -> None:
        self.clients.see_off(message.client_id)

    def _on_ask(self, route: bytes, ask: AskGroup, body: Buffer) -> None:
        table = self.table
        table.num["asks"] += 1
        if mistake := mistake_in(ask, body):
            # Also where the group is here: it must not lose its client, nor grow.
            table.num["refusals"] += 1
            table.send(route, GroupFailed(ask.group_id, f"bad_ask: {mistake}"))
            return
        group = table.groups.get(ask.group_id)
        if group and not _is_theirs(group, ask.ticket):
            table.num["refusals"] += 1
            table.send(route, GroupFailed(ask.group_id, "bad_ask: another client's group"))
            return
        table.client_seen(ask.client_id, route)
        if group:
            if not group.client_id:
                self._adopt(group, ask, body)
            elif (group.client_id, group.sink) != (ask.client_id, ask.sink):
                self._hand_over(group, ask)
            table.deadlines.set(group, ask.deadline_s, table.now_s)
            table.notify_client(group)
        elif answer := table.tombstones.late_answer(ask):
            table.send(route, answer)
        elif refusal := self._refusal(ask, body):
            table.num["refusals"] += 1
            table.send(route, refusal)
        else:
            self._admit(ask, body)

    def _refusal(self, ask: AskGroup, body: Buffer) -> GroupFailed | AskRefused | None:
        """Return why this request is refused, for good or for now; '' if it is taken."""
        env, group_id = ask.env, ask.group_id
        if ask.deadline_s < 0:
            return GroupFailed(group_id, "deadline: it had passed before the ask came")
        tries = max(ask.attempts, 0) - excused_in(ask)
        if tries >= self.settings.max_attempts and self._is_settled:
            return GroupFailed(group_id, f"attempts_exhausted: {tries} have begun")
        if error := self.env_loads.why_none(env):
            return GroupFailed(group_id, f"env_failed: {error}")
        num_waiting = self.table.num_waiting
        limit = self.settings.max_queued_groups
        # A client with less than its share is still let in, or one that floods the router would
        # keep the others out; so at most twice as many wait.
        num_open = len(self.table.of_client.get(ask.client_id, ()))
        has_share = num_open >= limit // max(len(self.table.clients), 1)
        is_full = num_waiting >= (limit if has_share else 2 * limit)
        if is_full or self.table.num_waiting_bytes + len(body) > MAX_QUEUED_BYTES:
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
        self.table.open(group)
        self.table.deadlines.set(group, ask.deadline_s, self.table.now_s)
        if group.attempt > 0 and not self._is_settled:
            self.table.hold(group)
        else:
            self.assignments.place(group)
        # An assignment has sent its own message.
        if group.state is GroupState.QUEUED:
            self.table.notify_client(group)

    def _adopt(self, group: Group, ask: AskGroup, body: Buffer) -> None:
        """Join a client's request with the group that a worker had claimed."""
        if group.group_id in self.table.takeover:
            self.table.takeover.note(group.group_id, TakeoverOutcome.KEPT, self.table.now_s)
        self.table.set_client(group, ask.client_id, body)
        group.sink, group.priority, group.env = ask.sink, ask.priority, ask.env
        group.ticket = ask.ticket
        group.attempt = max(group.attempt, ask.attempts)
        group.excused = max(group.excused, excused_in(ask))
        self.assignments.adopt(group, max(ask.num_samples, 1))

    def _hand_over(self, group: Group, ask: AskGroup) -> None:
        """A client that restarted listens elsewhere, or has another name."""
        is_queued = group.state is GroupState.QUEUED and group.group_id not in self.table.held
        if is_queued:
            self.table.unwait(group)
        self.table.set_client(group, ask.client_id)
        group.sink = ask.sink
        if group.worker_id:
            self.assignments.check_after(group, 0)  # its worker receives it with the next RunGroup
        if is_queued:
            self.table.wait(group)

    def _on_cancel(self, route: bytes, message: CancelGroup, _: Buffer) -> None:
        # The tombstone keeps a request that is still on its way from running: a cancel is final.
        answer = GroupMoved(message.group_id, GroupState.CANCELLED, 0, "")
        if group := self.table.groups.get(message.group_id):
            if not _is_theirs(group, message.ticket):
                self.table.num["refusals"] += 1
                return
            self.assignments.take_away(group, cancel_reason=message.reason)
            self.table.end(group, answer)
        elif self.table.tombstones.is_theirs(message.group_id, message.ticket):
            self.table.tombstones.add(answer, FOR_GOOD, self.table.now_s, message.ticket)
            self.table.send(route, answer)
        else:
            self.table.num["refusals"] += 1

    def _on_attempt_failed(self, route: bytes, message: AttemptFailed, _: Buffer) -> None:
        group = self.table.groups.get(message.group_id)
        client = self.table.clients.get(group.client_id) if group else None
        worker = self.membership.workers.get(group.worker_id) if group else None
        if group is None or client is None or worker is None or client.route != route:
            return
        if message.worker_id != worker.worker_id or message.attempt < group.attempt:
            return
        # First, so that the worker drops the refused result before it may get the group again.
        self.table.send(worker.route, CancelRun(group.group_id, message.reason))
        worker.accepting = False  # until its next heartbeat, so that others come first
        why = f"{worker.worker_id}: {message.reason}"
        self.assignments.requeue(group, why, may_excuse=False)

    # messages of workers

    def _on_worker_hello(self, route: bytes, hello: WorkerHello, _: Buffer) -> None:
        self._hello(route)
        if not hello.worker_id:
            return  # a worker without a name has no groups
        if hello.loads_for_s > 0:
            self.membership.next_started(incarnation_of(hello))
            self.env_loads.begin(hello, self.table.now_s)
            return
        self.env_loads.succeed(hello.worker_id, hello.env)
        self.membership.joined(hello, route)

    def _on_worker_beat(self, route: bytes, beat: WorkerBeat, _: Buffer) -> None:
        worker = self.membership.workers.get(beat.worker_id)
        if worker is None:
            self._hello(route)
            return
        if worker.incarnation.may_be(Incarnation(beat.worker_id, started_s=beat.started_s)):
            self.membership.receive(worker, beat)
        elif beat.started_s > worker.incarnation.started_s or worker.state is not WorkerHealth.LIVE:
            self._hello(route)  # of another process, whose own hello is still on its way

    def _on_worker_left(self, _: bytes, message: WorkerLeft, __: Buffer) -> None:
        incarnation = Incarnation(message.worker_id, message.pid, message.started_s)
        self.membership.see_off(incarnation, message.reason)

    def _on_worker_exited(self, _: bytes, message: WorkerExited, __: Buffer) -> None:
        incarnation = Incarnation(message.worker_id, message.pid, message.started_s)
        self.membership.worker_exited(incarnation, message.cause)
        if env := self.env_loads.worker_exited(message.worker_id, message.pid, message.cause):
            self._fail_waiting(env)

    def _on_ask_drain(self, route: bytes, ask: AskDrain, _: Buffer) -> None:
        worker, error = self.membership.workers.get(ask.worker_id), ""
        if worker is None:
            names = [each.worker_id for each in self.membership.workers]
            more = ", ..." if len(names) > MAX_NAMES else ""
            known = ", ".join(names[:MAX_NAMES]) + more or "none"
            error = f"no worker {ask.worker_id!r}; there are: {known}"
        elif worker.state is WorkerHealth.LOST:
            silent_s = self.table.now_s - worker.last_message_s
            error = f"{ask.worker_id} has sent nothing for {silent_s:.0f} s"
        else:
            self.membership.drain(worker, ask.reason)
        self.table.send(route, DrainAnswered(ask.ask_id, not error, error))

    def _on_env_failed(self, route: bytes, message: EnvFailed, _: Buffer) -> None:
        self._hello(route)  # confirms it; the worker repeats it until then
        incarnation = Incarnation(message.worker_id, message.pid, message.started_s)
        if worker := self.membership.find(incarnation):
            self.membership.dismiss(worker, "could not load its environment")
        self.membership.next_started(incarnation)
        self.env_loads.fail(message.worker_id, message.env, message.error)
        self._fail_waiting(message.env)

    def _fail_waiting(self, env: str) -> None:
        """Inform all that wait for `env` that no worker has it, unless another worker may still
        serve it.
        """
        if error := self.env_loads.why_none(env):
            for group in waiting_for(env, self.table):
                self.assignments.fail(group, f"env_failed: {error}")

    def _on_started(self, route: bytes, message: GroupStarted, _: Buffer) -> None:
        if worker := self._sender(route):
            self.assignments.claim(worker, HeldGroup(message.group_id, message.attempt, False))

    def _on_delivered(self, route: bytes, message: GroupDelivered, _: Buffer) -> None:
        group = self.table.groups.get(message.group_id)
        if group is None:
            self._on_late_delivery(message)
            return
        if not _is_theirs(group, message.ticket):
            self.table.num["refusals"] += 1
            return
        sender = self.membership.workers.at(route)
        is_here = sender is not None and sender.worker_id == group.worker_id
        moved = GroupMoved(group.group_id, GroupState.DONE, message.attempt, group.worker_id)
        why = "" if is_here else f"attempt {message.attempt} was delivered"
        self.assignments.take_away(group, cancel_reason=why)
        self.table.end(group, moved, group.attempt)

    def _on_late_delivery(self, message: GroupDelivered) -> None:
        """Confirm a delivery of a group that has ended: a client that has all its results may leave
        first.
        """
        table, group_id = self.table, message.group_id
        is_theirs = table.tombstones.is_theirs(group_id, message.ticket)
        if is_theirs and table.tombstones.reason(group_id).startswith(CLIENT_LEFT):
            table.num_in[GroupState.CANCELLED] -= 1
            table.num_in[GroupState.DONE] += 1
            done = GroupMoved(group_id, GroupState.DONE, message.attempt, "")
            table.tombstones.add(done, message.attempt, table.now_s, message.ticket)

    def _on_returned(self, route: bytes, message: GroupReturned, _: Buffer) -> None:
        worker, group = self._sender(route), self.table.groups.get(message.group_id)
        if not worker or not group or group.worker_id != worker.worker_id:
            return
        if group.attempt == message.attempt and group.state is GroupState.ASSIGNED:
            self.assignments.hand_back(worker, group, message.reason)

    def _on_group_lost(self, route: bytes, message: GroupLost, _: Buffer) -> None:
        worker, group = self._sender(route), self.table.groups.get(message.group_id)
        if not worker or not group or group.worker_id != worker.worker_id:
            return
        if self.clients.is_away(group.client_id):
            # To run it again would bring its result nowhere again.
            self.clients.let_go(group, f"infra_error: {message.reason}")
        elif message.attempt >= group.attempt:
            why = f"{worker.worker_id}: {message.reason}"
            self.assignments.requeue(
                group, why, may_excuse=False
            )  # it ran, whatever it reported before

    def _sender(self, route: bytes) -> WorkerEntry | None:
        """Return the worker at `route`, which is alive since it sends. A stranger is asked for its
        hello.
        """
        worker = self.membership.workers.at(route)
        if worker is None:
            self._hello(route)
            return None
        self.membership.receive(worker)
        return worker

    def _hello(self, route: bytes) -> None:
        self.table.send(route, RouterHello(self.settings.beat_s))

    # time

    def _on_tick(self, now_s: float) -> None:
        gap_s, self._ticked_s = now_s - self._ticked_s, now_s
        if gap_s > 2 * self.settings.beat_s:
            # This process did not run, so it did not listen: no peer is late for that time.
            for peer in [*self.membership.workers, *self.table.clients.values()]:
                peer.last_message_s = min(peer.last_message_s + gap_s, now_s)
        for group in self.table.deadlines.take_overdue(now_s):
            self.assignments.fail(group, f"deadline: it has passed in attempt {group.attempt}")
        for env in self.env_loads.take_overdue(now_s):
            self._fail_waiting(env)
        self.membership.check_workers()
        self.blocked_reasons.look()
        self.clients.check_clients()
        if self._is_settled:
            self._release_held()
        self.assignments.check_groups()
        self.table.tombstones.tear(now_s)

    @property
    def _is_settled(self) -> bool:
        """Return whether workers had time to claim what began under an earlier router."""
        return self.table.now_s >= self._settled_s

    def _release_held(self) -> None:
        """Requeue groups that no worker claimed, if an attempt is left."""
        for group in list(self.table.held.values()):
            if group.tries >= self.settings.max_attempts:
                self.table.takeover.note(
                    group.group_id, TakeoverOutcome.EXHAUSTED, self.table.now_s
                )
                self.assignments.fail(group, f"attempts_exhausted: {group.tries} have begun")
            else:
                self.table.takeover.note(group.group_id, TakeoverOutcome.AGAIN, self.table.now_s)
                self.table.unwait(group)
                self.assignments.place(group)


def _is_theirs(group: Group, ticket: bytes) -> bool:
    """Return whether a message with this ticket may change the group.

    The ticket of a group that a worker claimed and no client has asked for yet is not known.
    """
    return not group.client_id or hmac.compare_digest(group.ticket, ticket)
