"""A trace cut into fleets of equal size, one for each pipeline: how it is without a scheduler.

Owns which GPUs are whose then. Invariant: no GPU is in two parts, and none that another trains on
in any; a part is as near to where its pipeline trains as can be. Driven by comparison.py.
"""

import msgspec

from rollmesh.scheduler.simulator.trace import Trace, TracePipeline

Bundle = tuple[int, ...]


def partition(trace: Trace) -> Trace:
    """The same pipelines, each of which generates on its part alone."""
    share = max(1, trace.num_gpus // max(1, len(trace.pipelines)))
    taken: set[int] = set()
    parts: dict[str, list[Bundle]] = {each.pipeline_id: [] for each in trace.pipelines}
    is_growing = True
    while is_growing:
        is_growing = False
        for pipeline in trace.pipelines:
            part = parts[pipeline.pipeline_id]
            bundle = _next(trace, pipeline, taken)
            if bundle and (not part or (len(part) + 1) * pipeline.tp <= share):
                part.append(bundle)
                taken.update(bundle)
                is_growing = True
    pipelines = tuple(_narrowed(each, parts[each.pipeline_id]) for each in trace.pipelines)
    return msgspec.structs.replace(trace, pipelines=pipelines)


def _next(trace: Trace, pipeline: TracePipeline, taken: set[int]) -> Bundle:
    own = {gpu for gpus in pipeline.clusters.values() for gpu in gpus}
    others = {gpu for each in trace.pipelines for gpus in each.clusters.values() for gpu in gpus}
    kept_off = taken | (others - own)
    free = [each for each in _bundles(pipeline) if kept_off.isdisjoint(each)]
    home = min(own, default=0)
    return min(
        free,
        key=lambda each: (own.isdisjoint(each), each[0] < home, abs(each[0] - home)),
        default=(),
    )


def _bundles(pipeline: TracePipeline) -> list[Bundle]:
    starts = range(0, len(pipeline.generation), pipeline.tp)
    return [pipeline.generation[start : start + pipeline.tp] for start in starts]


def _narrowed(pipeline: TracePipeline, part: list[Bundle]) -> TracePipeline:
    generation = tuple(gpu for bundle in sorted(part) for gpu in bundle)
    return msgspec.structs.replace(pipeline, generation=generation or pipeline.generation)
