"""Traces: a fleet, the pipelines that arrive, and the cost of a switch; read from a file or
generated.

- A trace file is JSON of the struct Trace. Rollout lengths are listed (a measured trace) or drawn
  from a distribution by the seed of the trace, the pipeline and the step, so that every policy gets
  the same.
- A generated trace is a function of shape, number of pipelines and seed. Its parameters were fixed
  before any policy was tuned to them.

    a step  request generation > a worker is awake > rollouts > their end > each phase > next step

Sources and assumptions of the shapes:

    tails     lognormal, the longest of a thousand about ten medians, as the abstract of DARTS
              (arXiv 2605.30859) reports for reasoning and agents' rollouts; sigma 0.6 to 0.9 puts
              the 99th percentile at 4 to 8 medians, and the context limit cuts at 8
    a step    60 to 80 % of it is rollouts without sharing (a tutorial says about 70), the rest
              log-probs and training on the fixed set, and scoring without GPUs: assumed
    sets      each pipeline trains on a quarter or half of its block of the fleet, and generates
              on all GPUs, as in rlix's canonical topology
    sizes     steps of 128 to 512 rollouts, two long contexts at a time per GPU of a worker;
              pipelines arrive within half an hour and stay for 6 to 18 steps
    switches  20 s, see SwitchCosts

A step is never shorter than its longest rollout and its phases. In `even` all pipelines are alike
and always present, so there is little to gain. In `scarce` there are half as many engines as
pipelines, each on a whole node, so that some pipelines wait and no partition gives each a part.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution of rollout durations on a worker: lognormal, cut at a cap."""

    median_s: float
    sigma: float
    """Standard deviation of the log."""
    cap_s: float


class StepPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A phase after the rollouts of a step."""

    cluster: str
    """Cluster whose GPUs it needs; "": none, as for scoring or a checkpoint."""
    seconds: float
    priority: int = GpuPriority.ACTOR_TRAINING


class TracePipeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pipeline; the first fields are those of PipelineSpec."""

    pipeline_id: str
    clusters: dict[str, tuple[int, ...]]
    generation: tuple[int, ...]
    tp: int = 1
    weight: float = 1.0
    max_gpus: int = 0
    min_gpus: int = 0
    is_preemptible: bool = True
    rollouts_per_worker: int = 1
    """Concurrent rollouts of a worker."""
    arrival_s: float = 0.0
    num_steps: int = 1
    rollouts_per_step: int = 0
    lengths: Lengths | None = None
    rollouts_s: tuple[tuple[float, ...], ...] = ()
    """Seconds of each rollout by step, instead of the three fields above."""
    phases: tuple[StepPhase, ...] = ()

    @property
    def steps(self) -> int:
        """Steps until it leaves."""
        return len(self.rollouts_s) or self.num_steps

    @property
    def slot_gpus(self) -> float:
        """A rollout's fraction of its worker's GPUs."""
        return self.tp / self.rollouts_per_worker

    @property
    def fixed_gpu_s(self) -> float:
        """GPU seconds of a step's phases."""
        return sum(len(self.clusters.get(each.cluster, ())) * each.seconds for each in self.phases)

    def spec(self) -> PipelineSpec:
        """Its registration."""
        names = PipelineSpec.__struct_fields__
        return PipelineSpec(**{name: getattr(self, name) for name in names})


class SwitchCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs in seconds; the defaults add up to the 16 to 30 s seen between phases in the one public
    log of such a system."""

    sleep_s: float = 5.0
    """From the order until a worker's GPUs are clear."""
    wake_s: float = 15.0
    """From clear GPUs until the worker serves: memory, weights, probe."""
    reprefill_s: float = 3.0
    """Cost of an evicted rollout that continues elsewhere."""
    kv_tokens_per_s: float = 50.0
    """KV-cache tokens per second that a running rollout adds to its worker."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    nodes: tuple[int, ...]
    """GPUs per node, numbered consecutively."""
    pipelines: tuple[TracePipeline, ...]
    costs: SwitchCosts = SwitchCosts()
    seed: int = 0

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)

    def work_gpu_s(self, pipeline: TracePipeline, num_steps: int) -> float:
        """GPU seconds of the first steps with full workers and no switches."""
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


def read_trace(path: Path) -> Trace:
    """Read a trace file; UserError names the fault."""
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
        num = len(pipeline.generation)
        yield f"generation: {num} GPUs is not a multiple of tp = {pipeline.tp}"
    if pipeline.lengths is None and not pipeline.rollouts_s:
        yield "give `lengths` and `rollouts_per_step`, or `rollouts_s`"
    if pipeline.rollouts_per_worker < 1:
        yield "`rollouts_per_worker` must be at least 1"
    for phase in pipeline.phases:
        if phase.cluster and phase.cluster not in pipeline.clusters:
            yield f"a phase needs the cluster {phase.cluster}, which `clusters` does not have"


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of generated traces: pairs are uniform ranges, drawn per pipeline; other tuples
    are choices."""

    block_gpus: int = 8
    """GPUs of the fleet per pipeline."""
    node_gpus: int = 8
    train_gpus: tuple[int, ...] = (2, 2, 4)
    tp: tuple[int, ...] = (1, 2, 2, 4)
    rollouts_per_gpu: int = 2
    rollouts_per_step: tuple[int, ...] = (128, 256, 512)
    median_s: tuple[float, float] = (20.0, 40.0)
    sigma: tuple[float, float] = (0.6, 0.9)
    cap_medians: float = 8.0
    train_share: tuple[float, float] = (0.2, 0.5)
    """Seconds of log-probs and training, relative to the rollouts on a full block."""
    scoring_share: tuple[float, float] = (0.1, 0.2)
    """Seconds of phases without GPUs, relative to the rollouts on a full block."""
    arrival_s: tuple[float, float] = (0.0, 1800.0)
    num_steps: tuple[int, int] = (6, 18)
    costs: SwitchCosts = SwitchCosts()


