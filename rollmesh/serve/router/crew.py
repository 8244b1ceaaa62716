"""The crew: workers come, fall silent, stall, speak again, drain and end, and so do their groups.

Invariants: a worker that is only silent or stalled may come back and keep what nobody else began;
one whose process is known to have ended never does, whatever of its messages is still under way;
what a worker had when its process ended counts against those groups (suspects.py), what it left in
peace does not. Driven by ledger.py; workers.py draws a worker's life, deals.py moves its groups.
"""

from collections.abc import Iterable

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router import suspects
from rollmesh.serve.router.book import Book
from rollmesh.serve.router.deals import Deals
from rollmesh.serve.router.groups import Group
from rollmesh.serve.router.lives import Ends, Life
from rollmesh.serve.router.relief import WORN, Relief
from rollmesh.serve.router.takeover import Fate
from rollmesh.serve.router.workers import Worker, Workers, WorkerState, life_of
from rollmesh.wire.messages import (
    RELIEVED,
    CancelRun,
    DrainWorker,
    GroupState,
    HeldGroup,
    WorkerBeat,
    WorkerHello,
)

FORGET_BEATS = 600
"""A lost worker that stays silent is forgotten."""
SAY_DRAIN_BEATS = 4
"""DrainWorker is repeated this often until a beat shows that it was heard."""
EXIT_PATIENCES = 10
"""So many times its patience a router passes over what an ended process had said before."""


