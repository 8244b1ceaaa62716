"""Assignments of groups to workers, from the first RunGroup to the end of the attempt.

    CLEAR --its worker fell silent, stalled or ended--> SUSPECT --its worker beats again--> CLEAR
                     SUSPECT --MAX_DEATHS workers have ended under it--> quarantined: FAILED

- An attempt that did not begin is excused, at most MAX_UNBEGUN times. An attempt of a lost worker
  is taken back; if the worker returns before another attempt began, it keeps the group.
- RunGroup means "make sure that this attempt runs". It is repeated until the worker confirms, and
  sometimes while the group runs, but not to a worker that cannot receive it.
- Any group of a worker that ended may have killed it, so each is a suspect. A suspect runs where no
  other suspect is watched, which lasts as long as it had run when its worker ended. It waits at
  most suspect_wait_beats for such a worker. Silence makes a suspect, but only ended workers count.
"""

import math
from operator import attrgetter

from rollmesh.core.config import RouterConfig
from rollmesh.serve.router.group_table import GroupTable, TimerHeap, left_s, moved
from rollmesh.serve.router.groups import MAX_UNBEGUN, Death, Group, Incarnation
from rollmesh.serve.router.workers import WorkerEntry, WorkerTable
from rollmesh.wire.messages import CancelRun, GroupFailed, GroupState, HeldGroup, RunGroup

MAX_DEATHS = 2


def record_death(
    group: Group, worker: WorkerEntry, cause: str, now_s: float, *, is_certain: bool
) -> None:
    """Record that `worker` has ended, or seems to have, while it ran `group`."""
    others = [each for each in group.deaths if each.incarnation != worker.incarnation]
    death = Death(worker.incarnation, cause, is_certain)
    group.deaths = (*others, death)
    if group.worker_id == worker.worker_id:
        group.ran_s = max(group.ran_s, now_s - group.assigned_s)


def withdraw_death(group: Group, incarnation: Incarnation) -> bool:
    """Forget a death, since the process runs or left in order; return whether `group` had recorded
    it.
    """
    before = group.deaths
    group.deaths = tuple(each for each in before if each.incarnation != incarnation)
    return len(group.deaths) < len(before)


def confirm_death(group: Group, incarnation: Incarnation, cause: str) -> None:
    """Record the cause of an end that is now certain."""
    group.deaths = tuple(
        Death(each.incarnation, cause, is_certain=True)
        if each.incarnation.may_be(incarnation)
        else each
        for each in group.deaths
    )


def quarantine_reason(group: Group) -> str:
    """Return why the group is quarantined; '' if it is not."""
    deaths = [each for each in group.deaths if each.is_certain]
    if len(deaths) < MAX_DEATHS:
        return ""
    causes = "; ".join(f"{each.incarnation.worker_id}: {each.cause}" for each in deaths)
    return f"quarantined: {len(deaths)} workers ended under it ({causes})"


def may_be_quarantined(group: Group) -> bool:
    """Return whether a silent worker may still turn out to have been killed by the group."""
    return len(group.deaths) >= MAX_DEATHS


def watch_suspect(group: Group, worker: WorkerEntry, now_s: float, max_watch_s: float) -> None:
    """Record that `worker` runs `group`; if that is a suspect, no other one is placed there for a
    while.
    """
    if group.deaths:
        until_s = now_s + min(group.ran_s, max_watch_s)
        worker.watch_until_s = max(worker.watch_until_s, until_s)


def unwatch_suspect(worker: WorkerEntry, now_s: float) -> bool:
    """Return whether the watched time has just ended."""
    if not worker.watch_until_s:
        return False
    if now_s < worker.watch_until_s and any(group.deaths for group in worker.groups.values()):
        return False
    worker.watch_until_s = 0.0
    return True


CLAIM_BEATS = 3
"""Time in which a client must ask for a group that only a worker reports, or it is cancelled."""
START_BEATS = 2
"""Interval at which RunGroup is repeated until the worker reports that the group started."""
GIVE_UP_BEATS = 20
"""A live worker that does not start a group in this time loses it."""
CONFIRM_BEATS = 20
"""Interval at which RunGroup is repeated while a group runs, in case its GroupDelivered was
lost.
"""
REPORT_UNBEGUN = 3
"""Assignments without a start after which the client of a group is informed."""
REPORT_UNBEGUN_BEATS = 60
"""Interval at which a client is informed, whatever the number of its groups."""


