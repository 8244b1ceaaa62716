"""Durable demand: which pipelines want to generate, and how much is left of it.

    demand   opened by an ask for generation; closed by a release, when all streams of its progress
             are retired, or with its pipeline
    stream   reported -> retired -> forgotten with its demand

What it does when its demand has ended tells when it will ask again (planning/habits.py).
Invariants: progress corrects a demand's estimate, is never added to it, and never opens one; a
batch that began before the demand did is no news of it, so that what comes late closes nothing;
a plan is wanted where a demand opens, closes, or has got on by a bucket of 2 %, and of the last no
more often than `progress_plan_s`. Driven by tickets.py and scheduler.py.
"""

import math

from rollmesh.scheduler.planning.state import Demand, PipelineState, StreamProgress
from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.records import Wish
from rollmesh.wire.scheduling import ClearProgress, ReportProgress

NUM_BUCKETS = 50


class Demands:
    """See the module."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._first_look_s: float | None = None
        """When this process of the scheduler first looked for stalls."""

    def open(self, pipeline: PipelineState, key: str, estimate: int, step: int) -> None:
        """It asks: of another rollout than before, what was reported so far is old."""
        book, name = self._book, pipeline.pipeline_id
        wish = book.wishes.setdefault(name, Wish(pipeline_id=name))
        is_same = pipeline.demand is not None and step >= 0 and step == wish.step
        if not is_same:
            self._retire(pipeline, wish)
            pipeline.demand = Demand(key=key, estimate=max(0, estimate), opened_s=book.now_s)
            wish.demand, wish.step = pipeline.demand, step
            pipeline.demand_history = wish.demand_history
            wish.demand_history.note_requested(max(0, estimate), book.now_s)
            book.links[name].progressed_s = book.now_s
            book.links[name].is_stalled = False
        self._changed(pipeline)

    def close(self, pipeline: PipelineState) -> None:
        """It wants no more; what is said of it from now on is old. Who gave it up, or is dead, is
        not expected to ask again."""
        wish = self._book.wishes.get(pipeline.pipeline_id)
        if pipeline.demand_history.marks:
            pipeline.demand_history.reset()
            self._book.mark("demands", pipeline.pipeline_id)
        if pipeline.demand is None or wish is None:
            return
        self._retire(pipeline, wish)
        pipeline.demand = wish.demand = None
        self._changed(pipeline)

    def note_grant(self, pipeline: PipelineState, cluster: str) -> None:
        """A phase begins, after which it will ask again."""
        priority = pipeline.holds[cluster].priority
        if pipeline.demand_history.marks:
            pipeline.demand_history.note_granted(cluster, priority, self._book.now_s)
            self._book.mark("demands", pipeline.pipeline_id)
            self._book.wants_plan = True

    def on_report(self, report: ReportProgress) -> None:
        """How far a stream is."""
        pipeline = self._wanting(report)
        if pipeline is None:
            return
        book, known = self._book, pipeline.progress.get(report.stream)
        if known and known.batch == report.batch:
            if known.is_retired or report.completed < known.completed:
                return  # said before what we know
            if (known.target, known.completed) == (report.target, report.completed):
                return
        completed = max(0, report.completed)
        pipeline.progress[report.stream] = StreamProgress(
            batch=report.batch, target=max(0, report.target), completed=completed
        )
        book.mark("progress", pipeline.pipeline_id, report.stream)
        link = book.links[pipeline.pipeline_id]
        link.progressed_s, link.is_stalled = book.now_s, False
        self._corrected(pipeline)

    def on_clear(self, clear: ClearProgress) -> bool:
        """A stream is retired; whether that closed the demand."""
        pipeline = self._wanting(clear)
        if pipeline is None:
            return False
        known = pipeline.progress.get(clear.stream)
        progress = StreamProgress(batch=clear.batch, target=0, completed=0, is_retired=True)
        if known and known.batch == clear.batch:
            progress.target, progress.completed = known.target, known.completed
        pipeline.progress[clear.stream] = progress
        self._book.mark("progress", pipeline.pipeline_id, clear.stream)
        if all(each.is_retired for each in pipeline.progress.values()):
            self.close(pipeline)
            pipeline.demand_history.note_ended(self._book.now_s)
            return True
        self._corrected(pipeline)
        return False

    def newest_batch(self, pipeline_id: str) -> int:
        """What is not above it may be taken for old; 0 where nothing is known."""
        pipeline = self._book.state.pipelines.get(pipeline_id)
        wish = self._book.wishes.get(pipeline_id)
        known = [each.batch for each in pipeline.progress.values()] if pipeline else []
        floors: list[int] = [*wish.floors.values()] if wish else []
        return max([0, *known, *floors])

    def tell_stalled(self, holders: str, pipeline: PipelineState) -> None:
        """Log once that its rollouts make no progress, and which clusters hold its GPUs."""
        link = self._book.links[pipeline.pipeline_id]
        link.is_stalled = True
        still_s = self._still_s(pipeline)
        lacks = "progress" if pipeline.progress else "first batch"
        self._book.note(
            "rollout.stalled",
            pipeline.pipeline_id,
            f"no {lacks} for {still_s:.0f} s; its GPUs: {holders or 'held by none'}",
        )

    def is_stalled(self, pipeline: PipelineState) -> bool:
        """Whether a demand has made no progress for `stall_s`, or begun no batch, and that is not
        logged yet."""
        link = self._book.links[pipeline.pipeline_id]
        if pipeline.demand is None or link.is_stalled:
            return False
        return self._still_s(pipeline) >= self._book.settings.stall_s and pipeline.remaining != 0

    def _still_s(self, pipeline: PipelineState) -> float:
        """Seconds since the last progress; those before this process looked first do not count."""
        now_s = self._book.now_s
        if self._first_look_s is None:
            self._first_look_s = now_s
        return now_s - max(self._first_look_s, self._book.links[pipeline.pipeline_id].progressed_s)

    def _wanting(self, said: ReportProgress | ClearProgress) -> PipelineState | None:
        """The pipeline, if this is news of its demand."""
        pipeline = self._book.state.pipelines.get(said.pipeline_id)
        if pipeline is None or pipeline.demand is None:
            return None
        floors = self._book.wishes[said.pipeline_id].floors
        known = pipeline.progress.get(said.stream)
        is_old = said.batch <= floors.get(said.stream, -1)
        return None if is_old or (known and said.batch < known.batch) else pipeline

    def _retire(self, pipeline: PipelineState, wish: Wish) -> None:
        """All that was reported is of a demand before."""
        name = pipeline.pipeline_id
        for stream, progress in pipeline.progress.items():
            wish.floors[stream] = max(progress.batch, wish.floors.get(stream, -1))
            self._book.mark("progress", name, stream)
        pipeline.progress.clear()

    def _changed(self, pipeline: PipelineState) -> None:
        self._book.state.update_waiting(pipeline)
        self._book.mark("demands", pipeline.pipeline_id)
        self._book.mark("pipelines", pipeline.pipeline_id)
        self._book.wants_plan = True

    def _corrected(self, pipeline: PipelineState) -> None:
        """Perhaps a plan, but not at once: reports come often."""
        book, link = self._book, self._book.links[pipeline.pipeline_id]
        bucket = _bucket(pipeline)
        if bucket != link.bucket:
            link.bucket = bucket
            due_s = book.planned_s + book.settings.progress_plan_s
            book.again_s = min(book.again_s, max(book.now_s, due_s))


def _bucket(pipeline: PipelineState) -> int:
    """The part that is left, in steps of 2 %; 0 only if nothing is."""
    target = sum(each.target for each in pipeline.progress.values())
    remaining = sum(each.remaining for each in pipeline.progress.values())
    return math.ceil(NUM_BUCKETS * remaining / max(1, target))
