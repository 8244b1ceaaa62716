"""What is simulated: a fleet, the pipelines that come to it, and what a switch costs.

Owns the trace file, JSON of the struct Trace. Lengths of rollouts stand in it one by one (a trace
that was measured) or as the shape that they are drawn from, by the seed of the trace, the pipeline
and the step alone: every policy is asked the same. Invariant: frozen. Driven by world.py; written
by hand, by workload.py or from what was measured.

    a step  ask for generation > a worker is awake > rollouts > their end > each phase > next step
"""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a rollout takes on a worker, lognormal and cut at a cap, as contexts are."""

    median_s: float
    sigma: float
    """Standard deviation of the log."""
    cap_s: float


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows the rollouts in a step."""

    cluster: str
    """Whose GPUs it needs all of; "": none, as scoring or a checkpoint."""
    seconds: float
    priority: int = GpuPriority.ACTOR_TRAINING


class TracePipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant; the first fields are those of PipelineSpec."""

    pipeline_id: str
    clusters: dict[str, tuple[int, ...]]
    generation: tuple[int, ...]
    tp: int = 1
    weight: float = 1.0
    max_gpus: int = 0
    min_gpus: int = 0
    is_preemptible: bool = True
    rollouts_per_worker: int = 1
    """That run at the same time; the next waits for the end of one."""
    arrival_s: float = 0.0
    num_steps: int = 1
    rollouts_per_step: int = 0
    lengths: Lengths | None = None
    rollouts_s: tuple[tuple[float, ...], ...] = ()
    """By step, the seconds of each rollout, in place of the three fields above."""
    phases: tuple[Phase, ...] = ()

    @property
    def steps(self) -> int:
        """How many it takes until it leaves."""
        return len(self.rollouts_s) or self.num_steps

    @property
    def slot_gpus(self) -> float:
        """What a rollout has of a worker's GPUs."""
        return self.tp / self.rollouts_per_worker

    @property
    def fixed_gpu_s(self) -> float:
        """GPU seconds of a step's phases."""
        return sum(len(self.clusters.get(each.cluster, ())) * each.seconds for each in self.phases)

    def spec(self) -> PipelineSpec:
        """As it is registered."""
        names = PipelineSpec.__struct_fields__
        return PipelineSpec(**{name: getattr(self, name) for name in names})


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In seconds; the defaults add up to the 16 to 30 s that were seen at the borders of phases in
    the one public log of such a system."""

    sleep_s: float = 5.0
    """From the word until a worker's GPUs are clear."""
    wake_s: float = 15.0
    """From clear GPUs until the worker serves: memory, weights, probe."""
    reprefill_s: float = 3.0
    """What an evicted rollout pays when it goes on elsewhere."""
    kv_tokens_per_s: float = 50.0
    """That a running rollout adds to what its worker's sleep would lose."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    name: str
    nodes: tuple[int, ...]
    """GPUs of each; they are numbered through."""
    pipelines: tuple[TracePipeline, ...]
    costs: Costs = Costs()
    seed: int = 0

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)

    def work_gpu_s(self, pipeline: TracePipeline, num_steps: int) -> float:
        """GPU seconds of its first steps where every worker is full and none is ever woken."""
        rollouts_s = sum(sum(self.rollouts(pipeline, step)) for step in range(num_steps))
        return rollouts_s * pipeline.slot_gpus + num_steps * pipeline.fixed_gpu_s

    def rollouts(self, pipeline: TracePipeline, step: int) -> tuple[float, ...]:
        """Seconds of each rollout of the step."""
        if pipeline.rollouts_s:
            return pipeline.rollouts_s[step]
        lengths = pipeline.lengths
        assert lengths is not None
        chance = random.Random(f"{self.seed}/{pipeline.pipeline_id}/{step}")
        return tuple(_draw(chance, lengths) for _ in range(pipeline.rollouts_per_step))


def read(path: Path) -> Trace:
    """The trace of a file; UserError names what is wrong with it."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=Trace)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is not a trace: {error}") from None
    for fault in _faults(trace):
        raise UserError(f"{path}: {fault}")
    return trace


def _draw(chance: random.Random, lengths: Lengths) -> float:
    seconds = lengths.median_s * chance.lognormvariate(0.0, lengths.sigma)
    return min(lengths.cap_s, seconds)


def _faults(trace: Trace) -> Iterator[str]:
    names = [each.pipeline_id for each in trace.pipelines]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two pipelines are called {name}"
    for each in trace.pipelines:
        yield from (f"pipeline {each.pipeline_id}: {fault}" for fault in _misfits(each, trace))


def _misfits(pipeline: TracePipeline, trace: Trace) -> Iterator[str]:
    used = {*pipeline.generation, *(gpu for gpus in pipeline.clusters.values() for gpu in gpus)}
    if outside := sorted(gpu for gpu in used if not 0 <= gpu < trace.num_gpus):
        yield f"GPU {outside[0]} is not among the fleet's {trace.num_gpus}"
    if pipeline.tp < 1 or not pipeline.generation or len(pipeline.generation) % pipeline.tp:
        yield f"{len(pipeline.generation)} GPUs of generation are no workers of tp = {pipeline.tp}"
    if pipeline.lengths is None and not pipeline.rollouts_s:
        yield "give `lengths` and `rollouts_per_step`, or `rollouts_s`"
    if pipeline.rollouts_per_worker < 1:
        yield "`rollouts_per_worker` must be at least 1"
    for phase in pipeline.phases:
        if phase.cluster and phase.cluster not in pipeline.clusters:
            yield f"a phase needs the cluster {phase.cluster}, which `clusters` does not have"