class Assignments:
    """Assigns groups to workers and follows each attempt to its end."""

    def __init__(self, table: GroupTable, workers: WorkerTable, settings: RouterConfig) -> None:
        self._table = table
        self._workers = workers
        self._beat_s = settings.beat_s
        self._max_watch_s = settings.suspect_watch_beats * settings.beat_s
        self._suspect_wait_s = settings.suspect_wait_beats * settings.beat_s
        self._max_attempts = settings.max_attempts
        self._timers = TimerHeap(attrgetter("repeat_s"))
        self._changed_envs: dict[str, None] = {}
        """Environments whose queues `dispatch` looks at."""
        self._changed: list[WorkerEntry] = []
        """Workers whose free places changed while suspects wait."""
        self._wide: set[str] = set()
        """Environments whose suspects are to look at all workers, not only at those."""

    @property
    def num_noted(self) -> int:
        """Times at which groups are looked at, those of ended groups included."""
        return len(self._timers)

    def mark_changed(self, worker: WorkerEntry) -> None:
        """The worker's free places changed."""
        self._workers.rank(worker)
        self._changed_envs[worker.hello.env] = None
        if self._table.suspects:
            self._changed.append(worker)

    def dispatch(self) -> None:
        """Assign what can be assigned."""
        table = self._table
        while self._changed_envs:
            env, _ = self._changed_envs.popitem()
            if table.suspects:
                self._place_suspects(env)
            while group := table.queue.head(env):
                worker = self._worker_for(group)
                if worker is None:
                    break
                table.take(group)
                self._assign(group, worker)
        self._changed.clear()

    def _worker_for(self, group: Group) -> WorkerEntry | None:
        is_away = group.client_id in self._table.queue.away
        choose = self._workers.spare_for if is_away else self._workers.best_for
        return choose(group.env, group.num_samples)

    def place(self, group: Group) -> None:
        """Assign a new group at once, or queue it behind those that wait."""
        table, env = self._table, group.env
        if env in self._changed_envs or table.suspects or table.queue.head(env):
            table.wait(group)
            self._changed_envs[env] = None
            self.dispatch()
        elif worker := self._worker_for(group):
            self._assign(group, worker)
        else:
            table.wait(group)

    # messages of workers about groups

    def claim(self, worker: WorkerEntry, held: HeldGroup) -> None:
        """A worker reports that it runs this group, or holds its result."""
        table, group = self._table, self._table.groups.get(held.group_id)
        if group is None:
            if held.group_id in table.tombstones:
                self._cancel_run(worker, held, "it has ended")
            else:
                self._keep_unasked(worker, held)
        elif group.state is GroupState.QUEUED:
            if group.is_unbegun and held.attempt >= group.attempt:
                group.excused -= 1  # it had begun after all
            group.is_unbegun = False
            group.attempt = max(group.attempt, held.attempt)
            group.is_finished = held.finished
            self.recognise(worker, group)
        elif group.worker_id != worker.worker_id:
            self._cancel_run(worker, held, f"{group.worker_id} runs attempt {group.attempt}")
        elif held.attempt >= group.attempt:
            group.is_finished = held.finished
            if group.client_id:
                self.check_after(group, CONFIRM_BEATS)
            if group.state is GroupState.ASSIGNED:
                table.enter(group, GroupState.RUNNING)
                table.notify_client(group)

    def recognise(self, worker: WorkerEntry, group: Group) -> None:
        """Assign a waiting group to the worker that already has it.

        The worker runs it, or was given it and has not begun.
        """
        table = self._table
        table.num["claims"] += 1
        table.unwait(group)
        is_unbegun = group.is_unbegun
        group.excused -= is_unbegun
        table.enter(group, GroupState.ASSIGNED if is_unbegun else GroupState.RUNNING)
        self._occupy(group, worker)
        self.check_after(group, CONFIRM_BEATS)
        table.notify_client(group)

    def hand_back(self, worker: WorkerEntry, group: Group, reason: str) -> None:
        """Requeue a group that `worker` did not begin: the attempt does not count."""
        # It takes nothing until its next heartbeat, or it would be asked again at once.
        worker.accepting = False
        self._table.num["returns"] += 1
        group.excused += 1
        self.requeue(group, reason, may_excuse=False)

    # requeued and ended groups

    def take_away(self, group: Group, cancel_reason: str = "") -> None:
        """Take the group from its worker, which receives CancelRun with the reason if
        `cancel_reason`.
        """
        worker = self._workers.get(group.worker_id or group.last_worker_id)
        if worker and cancel_reason:
            self._table.send(worker.route, CancelRun(group.group_id, cancel_reason))
        if worker and group.worker_id:
            worker.unassign(group)
            unwatch_suspect(worker, self._table.now_s)
            self.mark_changed(worker)
        group.worker_id, group.repeat_s = "", math.inf

    def requeue(self, group: Group, why: str, *, may_excuse: bool = True) -> None:
        """End the attempt without a result; another one begins if any is left.

        An attempt that its worker did not confirm is excused, unless `may_excuse` is False.
        """
        if culprit := quarantine_reason(group):
            self._table.num["quarantined"] += 1
            self.fail(group, culprit)
            return
        is_unbegun = may_excuse and group.state is GroupState.ASSIGNED
        if is_unbegun:
            self._table.num["unbegun"] += 1
            group.num_unbegun += 1
            group.excused += 1
        if group.num_unbegun > MAX_UNBEGUN:
            given = f"given to workers {group.num_unbegun} times without beginning"
            self.fail(group, f"attempts_exhausted: {given}; {why}")
            return
        if group.tries >= self._max_attempts:
            self.fail(group, f"attempts_exhausted: {group.tries} have begun; {why}")
            return
        self._table.num["requeues"] += 1
        worker_id = group.worker_id
        self.take_away(group)
        group.last_worker_id, group.is_unbegun = worker_id, is_unbegun
        self._table.enter(group, GroupState.QUEUED)
        self._table.wait(group, first=True)
        self._table.notify_client(group, moved(group, self._news_of_unbegun(group, why)))
        self._changed_envs[group.env] = None
        if group.deaths:
            self._wide.add(group.env)

    def _news_of_unbegun(self, group: Group, why: str) -> str:
        """Return what the client should know about a group that does not begin; '' if nothing
        yet.
        """
        client, now_s = self._table.clients.get(group.client_id), self._table.now_s
        is_news = group.is_unbegun and group.num_unbegun >= REPORT_UNBEGUN
        if not is_news or client is None:
            return ""
        if now_s < client.unbegun_sent_s + REPORT_UNBEGUN_BEATS * self._beat_s:
            return ""
        client.unbegun_sent_s = now_s
        times = f"{group.num_unbegun} times"
        return f"{group.group_id} was given to workers {times} and never began; {why}"

    def fail(self, group: Group, reason: str) -> None:
        """Fail the group: inform its client, and a worker that has it."""
        self.take_away(group, cancel_reason=reason)
        self._table.end(group, GroupFailed(group.group_id, reason))

    def forget(self, group: Group) -> None:
        """End a group that no client asks for, without a message."""
        self.take_away(group)
        self._table.drop(group, GroupState.CANCELLED)

    def adopt(self, group: Group, num_samples: int) -> None:
        """A client asks for a group that a worker had claimed."""
        self.check_after(group, CONFIRM_BEATS)
        worker = self._workers.get(group.worker_id)
        assert worker is not None
        worker.resize(group, num_samples)
        self.mark_changed(worker)

    def check_after(self, group: Group, beats: int) -> None:
        """Schedule the next message to the worker that has `group`, after this many heartbeats."""
        group.repeat_s = self._table.now_s + beats * self._beat_s
        self._timers.put(group)

    def check_groups(self) -> None:
        """Handle what is due for groups that are with workers, and for suspects that wait."""
        for worker in self._workers:
            if unwatch_suspect(worker, self._table.now_s):
                self.mark_changed(worker)
        for group in self._timers.take_due(self._table.now_s):
            holder = self._workers.get(group.worker_id)
            assert holder is not None
            self._say_again(group, holder)
        envs = dict.fromkeys(group.env for group in self._table.suspects.values())
        self._changed_envs |= envs
        self._wide.update(envs)

    def _say_again(self, group: Group, worker: WorkerEntry) -> None:
        now_s = self._table.now_s
        is_assigned = group.state is GroupState.ASSIGNED
        if not group.client_id:
            held = HeldGroup(group.group_id, group.attempt, group.is_finished)
            self.forget(group)
            self._cancel_run(worker, held, "no client asks for it")
        elif is_assigned and now_s >= group.assigned_s + GIVE_UP_BEATS * self._beat_s:
            worker.accepting = False
            self.requeue(group, f"{worker.worker_id} did not start it")
        elif not worker.is_responsive(now_s, 2 * self._beat_s):
            self.check_after(group, START_BEATS)
        else:
            self._send_run(group, worker, START_BEATS if is_assigned else CONFIRM_BEATS)

    def _place_suspects(self, env: str) -> None:
        """Place suspects, before all other groups. Only ticks and new suspects look at all
        workers.
        """
        latest_s = self._table.now_s - self._suspect_wait_s
        ready = [
            group
            for group in self._table.suspects.values()
            if group.env == env and (group.queued_s <= latest_s or not may_be_quarantined(group))
        ]
        ready.sort(key=lambda group: -group.priority)
        if env not in self._wide:
            self._place_at_changed(ready)
            return
        self._wide.discard(env)
        for group in ready:
            strictly = group.queued_s > latest_s
            worker = self._workers.apart_for(env, group.num_samples, strictly=strictly)
            if worker is None:
                break
            self._table.unwait(group)
            self._assign(group, worker)

    def _place_at_changed(self, ready: list[Group]) -> None:
        for worker in self._changed:
            # A worker that has just left or ended is no longer in the table.
            is_here = self._workers.get(worker.worker_id) is worker
            fits = (each for each in ready if worker.can_take(each.num_samples))
            group = next(fits, None) if is_here and not worker.watch_until_s else None
            if group and group.env == worker.hello.env:
                ready.remove(group)
                self._table.unwait(group)
                self._assign(group, worker)

    def _assign(self, group: Group, worker: WorkerEntry) -> None:
        table = self._table
        table.enter(group, GroupState.ASSIGNED)
        group.attempt += 1
        worker.num_assigned += 1
        self._occupy(group, worker)
        self._send_run(group, worker, START_BEATS)
        table.notify_client(group)

    def _occupy(self, group: Group, worker: WorkerEntry) -> None:
        last = self._workers.get(group.last_worker_id)
        if last and last is not worker:
            reason = f"{worker.worker_id} runs attempt {group.attempt}"
            self._table.send(last.route, CancelRun(group.group_id, reason))
        group.worker_id, group.last_worker_id = worker.worker_id, ""
        group.is_unbegun = False
        group.assigned_s = self._table.now_s
        worker.occupy(group)
        watch_suspect(group, worker, self._table.now_s, self._max_watch_s)
        self._workers.rank(worker)

    def _send_run(self, group: Group, worker: WorkerEntry, again_beats: int) -> None:
        table = self._table
        self.check_after(group, again_beats)
        deadline_s = left_s(group, table.now_s)
        run = RunGroup(
            group.group_id,
            group.attempt,
            group.num_samples,
            group.sink,
            deadline_s,
            group.ticket,
        )
        table.send(worker.route, run, group.body)

    def _cancel_run(self, worker: WorkerEntry, held: HeldGroup, reason: str) -> None:
        # A result that exists goes to its sink, which knows whether it is wanted.
        if not held.finished:
            self._table.send(worker.route, CancelRun(held.group_id, reason))

    def _keep_unasked(self, worker: WorkerEntry, held: HeldGroup) -> None:
        group = Group(held.group_id, worker.hello.env, 1, "", "", attempt=held.attempt)
        group.state = GroupState.RUNNING
        group.is_finished = held.finished
        self._table.open(group)
        self._occupy(group, worker)
        self.check_after(group, CLAIM_BEATS)
