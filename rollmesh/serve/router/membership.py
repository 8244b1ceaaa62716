"""Which workers and clients are members, and what their coming and leaving does to groups.

    client:  PRESENT --missed beats--> AWAY --any message--> PRESENT
             PRESENT, AWAY --ClientLeft--> removed
             AWAY --client_grace_s, kept_client_s if it keeps groups--> removed

- A worker that is silent or stalled may return and keeps what no other worker began. One whose
  process has ended does not return, whatever of its messages arrives later. Its groups become
  suspects.
- Of two workers of an environment, never both leave because they are worn, unless no successor
  comes.
- Groups of an away client run after those of present ones, and are cancelled when it is removed. A
  client that keeps its groups asks for them again from its journal.
"""

from collections.abc import Iterable

import msgspec

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.assignments import (
    Assignments,
    confirm_death,
    quarantine_reason,
    record_death,
    withdraw_death,
)
from rollmesh.serve.router.group_table import CLIENT_LEFT, GroupTable, TakeoverOutcome
from rollmesh.serve.router.groups import EndedIncarnations, Group, GroupClient, Incarnation
from rollmesh.serve.router.workers import WorkerEntry, WorkerHealth, WorkerTable, incarnation_of
from rollmesh.wire.messages import (
    RELIEVED,
    CancelRun,
    ClientHello,
    DrainWorker,
    GroupFailed,
    GroupState,
    HeldGroup,
    WorkerBeat,
    WorkerHello,
)

WORN = "worn"
"""State that such a worker reports in its heartbeats (serve/server/worker_machine.py)."""
MAX_SHARE = 0.25
"""Share of an environment's workers that may leave at the same time, at least one."""


class RollingRecycle:
    """Lets worn workers leave one after another."""

    def __init__(self, successor_wait_s: float) -> None:
        self._successor_wait_s = successor_wait_s
        self._worn: dict[str, WorkerEntry] = {}
        """By worker id, in order of request."""
        self._awaited: dict[str, float] = {}
        """By environment: until when a successor is expected."""

    def ask(self, worker: WorkerEntry) -> None:
        """`worker` asks to leave."""
        if not worker.drain_reason:
            self._worn[worker.worker_id] = worker

    def note_left(self, worker: WorkerEntry, now_s: float) -> None:
        """`worker` has left; if it was drained here, a successor is expected."""
        self._worn.pop(worker.worker_id, None)
        self._awaited = {env: until_s for env, until_s in self._awaited.items() if until_s > now_s}
        if worker.drain_reason == RELIEVED:
            self._awaited[worker.hello.env] = now_s + self._successor_wait_s

    def note_came(self, worker: WorkerEntry) -> None:
        """A new worker has joined."""
        self._awaited.pop(worker.hello.env, None)

    def next(self, workers: WorkerTable, now_s: float) -> WorkerEntry | None:
        """Return the worker that may leave now; it drains before the next one may."""
        for worker in list(self._worn.values()):
            if workers.get(worker.worker_id) is not worker:
                del self._worn[worker.worker_id]
            elif worker.state is WorkerHealth.LIVE and self._can_spare(worker, workers, now_s):
                del self._worn[worker.worker_id]
                return worker
        return None

    def _can_spare(self, worker: WorkerEntry, workers: WorkerTable, now_s: float) -> bool:
        env = worker.hello.env
        live = [w for w in workers if w.hello.env == env and w.state is WorkerHealth.LIVE]
        num_leaving = sum(map(_leaves, live))
        if len(live) - num_leaving > 1:
            return num_leaving < max(1.0, MAX_SHARE * len(live))
        return not num_leaving and now_s >= self._awaited.get(env, 0.0)


def _leaves(worker: WorkerEntry) -> bool:
    state = worker.beat.state if worker.beat else ""
    return bool(worker.drain_reason) or state == "draining"


FORGET_BEATS = 600
"""Time after which a lost worker that stays silent is forgotten."""
SAY_DRAIN_BEATS = 4
"""Interval at which DrainWorker is repeated until a heartbeat confirms it."""
EXIT_PATIENCES = 10
"""Multiple of its timeout in which a router ignores earlier messages of an ended process."""


