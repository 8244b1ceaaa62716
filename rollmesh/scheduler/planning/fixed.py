"""Who waits for a fixed cluster: all of its GPUs or none, and nobody is evicted for nothing.

The line: those that have waited for `reserve_after_s`, as they came; then the others by priority,
and as they came. What stands on a GPU that is asked for:

    nobody, or one that goes to sleep      free
    a generation worker that is awake      gives way, if its pipeline is preemptible or the asker's
    one that wakes                         will be awake soon: settling
    a hold, another's worker for keeps, one that is lost or in quarantine      in the way

A request with nothing in the way is granted now, or, while something settles, next: until then
nothing else starts on its GPUs. One with something in the way may be bypassed until it has waited
for `reserve_after_s`. From then on its GPUs are reserved: no other request and no worker that will
not give way gets one, but of pipelines that it waits for, which may need it to come to their end.

Bound: once reserved, a request is granted in the first cycle after the last of these has ended:
what stood on its GPUs by then, the older requests of the line that overlap it, and what pipelines
that hold GPUs of it ask for while they hold them; and then one wake has come to rest. A request on
a node that is not UP waits for the node, and stands in nobody's way.

Invariant: a shrink for a request stands in a plan only with its grant. Driven by plan.py.
"""

import math
from collections.abc import Iterator

from rollmesh.scheduler.planning.draft import Draft, Reservation
from rollmesh.scheduler.planning.state import (
    NodePhase,
    Owner,
    PipelinePhase,
    Request,
    State,
)
from rollmesh.wire.scheduling import WorkerPhase


def serve(draft: Draft, reserve_after_s: float) -> float:
    """Grant what can be, reserve what must be; when age alone changes the line."""
    again_s = math.inf
    for request in in_line(draft.state, reserve_after_s):
        if not _may_start(draft, request) or _grant(draft, request):
            continue
        reserve_s = request.asked_s + reserve_after_s
        is_reserved = reserve_s <= draft.state.now_s
        if not is_reserved:
            again_s = min(again_s, reserve_s)
        _reserve(draft, request, is_reserved)
    return again_s


def in_line(state: State, reserve_after_s: float) -> list[Request]:
    """The requests of admitted pipelines whose nodes are all UP, as they are served."""

    def place(request: Request) -> tuple[bool, int, int]:
        is_young = state.now_s < request.asked_s + reserve_after_s
        return is_young, request.priority if is_young else 0, request.seq

    return sorted((each for each in state.requests.values() if _is_ready(state, each)), key=place)


def _is_ready(state: State, request: Request) -> bool:
    if state.pipelines[request.pipeline_id].phase is not PipelinePhase.ADMITTED:
        return False
    nodes = (state.node_of.get(gpu) for gpu in state.gpus_of(request))
    return all(node and node.phase is NodePhase.UP for node in nodes)


def _may_start(draft: Draft, request: Request) -> bool:
    """Whether no reservation keeps it off, of those before it in the line."""
    gpus = draft.state.gpus_of(request)
    return all(draft.may_start(request.pipeline_id, gpu, gives_way=False) for gpu in gpus)


def _grant(draft: Draft, request: Request) -> bool:
    mark = draft.mark()
    for gpu in draft.state.gpus_of(request):
        owner = draft.owner(gpu)
        if owner is None:
            continue
        worker = draft.state.worker_of(owner)
        if worker is None or not draft.can_evict(owner.pipeline_id, worker, request.pipeline_id):
            draft.rollback(mark)
            return False
        draft.shrink(owner.pipeline_id, worker, request.key)
    draft.grant(request.key)
    return True


def _reserve(draft: Draft, request: Request, is_reserved: bool) -> None:
    in_the_way = {owner.pipeline_id for owner in _in_the_way(draft, request)}
    if not in_the_way:
        reservation = Reservation(request.key, is_settling=True)
    elif is_reserved:
        awaited = frozenset(_awaited(draft, in_the_way))
        reservation = Reservation(request.key, is_settling=False, awaited=awaited)
    else:
        return
    draft.reserve(draft.state.gpus_of(request), reservation)


def _in_the_way(draft: Draft, request: Request) -> Iterator[Owner]:
    """Of its GPUs, the owners whose end is not in sight."""
    for gpu in draft.state.gpus_of(request):
        owner = draft.owner(gpu)
        if owner and not _gives_way(draft, owner, request.pipeline_id):
            yield owner


def _gives_way(draft: Draft, owner: Owner, to: str) -> bool:
    """Whether it does now, or will once it has come to rest."""
    worker = draft.state.worker_of(owner)
    if worker is None:
        return False
    if draft.can_evict(owner.pipeline_id, worker, to):
        return True
    is_waking = worker.phase is WorkerPhase.WAKING
    return is_waking and draft.state.gives_way(owner.pipeline_id, to)


def _awaited(draft: Draft, pipeline_ids: set[str]) -> set[str]:
    """These, and all for whose GPUs these wait themselves."""
    asked: dict[str, list[Request]] = {}
    for request in draft.state.requests.values():
        asked.setdefault(request.pipeline_id, []).append(request)
    found, unseen = set(pipeline_ids), list(pipeline_ids)
    while unseen:
        for request in asked.get(unseen.pop(), []):
            owners = {owner.pipeline_id for owner in _in_the_way(draft, request)}
            unseen += owners - found
            found |= owners
    return found