class Crew:
    """See the module."""

    def __init__(self, book: Book, workers: Workers, deals: Deals, settings: RouterConfig) -> None:
        self.workers = workers
        self._book = book
        self._deals = deals
        self._beat_s = settings.beat_s
        self._patience_s = settings.beat_s * settings.missed_beats
        self._max_lag_s = settings.max_lag_s
        self._ends = Ends(EXIT_PATIENCES * self._patience_s)
        self._relief = Relief()

    @property
    def num_ends(self) -> int:
        """Processes that have ended and are remembered."""
        return len(self._ends)

    def greet(self, hello: WorkerHello, route: bytes) -> None:
        """A worker says hello: a new one, one that we know, or a new process under an old name."""
        life = life_of(hello)
        if self._ends.cover(life, self._book.now_s):
            return
        worker = known = self.workers.get(hello.worker_id)
        if worker and worker.state is WorkerState.LIVE and life.started_s < worker.life.started_s:
            return  # said by an earlier process, and late, unless a clock was set back
        if worker and worker.life != life:
            self._replace(worker, life)
            worker = None
        if worker is None:
            worker = Worker(hello, route, self._book.now_s)
            self.workers.add(worker)
            self._relief.note_came(worker)
        else:
            self.workers.move(worker, route)
            worker.hello = hello
            worker.heard_s = self._book.now_s
            if worker.state is not WorkerState.LIVE:
                self._revive(worker, says_holds=True)
        self._deals.stir_worker(worker)
        for held in hello.holds:
            self._deals.claim(worker, held)
            if known is not worker:
                self._note_found(worker, held)

    def hear(self, worker: Worker, beat: WorkerBeat | None = None) -> None:
        """It speaks: what it had and nobody else began since is its own again.

        All but beats come from its loop, which then turns, whatever the last beat said of it.
        """
        worker.heard_s = self._book.now_s
        if beat:
            worker.take_beat(beat, self._book.now_s)
            self._deals.stir_worker(worker)
            if beat.state == WORN:
                self._relief.ask(worker)
        if beat and beat.loop_lag_s > self._max_lag_s:
            where = f" in {beat.stalled_in}" if beat.stalled_in else ""
            self._lose(worker, f"its loop was held for {beat.loop_lag_s:.0f} s{where}")
            worker.state = WorkerState.STALLED
        elif worker.state is not WorkerState.LIVE:
            self._revive(worker)

    def find(self, life: Life) -> Worker | None:
        """The worker of which `life` is the process."""
        worker = self.workers.get(life.worker_id)
        return worker if worker and worker.life.may_be(life) else None

    def hear_of_exit(self, life: Life, cause: str) -> None:
        """Somebody saw that the process has ended, and knows why."""
        if worker := self.find(life):
            self._bury(worker, cause)
            return
        end = self._ends.find(life) or self._ends.add(life, (), self._book.now_s)
        for group in self._open_ones(end.group_ids):
            suspects.confirm(group, life, cause)
            self._judge(group)

    def hear_of_next(self, life: Life) -> None:
        """This process is there, and does not serve yet: an earlier one of its name has ended."""
        worker = self.workers.get(life.worker_id)
        if worker and life.started_s > worker.life.started_s:
            self._replace(worker, life)

    def dismiss(self, worker: Worker, why: str) -> None:
        """`worker` is gone, and no group is to blame."""
        for group in list(worker.groups.values()):
            self._leave(group, f"{worker.worker_id} {why}")
        self.workers.remove(worker)
        self._relief.note_left(worker, self._book.now_s)

    def see_off(self, life: Life, why: str) -> None:
        """A process has left in peace: what it cut short runs elsewhere, and does not count."""
        now_s = self._book.now_s
        if worker := self.find(life):
            self._ends.add(worker.life, (), now_s)
            for group in worker.groups.values():
                if group.state is GroupState.RUNNING:
                    group.excuse_cut()
            self.dismiss(worker, f"left: {why}")
        elif end := self._ends.find(life):  # that it had ended was heard before
            for group in self._open_ones(end.group_ids):
                if suspects.absolve(group, end.life) and not group.is_unbegun:
                    group.excuse_cut()
            self._ends.add(end.life, (), now_s)
        else:
            self._ends.add(life, (), now_s)

    def drain(self, worker: Worker, reason: str) -> None:
        """`worker` finishes what it runs, gets nothing more, and leaves."""
        worker.drain_reason = reason or "it was asked to"
        self._deals.stir_worker(worker)
        self._say_drain(worker)

    def look_after_workers(self) -> None:
        """What time brings: silence, and drains that were not heard."""
        now_s = self._book.now_s
        for worker in self.workers:
            silent_s = now_s - worker.heard_s
            if silent_s > FORGET_BEATS * self._beat_s:
                self.dismiss(worker, "is forgotten")
            elif silent_s > self._patience_s and worker.state is not WorkerState.LOST:
                self._lose(worker, f"was silent for {silent_s:.1f} s")
                worker.state = WorkerState.LOST
            elif worker.drain_reason and now_s >= worker.say_drain_s:
                self._say_drain(worker)
        while worn := self._relief.next(self.workers, now_s):
            self.drain(worn, RELIEVED)

    def _note_found(self, worker: Worker, held: HeldGroup) -> None:
        """What a worker that is new to us held before."""
        group, takeover = self._book.groups.get(held.group_id), self._book.takeover
        if group is None or group.worker_id != worker.worker_id:
            return  # it has ended, or runs elsewhere
        if group.client_id:
            takeover.note(held.group_id, Fate.KEPT, self._book.now_s)
        elif not held.finished:
            takeover.note(held.group_id, Fate.UNASKED, self._book.now_s)

    def _revive(self, worker: Worker, *, says_holds: bool = False) -> None:
        """It is told to stop what others took over, unless what it holds is said, and claimed."""
        worker.state = WorkerState.LIVE
        self._book.num["workers_revived"] += 1
        for group_id in worker.lost_groups:
            group = self._book.groups.get(group_id)
            if group:
                suspects.absolve(group, worker.life)
            if group and group.last_worker_id == worker.worker_id:
                self._deals.recognise(worker, group)
                self._deals.look_again(group, 0)
            elif not says_holds:
                why = f"attempt {group.attempt} is elsewhere" if group else "it has ended"
                self._book.send(worker.route, CancelRun(group_id, why))
        worker.lost_groups.clear()
        self._deals.stir_worker(worker)

    def _lose(self, worker: Worker, why: str) -> None:
        """It is dead to us for now: its groups run elsewhere, as one attempt more."""
        self._count_loss(worker)
        worker.state = WorkerState.LOST
        for group in list(worker.groups.values()):
            worker.lost_groups[group.group_id] = None
            suspects.blame(group, worker, why, self._book.now_s, is_certain=False)
            self._leave(group, f"{worker.worker_id} {why}")
        self.workers.rank(worker)

    def _replace(self, worker: Worker, life: Life) -> None:
        # On another host the earlier one may go on, unheard: then it was no task that ended it.
        is_certain = life.host == worker.life.host
        self._bury(worker, "its process was replaced", is_certain=is_certain)

    def _bury(self, worker: Worker, cause: str, *, is_certain: bool = True) -> None:
        """Its process has ended: what it ran, runs elsewhere, unless that killed it."""
        self._count_loss(worker)
        worker.state = WorkerState.LOST
        had = (*worker.lost_groups, *worker.groups)
        self._ends.add(worker.life, had, self._book.now_s)
        for group in self._open_ones(had):
            suspects.blame(group, worker, cause, self._book.now_s, is_certain=is_certain)
            if group.worker_id == worker.worker_id:
                self._leave(group, f"{worker.worker_id}: {cause}")
            else:
                self._judge(group)
        self.workers.remove(worker)

    def _judge(self, group: Group) -> None:
        if culprit := suspects.verdict(group):
            self._book.num["quarantined"] += 1
            self._deals.fail(group, culprit)

    def _open_ones(self, group_ids: Iterable[GroupId]) -> list[Group]:
        groups = self._book.groups
        return [groups[group_id] for group_id in group_ids if group_id in groups]

    def _leave(self, group: Group, why: str) -> None:
        if group.client_id:
            self._deals.requeue(group, why)
        else:
            self._deals.forget(group)

    def _count_loss(self, worker: Worker) -> None:
        if worker.state is WorkerState.LIVE:
            self._book.num["workers_lost"] += 1

    def _say_drain(self, worker: Worker) -> None:
        worker.say_drain_s = self._book.now_s + SAY_DRAIN_BEATS * self._beat_s
        if worker.beat is None or worker.beat.state in ("serving", WORN):
            self._book.send(worker.route, DrainWorker(worker.drain_reason))