class WorkerMembership:
    """Handles the messages and silences of workers."""

    def __init__(
        self,
        table: GroupTable,
        workers: WorkerTable,
        assignments: Assignments,
        settings: RouterConfig,
    ) -> None:
        self.workers = workers
        self._table = table
        self._assignments = assignments
        self._beat_s = settings.beat_s
        self._patience_s = settings.beat_s * settings.missed_beats
        self._max_lag_s = settings.max_lag_s
        self._ends = EndedIncarnations(EXIT_PATIENCES * self._patience_s)
        self._rolling_recycle = RollingRecycle(settings.successor_wait_s)

    @property
    def num_ends(self) -> int:
        """Ended processes that are remembered."""
        return len(self._ends)

    def joined(self, hello: WorkerHello, route: bytes) -> None:
        """Handle a hello: of a new worker, a known one, or a new process under an old name."""
        incarnation = incarnation_of(hello)
        if self._ends.cover(incarnation, self._table.now_s):
            return
        worker = known = self.workers.get(hello.worker_id)
        if (
            worker
            and worker.state is WorkerHealth.LIVE
            and incarnation.started_s < worker.incarnation.started_s
        ):
            return  # sent by an earlier process and late, unless a clock was set back
        if worker and worker.incarnation != incarnation:
            self._replace(worker, incarnation)
            worker = None
        if worker is None:
            worker = WorkerEntry(hello, route, self._table.now_s)
            self.workers.add(worker)
            self._rolling_recycle.note_came(worker)
        else:
            self.workers.move(worker, route)
            worker.hello = hello
            worker.last_message_s = self._table.now_s
            if worker.state is not WorkerHealth.LIVE:
                self._revive(worker, reports_held=True)
        self._assignments.mark_changed(worker)
        for held in hello.holds:
            self._assignments.claim(worker, held)
            if known is not worker:
                self._note_found(worker, held)

    def receive(self, worker: WorkerEntry, beat: WorkerBeat | None = None) -> None:
        """Return to the worker what it had and no other worker began since it was lost.

        All messages but heartbeats come from its loop, which therefore runs, whatever the last
        heartbeat reported.
        """
        worker.last_message_s = self._table.now_s
        if beat:
            worker.take_beat(beat, self._table.now_s)
            self._assignments.mark_changed(worker)
            if beat.state == WORN:
                self._rolling_recycle.ask(worker)
        if beat and beat.loop_lag_s > self._max_lag_s:
            where = f" in {beat.stalled_in}" if beat.stalled_in else ""
            self._lose(worker, f"its loop was held for {beat.loop_lag_s:.0f} s{where}")
            worker.state = WorkerHealth.STALLED
        elif worker.state is not WorkerHealth.LIVE:
            self._revive(worker)

    def find(self, incarnation: Incarnation) -> WorkerEntry | None:
        """Return the worker of this incarnation."""
        worker = self.workers.get(incarnation.worker_id)
        return worker if worker and worker.incarnation.may_be(incarnation) else None

    def worker_exited(self, incarnation: Incarnation, cause: str) -> None:
        """Handle a report that the process has ended, with its cause."""
        if worker := self.find(incarnation):
            self._bury(worker, cause)
            return
        end = self._ends.find(incarnation) or self._ends.add(incarnation, (), self._table.now_s)
        for group in self._open_ones(end.group_ids):
            confirm_death(group, incarnation, cause)
            self._judge(group)

    def next_started(self, incarnation: Incarnation) -> None:
        """Handle a process that is there and does not serve yet: an earlier one of its name has
        ended.
        """
        worker = self.workers.get(incarnation.worker_id)
        if worker and incarnation.started_s > worker.incarnation.started_s:
            self._replace(worker, incarnation)

    def dismiss(self, worker: WorkerEntry, why: str) -> None:
        """`worker` has left, and no group is to blame."""
        for group in list(worker.groups.values()):
            self._leave(group, f"{worker.worker_id} {why}")
        self.workers.remove(worker)
        self._rolling_recycle.note_left(worker, self._table.now_s)

    def see_off(self, incarnation: Incarnation, why: str) -> None:
        """A process has left in order: what it cut short runs elsewhere and does not count."""
        now_s = self._table.now_s
        if worker := self.find(incarnation):
            self._ends.add(worker.incarnation, (), now_s)
            for group in worker.groups.values():
                if group.state is GroupState.RUNNING:
                    group.excuse_cut()
            self.dismiss(worker, f"left: {why}")
        elif end := self._ends.find(incarnation):  # its end was reported before
            for group in self._open_ones(end.group_ids):
                if withdraw_death(group, end.incarnation) and not group.is_unbegun:
                    group.excuse_cut()
            self._ends.add(end.incarnation, (), now_s)
        else:
            self._ends.add(incarnation, (), now_s)

    def drain(self, worker: WorkerEntry, reason: str) -> None:
        """Drain `worker`: it finishes what it runs, gets nothing more, and leaves."""
        worker.drain_reason = reason or "it was asked to"
        self._assignments.mark_changed(worker)
        self._send_drain(worker)

    def check_workers(self) -> None:
        """Handle what is due: silence, and drains that were not confirmed."""
        now_s = self._table.now_s
        for worker in self.workers:
            silent_s = now_s - worker.last_message_s
            if silent_s > FORGET_BEATS * self._beat_s:
                self.dismiss(worker, "is forgotten")
            elif silent_s > self._patience_s and worker.state is not WorkerHealth.LOST:
                self._lose(worker, f"was silent for {silent_s:.1f} s")
                worker.state = WorkerHealth.LOST
            elif worker.drain_reason and now_s >= worker.drain_due_s:
                self._send_drain(worker)
        while worn := self._rolling_recycle.next(self.workers, now_s):
            self.drain(worn, RELIEVED)

    def _note_found(self, worker: WorkerEntry, held: HeldGroup) -> None:
        """Merge what a worker that is new to this router held before."""
        group, takeover = self._table.groups.get(held.group_id), self._table.takeover
        if group is None or group.worker_id != worker.worker_id:
            return  # it has ended, or runs elsewhere
        if group.client_id:
            takeover.note(held.group_id, TakeoverOutcome.KEPT, self._table.now_s)
        elif not held.finished:
            takeover.note(held.group_id, TakeoverOutcome.UNASKED, self._table.now_s)

    def _revive(self, worker: WorkerEntry, *, reports_held: bool = False) -> None:
        """Return cancels for what others took over, unless it holds a result, and claims for the
        rest.
        """
        worker.state = WorkerHealth.LIVE
        self._table.num["workers_revived"] += 1
        for group_id in worker.lost_groups:
            group = self._table.groups.get(group_id)
            if group:
                withdraw_death(group, worker.incarnation)
            if group and group.last_worker_id == worker.worker_id:
                self._assignments.recognise(worker, group)
                self._assignments.check_after(group, 0)
            elif not reports_held:
                why = f"attempt {group.attempt} is elsewhere" if group else "it has ended"
                self._table.send(worker.route, CancelRun(group_id, why))
        worker.lost_groups.clear()
        self._assignments.mark_changed(worker)

    def _lose(self, worker: WorkerEntry, why: str) -> None:
        """Treat the worker as lost for now: its groups run elsewhere, as one attempt more."""
        self._count_loss(worker)
        worker.state = WorkerHealth.LOST
        for group in list(worker.groups.values()):
            worker.lost_groups[group.group_id] = None
            record_death(group, worker, why, self._table.now_s, is_certain=False)
            self._leave(group, f"{worker.worker_id} {why}")
        self.workers.rank(worker)

    def _replace(self, worker: WorkerEntry, incarnation: Incarnation) -> None:
        # On another host the earlier one may still run unheard: then its end was not the task's
        # fault.
        is_certain = incarnation.host == worker.incarnation.host
        self._bury(worker, "its process was replaced", is_certain=is_certain)

    def _bury(self, worker: WorkerEntry, cause: str, *, is_certain: bool = True) -> None:
        """Handle the end of its process: its groups run elsewhere, unless one of them killed it."""
        self._count_loss(worker)
        worker.state = WorkerHealth.LOST
        had = (*worker.lost_groups, *worker.groups)
        self._ends.add(worker.incarnation, had, self._table.now_s)
        for group in self._open_ones(had):
            record_death(group, worker, cause, self._table.now_s, is_certain=is_certain)
            if group.worker_id == worker.worker_id:
                self._leave(group, f"{worker.worker_id}: {cause}")
            else:
                self._judge(group)
        self.workers.remove(worker)

    def _judge(self, group: Group) -> None:
        if culprit := quarantine_reason(group):
            self._table.num["quarantined"] += 1
            self._assignments.fail(group, culprit)

    def _open_ones(self, group_ids: Iterable[GroupId]) -> list[Group]:
        groups = self._table.groups
        return [groups[group_id] for group_id in group_ids if group_id in groups]

    def _leave(self, group: Group, why: str) -> None:
        if group.client_id:
            self._assignments.requeue(group, why)
        else:
            self._assignments.forget(group)

    def _count_loss(self, worker: WorkerEntry) -> None:
        if worker.state is WorkerHealth.LIVE:
            self._table.num["workers_lost"] += 1

    def _send_drain(self, worker: WorkerEntry) -> None:
        worker.drain_due_s = self._table.now_s + SAY_DRAIN_BEATS * self._beat_s
        if worker.beat is None or worker.beat.state in ("serving", WORN):
            self._table.send(worker.route, DrainWorker(worker.drain_reason))


