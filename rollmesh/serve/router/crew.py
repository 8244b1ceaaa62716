"""The crew: gives waiting groups to workers, and makes up for workers that die or lie.

Invariants: a group is with at most one worker, whole; nothing is given to a worker that is not
live; an attempt of a lost worker is taken back, and if that worker speaks again before another
began, it keeps the group. RunGroup means "see that this attempt runs": it is said again until the
worker confirms, and now and then while the group runs. Driven by ledger.py; who is alive is kept
in workers.py.
"""

from rollmesh.serve.router.book import Book
from rollmesh.serve.router.groups import Group
from rollmesh.serve.router.workers import Worker, Workers, WorkerState
from rollmesh.wire.messages import (
    CancelRun,
    GroupFailed,
    GroupState,
    HeldGroup,
    RunGroup,
    WorkerHello,
)

CLAIM_BEATS = 3
"""A group that only a worker knows of is cancelled unless a client asks for it in this time."""
START_BEATS = 2
"""RunGroup is repeated this often until the worker says that the group started."""
GIVE_UP_BEATS = 20
"""A live worker that does not start a group in this time loses it."""
CONFIRM_BEATS = 20
"""RunGroup is repeated this often while a group runs, in case its GroupDelivered was lost."""


class Crew:
    """See the module."""

    def __init__(self, book: Book, beat_s: float, max_attempts: int) -> None:
        self.workers = Workers()
        self._book = book
        self._beat_s = beat_s
        self._max_attempts = max_attempts
        self._stirred: set[str] = set()

    def stir(self, env: str) -> None:
        """Something changed for `env`: look at its queue at the end of this step."""
        self._stirred.add(env)

    def dispatch(self) -> None:
        """Give out what can be given out."""
        queue = self._book.queue
        while self._stirred:
            env = self._stirred.pop()
            while group := queue.head(env):
                worker = self.workers.best_for(env, group.num_samples, 2 * self._beat_s)
                if worker is None:
                    break
                queue.take(group)
                self._assign(group, worker)

    # workers come and go

    def greet(self, hello: WorkerHello, route: bytes) -> Worker:
        """A worker says hello: a new one, one that we know, or a new process under an old name."""
        worker = self.workers.get(hello.worker_id)
        if worker and (worker.hello.pid, worker.hello.host) != (hello.pid, hello.host):
            self.dismiss(worker, "was restarted")
            worker = None
        if worker is None:
            worker = Worker(hello, route, self._book.now_s)
            self.workers.add(worker)
        else:
            self.workers.move(worker, route)
            worker.hello, worker.heard_s = hello, self._book.now_s
            self.revive(worker)
        self.stir(hello.env)
        for held in hello.holds:
            self.claim(worker, held)
        return worker

    def revive(self, worker: Worker) -> None:
        """It speaks: what it had and nobody else began since is its own again."""
        if worker.state is WorkerState.LIVE:
            return
        worker.state = WorkerState.LIVE
        self._book.num["workers_revived"] += 1
        for group in list(self._book.groups.values()):
            if group.state is GroupState.QUEUED and group.last_worker_id == worker.worker_id:
                self._recognise(worker, group)
                group.say_again_s = self._book.now_s

    def lose(self, worker: Worker, why: str) -> None:
        """`worker` is dead to us: its groups run elsewhere, as one attempt more."""
        if worker.state is WorkerState.LIVE:
            self._book.num["workers_lost"] += 1
        worker.state = WorkerState.LOST
        for group in list(worker.groups.values()):
            if group.client_id:
                self._requeue(group, f"{worker.worker_id} {why}")
            else:
                self.take_away(group)
                self._book.drop(group, GroupState.CANCELLED)

    def dismiss(self, worker: Worker, why: str) -> None:
        """`worker` is gone for good."""
        self.lose(worker, why)
        self.workers.remove(worker)

    # workers speak of groups

    def claim(self, worker: Worker, held: HeldGroup) -> None:
        """`worker` says that it runs this group, or holds its result."""
        book, group = self._book, self._book.groups.get(held.group_id)
        if group is None:
            if book.has_ended(held.group_id):
                self._cancel_run(worker, held, "it has ended")
            else:
                self._keep_unasked(worker, held)
        elif group.state is GroupState.QUEUED:
            group.attempt = max(group.attempt, held.attempt)
            group.is_finished = held.finished
            self._recognise(worker, group)
        elif group.worker_id != worker.worker_id:
            self._cancel_run(worker, held, f"{group.worker_id} runs attempt {group.attempt}")
        elif held.attempt >= group.attempt:
            group.is_finished = held.finished
            if group.client_id:
                group.say_again_s = book.now_s + CONFIRM_BEATS * self._beat_s
            if group.state is GroupState.ASSIGNED:
                book.enter(group, GroupState.RUNNING)
                book.tell_client(group)

    def hand_back(self, worker: Worker, group: Group, reason: str) -> None:
        """`worker` did not begin the group: the attempt does not count."""
        # Until its next beat says otherwise it takes nothing, or it would be asked at once again.
        worker.accepting = False
        self._book.num["returns"] += 1
        group.attempt -= 1
        self._requeue(group, reason)

    def take_away(self, group: Group, tell_worker: str = "") -> None:
        """No worker has the group any more; one that had it is told why, if `tell_worker`."""
        worker = self.workers.get(group.worker_id or group.last_worker_id)
        if worker and tell_worker:
            self._book.send(worker.route, CancelRun(group.group_id, tell_worker))
        if worker and group.worker_id:
            worker.unseat(group)
            self.stir(worker.hello.env)
        group.worker_id = ""

    def fail(self, group: Group, reason: str) -> None:
        """The group will not run (again), and its client is told."""
        self.take_away(group)
        self._book.end(group, GroupFailed(group.group_id, reason), group.attempt)

    def look_after_groups(self) -> None:
        """What time brings to groups that are with workers."""
        for worker in self.workers:
            for group in list(worker.groups.values()):
                if self._book.now_s >= group.say_again_s:
                    self._say_again(group, worker)

    def _say_again(self, group: Group, worker: Worker) -> None:
        if not group.client_id:
            held = HeldGroup(group.group_id, group.attempt, group.is_finished)
            self.take_away(group)
            self._book.drop(group, GroupState.CANCELLED)
            self._cancel_run(worker, held, "no client asks for it")
        elif group.state is GroupState.RUNNING:
            self._say_run(group, worker, CONFIRM_BEATS)
        elif self._book.now_s < group.assigned_s + GIVE_UP_BEATS * self._beat_s:
            self._say_run(group, worker, START_BEATS)
        else:
            worker.accepting = False
            self._requeue(group, f"{worker.worker_id} did not start it")

    def _assign(self, group: Group, worker: Worker) -> None:
        last = self.workers.get(group.last_worker_id)
        if last and last is not worker:
            reason = f"{worker.worker_id} runs the next attempt"
            self._book.send(last.route, CancelRun(group.group_id, reason))
        self._book.enter(group, GroupState.ASSIGNED)
        group.attempt += 1
        group.worker_id, group.last_worker_id = worker.worker_id, ""
        group.assigned_s = self._book.now_s
        worker.num_assigned += 1
        worker.seat(group)
        self._say_run(group, worker, START_BEATS)
        self._book.tell_client(group)

    def _say_run(self, group: Group, worker: Worker, again_beats: int) -> None:
        group.say_again_s = self._book.now_s + again_beats * self._beat_s
        run = RunGroup(group.group_id, group.attempt, group.num_samples, group.sink)
        self._book.send(worker.route, run, group.body)

    def _cancel_run(self, worker: Worker, held: HeldGroup, reason: str) -> None:
        # A result that is there already goes to its sink, which knows whether it wants it.
        if not held.finished:
            self._book.send(worker.route, CancelRun(held.group_id, reason))

    def _requeue(self, group: Group, why: str) -> None:
        if group.attempt >= self._max_attempts:
            self.fail(group, f"attempts_exhausted: {group.attempt} have begun; {why}")
            return
        self._book.num["requeues"] += 1
        worker_id = group.worker_id
        self.take_away(group)
        group.last_worker_id = worker_id
        self._book.enter(group, GroupState.QUEUED)
        self._book.wait(group, first=True)
        self._book.tell_client(group)
        self.stir(group.env)

    def _recognise(self, worker: Worker, group: Group) -> None:
        """A waiting group turns out to be with `worker` already."""
        self._book.num["claims"] += 1
        self._book.unwait(group)
        self._book.enter(group, GroupState.RUNNING)
        group.worker_id, group.last_worker_id = worker.worker_id, ""
        group.say_again_s = self._book.now_s + CONFIRM_BEATS * self._beat_s
        worker.seat(group)
        self._book.tell_client(group)

    def _keep_unasked(self, worker: Worker, held: HeldGroup) -> None:
        group = Group(held.group_id, worker.hello.env, 1, "", "", attempt=held.attempt)
        group.state, group.worker_id = GroupState.RUNNING, worker.worker_id
        group.is_finished = held.finished
        group.say_again_s = self._book.now_s + CLAIM_BEATS * self._beat_s
        self._book.open(group)
        worker.seat(group)

    def adopt(self, group: Group, num_samples: int) -> None:
        """A client asks for a group that a worker had claimed."""
        group.say_again_s = self._book.now_s + CONFIRM_BEATS * self._beat_s
        worker = self.workers.get(group.worker_id)
        assert worker is not None
        worker.resize(group, num_samples)
