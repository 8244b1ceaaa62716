"""Which run has a pipeline's name, and what the scheduler does about one that is dead.

    a name   nobody's -> a run's -> nobody's, when it has ended or was killed
                         a run's -> the next run's, which has seen to it that the one before is dead

Invariants: a name is one run's at a time, in this life of the scheduler and the next; of two runs
that take it in the same moment, from nobody or from a dead one, one is refused; who comes too late
to give it back takes nothing from who has it now. Driven by tenants.py.
"""

import math

from rollmesh.scheduler.planning.state import PipelinePhase, PipelineState
from rollmesh.scheduler.service.book import Book, Link
from rollmesh.scheduler.service.coordinators import is_driven
from rollmesh.scheduler.service.demands import Demands
from rollmesh.scheduler.service.intents import Intents
from rollmesh.scheduler.service.tickets import Tickets
from rollmesh.wire.scheduling import ClaimPipeline

GOES_ON = "another run has that name and goes on"


class Runs:
    """See the module."""

    def __init__(self, book: Book, tickets: Tickets, demands: Demands, intents: Intents) -> None:
        self._book = book
        self._tickets = tickets
        self._demands = demands
        self._intents = intents

    def on_claim(self, ask: ClaimPipeline) -> str:
        """Why it is refused, or ''; the pipeline is known."""
        book, name = self._book, ask.pipeline_id
        pipeline, run = book.state.pipelines[name], book.tenants[name].run
        if ask.after != (run.run_id if run else ""):
            return GOES_ON if ask.run else ""  # one that ends has been seen to by somebody
        if ask.run and pipeline.phase in (PipelinePhase.REGISTERED, PipelinePhase.LEAVING):
            return f"{name} is {pipeline.phase}, and not admitted"
        if ask.run and run is None and is_driven(book, name):
            return GOES_ON
        if run is not None:
            self.bury(pipeline, "its run has ended", with_engines=run.owns_engines)
            if pipeline.phase is PipelinePhase.QUARANTINED and not book.tenants[name].why:
                pipeline.phase = PipelinePhase.ADMITTED
        book.tenants[name].run = ask.run
        book.mark("pipelines", name)
        return ""

    def refusal(self, name: str, run_id: str) -> str:
        """Why processes of that run are not to be ended, or ''; '' as `run_id` is no run."""
        run = self._book.tenants[name].run
        return "" if run_id == (run.run_id if run else "") else f"another run has the name {name}"

    def bury(self, pipeline: PipelineState, why: str, *, with_engines: bool = True) -> None:
        """No process of its run is left; nor an engine, unless they are somebody else's."""
        book, name = self._book, pipeline.pipeline_id
        tenant = book.tenants[name]
        self.strip(pipeline, why)
        if with_engines:
            self._intents.forget(name, why)
            tenant.why, tenant.num_faults, tenant.unsure = "", 0, []
        tenant.run, tenant.is_wired, tenant.told = None, False, []
        # What its coordinator still said comes late, and is not true any more.
        tenant.started_s = math.nextafter(tenant.started_s, math.inf)
        book.links[name] = Link(heard_s=book.now_s)
        book.mark("pipelines", name)

    def strip(self, pipeline: PipelineState, why: str, *, with_trainer: bool = True) -> None:
        """It asks for nothing any more; and has no fixed cluster, but for one on which its trainer
        may stand."""
        name, kept = pipeline.pipeline_id, set[str]()
        if not with_trainer:
            held = [each for each in pipeline.holds if not self._intents.is_promise(name, each)]
            kept = {each for each in held if self._tickets.is_taken(name, each)}
        self._demands.close(pipeline)
        self._tickets.refuse_all(name, f"{name}: {why}", kept)
        for cluster in pipeline.spec.clusters:
            if cluster not in kept:
                self._tickets.take_back(name, cluster)
        self._book.tenants[name].releasing = ""
        pipeline.releasing.clear()