MAX_WEIGHT = 1000
"""Limit on turns in a row of a client."""


class Forgotten(msgspec.Struct, frozen=True):
    """A client that was removed while it had groups."""

    client_id: str
    num_groups: int
    reason: str


class ClientMembership:
    """Handles the messages and silences of clients, which GroupTable stores."""

    def __init__(self, table: GroupTable, assignments: Assignments, settings: RouterConfig) -> None:
        self._table = table
        self._assignments = assignments
        self._patience_s = settings.beat_s * settings.missed_beats
        self._grace_s = self._patience_s + settings.client_grace_s
        self._kept_s = max(settings.kept_client_s, self._grace_s)
        self._forgotten: list[Forgotten] = []

    def introduce(self, hello: ClientHello) -> None:
        """Store what a client reports about itself."""
        client = self._table.clients[hello.client_id]
        client.weight = min(max(hello.weight, 1), MAX_WEIGHT)
        client.keep = hello.keep

    def see_off(self, client_id: str) -> None:
        """Handle a goodbye."""
        if client := self._table.clients.get(client_id):
            self._forget(client, f"{CLIENT_LEFT}: it said goodbye")

    def is_away(self, client_id: str) -> bool:
        """Return whether it has been silent for longer than a present client may be."""
        client = self._table.clients.get(client_id)
        return client is None or self._table.now_s - client.last_message_s > self._patience_s

    def let_go(self, group: Group, reason: str) -> None:
        """End the group of a client that is away."""
        client = self._table.clients.get(group.client_id)
        if client and client.keep:
            self._assignments.take_away(group, cancel_reason=reason)
            failed = GroupFailed(group.group_id, reason)
            self._table.end(group, failed, num_attempts=0, informs_client=False)
        else:
            self._assignments.fail(group, reason)

    def check_clients(self) -> None:
        """Handle what is due: silence."""
        table = self._table
        for client in list(table.clients.values()):
            if not self.is_away(client.client_id):
                continue
            silent_s = table.now_s - client.last_message_s
            table.queue.away.add(client.client_id)
            keeps = client.keep and client.client_id in table.of_client
            if silent_s > (self._kept_s if keeps else self._grace_s):
                reason = f"{CLIENT_LEFT}: silent for {silent_s:.0f} s"
                if num_groups := self._forget(client, reason):
                    self._forgotten.append(Forgotten(client.client_id, num_groups, reason))

    def take_forgotten(self) -> list[Forgotten]:
        """Return the clients removed since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _forget(self, client: GroupClient, reason: str) -> int:
        """Number of groups that it had."""
        client_id, table = client.client_id, self._table
        groups = list(table.of_client.get(client_id, {}).values())
        for group in groups:
            self.let_go(group, reason)
        del table.clients[client_id]
        table.queue.away.discard(client_id)
        return len(groups)