SHAPES = {
    "mixed": WorkloadShape(),
    "even": WorkloadShape(
        train_gpus=(2,),
        tp=(2,),
        rollouts_per_step=(256,),
        median_s=(30.0, 30.0),
        sigma=(0.75, 0.75),
        train_share=(0.35, 0.35),
        scoring_share=(0.15, 0.15),
        arrival_s=(0.0, 0.0),
        num_steps=(12, 12),
    ),
    "scarce": WorkloadShape(
        block_gpus=4, train_gpus=(2,), tp=(8,), rollouts_per_step=(64, 128, 256), num_steps=(4, 12)
    ),
}
LOG_PROBS_SHARE = 0.2
"""Share of log-probs in log-probs and training."""


def generate_trace(shape: WorkloadShape, num_pipelines: int, seed: int) -> Trace:
    """Generate a trace with one block of the fleet per pipeline."""
    chance = random.Random(f"{seed}/{num_pipelines}")
    blocks = range(num_pipelines)
    num_nodes, rest = divmod(shape.block_gpus * num_pipelines, shape.node_gpus)
    assert rest == 0, "the blocks do not fill whole nodes"
    return Trace(
        name=f"{num_pipelines} pipelines, seed {seed}",
        nodes=(shape.node_gpus,) * num_nodes,
        pipelines=tuple(_pipeline(shape, num_pipelines, block, chance) for block in blocks),
        costs=shape.costs,
        seed=seed,
    )


def _pipeline(
    shape: WorkloadShape, num_blocks: int, block: int, chance: random.Random
) -> TracePipeline:
    first = block * shape.block_gpus
    train = range(first, first + chance.choice(shape.train_gpus))
    tp = chance.choice(shape.tp)
    rollouts = chance.choice(shape.rollouts_per_step)
    median_s, sigma = chance.uniform(*shape.median_s), chance.uniform(*shape.sigma)
    lengths = Lengths(round(median_s, 1), round(sigma, 2), round(median_s * shape.cap_medians, 1))
    mean_s = median_s * math.exp(sigma**2 / 2)
    bulk_s = rollouts * mean_s / (shape.block_gpus * shape.rollouts_per_gpu)
    return TracePipeline(
        pipeline_id=f"p{block}",
        clusters={"actor_train": tuple(train)},
        generation=tuple(range(num_blocks * shape.block_gpus)),
        tp=tp,
        rollouts_per_worker=tp * shape.rollouts_per_gpu,
        arrival_s=round(chance.uniform(*shape.arrival_s), 1),
        num_steps=chance.randint(*shape.num_steps),
        rollouts_per_step=rollouts,
        lengths=lengths,
        phases=_phases(shape, bulk_s, chance),
    )


def _phases(shape: WorkloadShape, bulk_s: float, chance: random.Random) -> tuple[StepPhase, ...]:
    fixed_s = bulk_s * chance.uniform(*shape.train_share)
    log_probs_s = fixed_s * LOG_PROBS_SHARE
    train = "actor_train"
    return (
        StepPhase("", round(bulk_s * chance.uniform(*shape.scoring_share), 1)),
        StepPhase(train, round(log_probs_s, 1), GpuPriority.OLD_LOG_PROBS),
        StepPhase(train, round(fixed_s - log_probs_s, 1), GpuPriority.ACTOR_TRAINING),
    )
