"""What a plan is made of, and what each op does to the state.

Owns the four ops. Invariants: an op is applied to a state in which it holds (invariants.py proves
it first); a Shrink names for whom, and that one's Expand or Grant stands in the same plan: nobody
is evicted for nothing. Driven by the planner's draft, by the service's machine and by the
simulator.
"""

import enum

import msgspec

from rollmesh.scheduler.planning.state import FIXED, Hold, Owner, State
from rollmesh.scheduler.planning.water import Water
from rollmesh.wire.scheduling import WorkerPhase


class ShrinkReason(enum.StrEnum):
    """Why a worker goes to sleep though nobody wants its GPUs."""

    RELEASE = "release"
    """Its pipeline has given generation up."""
    DRAIN = "drain"
    """Its node takes leave."""
    LEAVE = "leave"
    """Its pipeline does."""
    QUOTA = "quota"
    """Its pipeline has more than `max_gpus`."""


class Shrink(msgspec.Struct, frozen=True):
    """Put a generation worker to sleep."""

    pipeline_id: str
    rank: int
    for_: str
    """Why: the key of the request or `pipeline/rank` of the worker that gets its GPUs; or a
    ShrinkReason."""


class Expand(msgspec.Struct, frozen=True):
    """Wake a generation worker, once its GPUs are clear."""

    pipeline_id: str
    rank: int


class Grant(msgspec.Struct, frozen=True):
    """Give a fixed cluster what it asked for, once it is clear."""

    key: str


class Release(msgspec.Struct, frozen=True):
    """Take back what a fixed cluster has given up."""

    pipeline_id: str
    cluster: str


Op = Shrink | Expand | Grant | Release


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done now."""

    ops: tuple[Op, ...] = ()
    """In an order in which they can be applied: releases, shrinks, grants, expands."""
    credits: dict[str, float] = {}
    """By pipeline, its `credit_gpu_s` at `now_s`."""
    again_s: float = float("inf")
    """When time alone may change the plan: the end of a slice, of a hold, of a reservation."""
    water: Water | None = None
    """What `State.water` is to be."""


def worker_name(pipeline_id: str, rank: int) -> str:
    """What Shrink.for_ calls a worker."""
    return f"{pipeline_id}/{rank}"


def apply(state: State, op: Op) -> None:
    """Do to the state what the op says; a Release is no longer in `releasing` then."""
    match op:
        case Shrink(pipeline_id, rank, _):
            state.move_worker(pipeline_id, rank, WorkerPhase.SLEEPING)
        case Expand(pipeline_id, rank):
            state.move_worker(pipeline_id, rank, WorkerPhase.WAKING)
        case Grant(key):
            request = state.requests.pop(key)
            pipeline = state.pipelines[request.pipeline_id]
            pipeline.holds[request.cluster] = Hold(
                key=key, cluster=request.cluster, priority=request.priority, since_s=state.now_s
            )
            owner = Owner(request.pipeline_id, request.cluster, FIXED)
            state.owners.update(dict.fromkeys(state.gpus_of(request), owner))
        case Release(pipeline_id, cluster):
            pipeline = state.pipelines[pipeline_id]
            del pipeline.holds[cluster]
            pipeline.releasing.pop(cluster, None)
            for gpu in pipeline.spec.clusters[cluster]:
                del state.owners[gpu]
