"""Why an ask can never be granted, in one line that says what to do.

Owns nothing. Invariants: pure; a release is refused only where nothing could ever be held. Driven
by tickets.py.
"""

from rollmesh.scheduler.planning.plan import ShrinkReason
from rollmesh.scheduler.planning.state import PipelinePhase, PipelineState
from rollmesh.scheduler.service.book import Book
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
)

Request = RequestGpus | NotifyReleaseThenRequestGpus
Ask = Request | NotifyReleaseGpus
_RESERVED = frozenset(map(str, ShrinkReason))
"""A plan names by a key for whom a worker sleeps, or by one of these."""


def refusal(book: Book, ask: Ask) -> str:
    """'' where there is nothing against it."""
    if not ask.key or ask.key in _RESERVED:
        return f"{ask.key!r} is no key; name the ask by its pipeline, cluster and number"
    pipeline = book.state.pipelines.get(ask.pipeline_id)
    if pipeline is None:
        return f"no pipeline {ask.pipeline_id!r} is registered; register and admit it first"
    if pipeline.phase is PipelinePhase.REGISTERED:
        return f"{ask.pipeline_id} is registered and not admitted; admit it first"
    released = getattr(ask, "release_cluster", ask.cluster)
    for cluster in (ask.cluster, released):
        if cluster != GENERATION_CLUSTER and cluster not in pipeline.spec.clusters:
            names = ", ".join([*pipeline.spec.clusters, GENERATION_CLUSTER])
            return f"{ask.pipeline_id} has no cluster {cluster!r}; it has {names}"
    if isinstance(ask, NotifyReleaseGpus):
        return ""
    if pipeline.phase is PipelinePhase.LEAVING:
        return f"{ask.pipeline_id} is leaving"
    return _mismatch(book, pipeline, ask)


def _mismatch(book: Book, pipeline: PipelineState, ask: Request) -> str:
    is_generation = ask.cluster == GENERATION_CLUSTER
    if is_generation != (ask.priority == GpuPriority.GENERATION) or ask.priority < 0:
        return (
            f"{ask.cluster} cannot be asked for with priority {ask.priority}: "
            f"{int(GpuPriority.GENERATION)} is {GENERATION_CLUSTER}'s, and that alone is its"
        )
    if ask.priority > GpuPriority.GENERATION:
        return f"there is no priority {ask.priority}; the last is {int(GpuPriority.GENERATION)}"
    if is_generation and not pipeline.workers:
        return f"{pipeline.pipeline_id} has no engines; register it with GPUs of generation"
    if is_generation and not book.tenants[pipeline.pipeline_id].is_wired:
        return (
            f"the hooks of {pipeline.pipeline_id} are not wired, so nobody would report its "
            "progress; make its PipelineHooks before it generates"
        )
    return ""
