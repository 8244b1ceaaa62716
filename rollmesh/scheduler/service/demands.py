"""Durable demand: which pipelines want to generate, and how much is left.

    demand   opened by a request for generation; closed by a release, when all streams of its
             progress are retired, or with its pipeline
    stream   reported -> retired -> removed with its demand

- Progress replaces a demand's estimate, is never added to it, and never opens a demand.
- A batch that began before the demand is ignored, so that late messages close nothing.
- A plan is requested when a demand opens, closes or progresses by a bucket of 2 %, the latter at
  most every `progress_plan_s`.
"""

import math

from rollmesh.scheduler.planning.state import Demand, PipelineState, StreamProgress
from rollmesh.scheduler.service.state import DemandRecord, SchedulerState
from rollmesh.wire.scheduling import ClearProgress, ReportProgress

NUM_BUCKETS = 50


class DemandTracker:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._first_look_s: float | None = None
        """When this process first checked for stalls."""

    def open(self, pipeline: PipelineState, key: str, estimate: int, step: int) -> None:
        """Open a demand; for another step than before, earlier progress is stale."""
        state, name = self._state, pipeline.pipeline_id
        record = state.demand_records.setdefault(name, DemandRecord(pipeline_id=name))
        is_same = pipeline.demand is not None and step >= 0 and step == record.step
        if not is_same:
            self._retire(pipeline, record)
            pipeline.demand = Demand(key=key, estimate=max(0, estimate), opened_s=state.now_s)
            record.demand, record.step = pipeline.demand, step
            pipeline.demand_history = record.demand_history
            record.demand_history.note_requested(max(0, estimate), state.now_s)
            state.links[name].progressed_s = state.now_s
            state.links[name].is_stalled = False
        self._changed(pipeline)

    def close(self, pipeline: PipelineState) -> None:
        """Close the demand; later reports of it are stale. A pipeline that released or died is not
        expected to request again."""
        record = self._state.demand_records.get(pipeline.pipeline_id)
        if pipeline.demand_history.marks:
            pipeline.demand_history.reset()
            self._state.mark("demands", pipeline.pipeline_id)
        if pipeline.demand is None or record is None:
            return
        self._retire(pipeline, record)
        pipeline.demand = record.demand = None
        self._changed(pipeline)

    def note_grant(self, pipeline: PipelineState, cluster: str) -> None:
        """Record in the demand history that a phase begins."""
        priority = pipeline.holds[cluster].priority
        if pipeline.demand_history.marks:
            pipeline.demand_history.note_granted(cluster, priority, self._state.now_s)
            self._state.mark("demands", pipeline.pipeline_id)
            self._state.wants_plan = True

    def on_report(self, report: ReportProgress) -> None:
        """Update the progress of a stream."""
        pipeline = self._wanting(report)
        if pipeline is None:
            return
        state, known = self._state, pipeline.progress.get(report.stream)
        if known and known.batch == report.batch:
            if known.is_retired or report.completed < known.completed:
                return  # older than what is known
            if (known.target, known.completed) == (report.target, report.completed):
                return
        completed = max(0, report.completed)
        pipeline.progress[report.stream] = StreamProgress(
            batch=report.batch, target=max(0, report.target), completed=completed
        )
        state.mark("progress", pipeline.pipeline_id, report.stream)
        link = state.links[pipeline.pipeline_id]
        link.progressed_s, link.is_stalled = state.now_s, False
        self._corrected(pipeline)

    def on_clear(self, clear: ClearProgress) -> bool:
        """Retire a stream; return whether that closed the demand."""
        pipeline = self._wanting(clear)
        if pipeline is None:
            return False
        known = pipeline.progress.get(clear.stream)
        progress = StreamProgress(batch=clear.batch, target=0, completed=0, is_retired=True)
        if known and known.batch == clear.batch:
            progress.target, progress.completed = known.target, known.completed
        pipeline.progress[clear.stream] = progress
        self._state.mark("progress", pipeline.pipeline_id, clear.stream)
        if all(each.is_retired for each in pipeline.progress.values()):
            self.close(pipeline)
            pipeline.demand_history.note_ended(self._state.now_s)
            return True
        self._corrected(pipeline)
        return False

    def newest_batch(self, pipeline_id: str) -> int:
        """Batches up to this may be considered old; 0 if nothing is known."""
        pipeline = self._state.fleet.pipelines.get(pipeline_id)
        record = self._state.demand_records.get(pipeline_id)
        known = [each.batch for each in pipeline.progress.values()] if pipeline else []
        floors: list[int] = [*record.floors.values()] if record else []
        return max([0, *known, *floors])

    def log_stalled(self, holders: str, pipeline: PipelineState) -> None:
        """Log once that its rollouts make no progress, and which clusters hold its GPUs."""
        link = self._state.links[pipeline.pipeline_id]
        link.is_stalled = True
        still_s = self._still_s(pipeline)
        lacks = "progress" if pipeline.progress else "first batch"
        self._state.log(
            "rollout.stalled",
            pipeline.pipeline_id,
            f"no {lacks} for {still_s:.0f} s; its GPUs: {holders or 'held by none'}",
        )

    def is_stalled(self, pipeline: PipelineState) -> bool:
        """Whether a demand has made no progress for `stall_s`, or begun no batch, and that is not
        logged yet."""
        link = self._state.links[pipeline.pipeline_id]
        if pipeline.demand is None or link.is_stalled:
            return False
        return self._still_s(pipeline) >= self._state.settings.stall_s and pipeline.remaining != 0

    def _still_s(self, pipeline: PipelineState) -> float:
        """Seconds since the last progress; those before this process looked first do not count."""
        now_s = self._state.now_s
        if self._first_look_s is None:
            self._first_look_s = now_s
        return now_s - max(self._first_look_s, self._state.links[pipeline.pipeline_id].progressed_s)

    def _wanting(self, report: ReportProgress | ClearProgress) -> PipelineState | None:
        """The pipeline, if the report belongs to its current demand."""
        pipeline = self._state.fleet.pipelines.get(report.pipeline_id)
        if pipeline is None or pipeline.demand is None:
            return None
        floors = self._state.demand_records[report.pipeline_id].floors
        known = pipeline.progress.get(report.stream)
        is_old = report.batch <= floors.get(report.stream, -1)
        return None if is_old or (known and report.batch < known.batch) else pipeline

    def _retire(self, pipeline: PipelineState, record: DemandRecord) -> None:
        """Mark all reported progress as of an earlier demand."""
        name = pipeline.pipeline_id
        for stream, progress in pipeline.progress.items():
            record.floors[stream] = max(progress.batch, record.floors.get(stream, -1))
            self._state.mark("progress", name, stream)
        pipeline.progress.clear()

    def _changed(self, pipeline: PipelineState) -> None:
        self._state.fleet.update_waiting(pipeline)
        self._state.mark("demands", pipeline.pipeline_id)
        self._state.mark("pipelines", pipeline.pipeline_id)
        self._state.wants_plan = True

    def _corrected(self, pipeline: PipelineState) -> None:
        """Schedule a plan if the remaining work changed by a bucket."""
        state, link = self._state, self._state.links[pipeline.pipeline_id]
        bucket = _bucket(pipeline)
        if bucket != link.bucket:
            link.bucket = bucket
            due_s = state.planned_s + state.settings.progress_plan_s
            state.again_s = min(state.again_s, max(state.now_s, due_s))


def _bucket(pipeline: PipelineState) -> int:
    """Remaining work in steps of 2 %; 0 only if none is left."""
    target = sum(each.target for each in pipeline.progress.values())
    remaining = sum(each.remaining for each in pipeline.progress.values())
    return math.ceil(NUM_BUCKETS * remaining / max(1, target))
