"""A fake fleet that answers the admission server as the service does.

It reports itself as explain's view in JSON, and keeps registrations by key.
"""

import msgspec

from rollmesh.scheduler.admission.transport import AdmissionAnswer, SchedulerQuestion
from rollmesh.scheduler.planning.state import FleetState, GpuNode, PipelinePhase
from rollmesh.scheduler.service.explain import ExplainContext, explain_fleet
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    KillPipeline,
    ReadScheduler,
    RegisterPipeline,
    RunClaim,
    UnregisterPipeline,
)


class Fleet:
    """Two nodes of four GPUs."""

    def __init__(self) -> None:
        self.state = FleetState()
        self.state.add_node(GpuNode(name="a", gpus=(0, 1, 2, 3), labels=("h200",)))
        self.state.add_node(GpuNode(name="b", gpus=(4, 5, 6, 7), labels=("l40",)))
        self.asked: list[SchedulerQuestion] = []
        self.runs: dict[str, RunClaim] = {}
        """By pipeline, the run that claimed its name."""

    def ask(self, question: SchedulerQuestion, patience_s: float = 1.0) -> AdmissionAnswer:
        self.asked.append(question)
        assert patience_s > 0
        match question:
            case ReadScheduler():
                return AdmissionAnswer(
                    ok=True,
                    body=msgspec.json.encode(
                        explain_fleet(self.state, ExplainContext(runs=self.runs))
                    ),
                )
            case RegisterPipeline(_, spec):
                if spec.pipeline_id not in self.state.pipelines:
                    self.state.add_pipeline(spec)
            case AdmitPipeline(_, pipeline_id):
                if pipeline_id not in self.state.pipelines:
                    return AdmissionAnswer(ok=False, error=f"no pipeline {pipeline_id!r}")
                self.state.pipelines[pipeline_id].phase = PipelinePhase.ADMITTED
            case KillPipeline(_, pipeline_id) | UnregisterPipeline(_, pipeline_id):
                self.state.pipelines.pop(pipeline_id, None)
        return AdmissionAnswer(ok=True)
