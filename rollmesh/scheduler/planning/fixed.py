"""Who waits for a fixed cluster: all of its GPUs or none, and nobody is evicted for nothing.

The line: those that have waited for `reserve_after_s`, as they came; then the others by priority,
and as they came. What stands on a GPU that is asked for:

    nobody, or one that goes to sleep      free
    a generation worker that is awake      gives way, if its pipeline is preemptible or the asker's
    one that wakes                         will be awake soon: settling
    a hold, another's worker for keeps, one that is lost or in quarantine      in the way

A request with nothing in the way is granted now, or, while something settles, next: until then
nothing else starts on its GPUs. One with something in the way may be bypassed until it has waited
for `reserve_after_s`. From then on, once no older one has reserved any of them, its GPUs are
reserved: no other request and no worker that will not give way gets one, but of pipelines that it
waits for, which may need it to come to their end.
Of those that wait for each other, at whatever remove, nobody keeps workers from another: the first
of the line has what it asks for, and comes to its end.
A request whose end is not in sight is in nobody's way: one that waits for a node that is not UP,
for what is lost or in quarantine, or, at whatever remove, for its own pipeline.

Bound: once reserved, a request is granted in the first cycle after the last of these has ended:
what stood on its GPUs by then, the older requests of the line that overlap it, and what pipelines
that hold GPUs of it ask for while they hold them; and then one wake has come to rest.

Invariant: a shrink for a request stands in a plan only with its grant. Driven by plan.py.
"""

import math

from rollmesh.scheduler.planning.draft import Draft, Reservation
from rollmesh.scheduler.planning.state import FIXED, Owner, PipelinePhase, Request, State
from rollmesh.wire.scheduling import WorkerPhase

Asked = dict[str, list[Request]]
"""Requests by pipeline."""


def serve(draft: Draft, reserve_after_s: float) -> float:
    """Grant what can be, reserve what must be; when age alone changes the line."""
    again_s, asked = math.inf, _by_pipeline(draft.state)
    for request in _line(draft, reserve_after_s):
        is_free = _may_start(draft, request)
        if is_free and (_grant(draft, request) or _break_circle(draft, request, asked)):
            continue
        reserve_s = request.asked_s + reserve_after_s
        is_old = reserve_s <= draft.state.now_s
        if not is_old:
            again_s = min(again_s, reserve_s)
        if is_free:
            _reserve(draft, request, is_old, asked)
    return again_s


def _line(draft: Draft, reserve_after_s: float) -> list[Request]:
    """The requests that can be granted at all, as they are served."""
    state = draft.state

    def place(request: Request) -> tuple[bool, int, int]:
        is_young = state.now_s < request.asked_s + reserve_after_s
        return is_young, request.priority if is_young else 0, request.seq

    return sorted((each for each in state.requests.values() if _is_ready(draft, each)), key=place)


def _is_ready(draft: Draft, request: Request) -> bool:
    """Whether its pipeline is admitted, and its nodes take work."""
    if draft.state.pipelines[request.pipeline_id].phase is not PipelinePhase.ADMITTED:
        return False
    return draft.up.issuperset(draft.state.gpus_of(request))


def _may_start(draft: Draft, request: Request) -> bool:
    """Whether no reservation keeps it off, of those before it in the line."""
    gpus = draft.reserved.keys() & draft.state.gpus_of(request)
    return all(draft.may_start(request.pipeline_id, gpu, gives_way=False) for gpu in gpus)


def _break_circle(draft: Draft, request: Request, asked: Asked) -> bool:
    """Grant it though workers are kept from it, if all of those wait for its pipeline."""
    name = request.pipeline_id
    kept = _in_the_way(draft, request)
    waits = [each.rank != FIXED and name in _awaited(draft, {each}, asked) for each in kept]
    return any(waits) and all(waits) and _grant(draft, request, frozenset(kept))


def _grant(draft: Draft, request: Request, kept: frozenset[Owner] = frozenset()) -> bool:
    """If nobody is in its way but these, which give way as to their own pipeline."""
    mark = draft.mark()
    for gpu in draft.state.gpus_of(request):
        owner = draft.owner(gpu)
        if owner is None:
            continue
        to = owner.pipeline_id if owner in kept else request.pipeline_id
        worker = draft.state.worker_of(owner)
        if worker is None or not draft.can_evict(owner.pipeline_id, worker, to):
            draft.rollback(mark)
            return False
        draft.shrink(owner.pipeline_id, worker, request.key)
    draft.grant(request.key)
    return True


def _reserve(draft: Draft, request: Request, is_old: bool, asked: Asked) -> None:
    gpus, in_the_way = draft.state.gpus_of(request), _in_the_way(draft, request)
    if not in_the_way:
        draft.reserve(gpus, Reservation(request.key, is_settling=True))
    elif is_old:
        awaited = _awaited(draft, in_the_way, asked)
        if awaited and request.pipeline_id not in awaited:
            reservation = Reservation(request.key, is_settling=False, awaited=awaited)
            draft.reserve(gpus, reservation)


def _in_the_way(draft: Draft, request: Request) -> set[Owner]:
    """Of its GPUs, the owners that will not give way by themselves."""
    owners = {draft.owner(gpu) for gpu in draft.state.gpus_of(request)}
    return {each for each in owners if each and not _gives_way(draft, each, request.pipeline_id)}


def _gives_way(draft: Draft, owner: Owner, to: str) -> bool:
    """Whether it does now, or will once it has come to rest."""
    is_worker = owner.rank != FIXED and not _is_endless(draft.state, owner)
    return is_worker and draft.state.gives_way(owner.pipeline_id, to)


def _is_endless(state: State, owner: Owner) -> bool:
    """Whether nobody knows if it will ever come to its end."""
    worker = state.worker_of(owner)
    is_lost = worker is not None and worker.phase is WorkerPhase.LOST
    return is_lost or state.pipelines[owner.pipeline_id].phase is PipelinePhase.QUARANTINED


def _awaited(draft: Draft, in_the_way: set[Owner], asked: Asked) -> frozenset[str]:
    """The pipelines of these, and all for whose GPUs these wait themselves; none where one of them
    has no end in sight."""
    found: set[str] = set()
    unseen = list(in_the_way)
    while unseen:
        owner = unseen.pop()
        if _is_endless(draft.state, owner):
            return frozenset()
        if owner.pipeline_id in found:
            continue
        found.add(owner.pipeline_id)
        for request in asked.get(owner.pipeline_id, []):
            if not _is_ready(draft, request):
                return frozenset()
            unseen += _in_the_way(draft, request)
    return frozenset(found)


def _by_pipeline(state: State) -> Asked:
    asked: Asked = {}
    for request in state.requests.values():
        asked.setdefault(request.pipeline_id, []).append(request)
    return asked
