"""Placement of a pipeline on the fleet: choose GPUs by number, or check GPUs chosen by the user.

    generation   bundles of `tp` adjacent GPUs inside a node; all on one node if one has room, where
                 the fewest other pipelines generate per GPU; else spread, the emptiest nodes first
    clusters     on adjacent GPUs of generation with the fewest clusters so far; the rest outside

- The same request on the same fleet gives the same placement, and every placement passes `check`.
- Nodes that drain, are down or lack a requested label are not used.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from rollmesh.core.errors import UserError
from rollmesh.scheduler.planning.state import FleetState, GpuNode, NodePhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, PipelineSpec

Bundle = tuple[int, ...]


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requested GPUs of a pipeline: counts to be placed, or explicit GPU numbers."""

    pipeline_id: str
    clusters: Mapping[str, int | Bundle] = {}
    generation: int | Bundle = 0
    """Number of workers, or their GPUs."""
    tp: int = 1
    """GPUs per worker."""
    labels: tuple[str, ...] = ()
    """Use only nodes that have all of these."""


class Placement(NamedTuple):
    """GPUs in the form of PipelineSpec."""

    clusters: dict[str, Bundle]
    generation: Bundle


def place(wish: PlacementRequest, state: FleetState) -> Placement:
    """Place a pipeline; explicit GPUs are kept. One-line UserError if it does not fit."""
    others = [each.spec for key, each in state.pipelines.items() if key != wish.pipeline_id]
    site = _CandidateNodes(wish, state.nodes.values())
    generation = wish.generation
    if isinstance(generation, int):
        generation = site.generation(
            generation, Counter(gpu for s in others for gpu in s.generation)
        )
    load = Counter(gpu for spec in others for gpus in spec.clusters.values() for gpu in gpus)
    clusters: dict[str, Bundle] = {}
    for name, size in wish.clusters.items():
        gpus = site.cluster(name, size, generation, load) if isinstance(size, int) else size
        load.update(gpus)
        clusters[name] = gpus
    return Placement(clusters, generation)


def check(spec: PipelineSpec, state: FleetState) -> None:
    """One-line UserError for the first fault of a device map."""
    for why in _faults(spec, state):
        raise UserError(f"pipeline {spec.pipeline_id}: {why}")


class _CandidateNodes:
    """Nodes that a pipeline may use."""

    def __init__(self, wish: PlacementRequest, nodes: Iterable[GpuNode]) -> None:
        self._wish = wish
        self._nodes = [node for node in nodes if _is_usable(node, wish.labels)]

    def generation(self, num_workers: int, load: Counter[int]) -> Bundle:
        tp = self._wish.tp
        rows = [_bundles(node.gpus, tp) for node in self._nodes]
        num_there = sum(map(len, rows))
        if num_workers > num_there:
            what = f"{num_workers} workers of tp = {tp} do not fit, {num_there} do"
            self._refuse("generation", f"{what} on {self._which()}")
        return _joined(_choose(rows, num_workers, load))

    def cluster(self, name: str, size: int, generation: Bundle, load: Counter[int]) -> Bundle:
        inside = set(generation)
        there = [gpu for node in self._nodes for gpu in node.gpus if gpu not in inside]
        beside = max(0, size - len(generation))
        if beside > len(there):
            what = f"{size} GPUs do not fit, {len(generation) + len(there)} do"
            self._refuse(name, f"{what} on {self._which()}")
        chosen = _choose(self._rows(inside), size - beside, load)
        chosen += _choose(self._rows(set(there)), beside, load)
        return tuple(sorted(_joined(chosen)))

    def _rows(self, gpus: set[int]) -> list[list[Bundle]]:
        """Single GPUs by node."""
        return [[(gpu,) for gpu in node.gpus if gpu in gpus] for node in self._nodes]

    def _which(self) -> str:
        labels = f" labelled {', '.join(self._wish.labels)}" if self._wish.labels else ""
        return f"the {len(self._nodes)} nodes{labels} that are up"

    def _refuse(self, key: str, why: str) -> None:
        raise UserError(
            f"pipeline {self._wish.pipeline_id}: {key}: {why}; ask for less, or join a node"
        )


def _is_usable(node: GpuNode, labels: Iterable[str]) -> bool:
    return node.phase is NodePhase.UP and set(labels) <= set(node.labels)


def _bundles(gpus: Bundle, size: int) -> list[Bundle]:
    """Adjacent GPUs from the first on, so that bundles of one size are the same for all
    pipelines."""
    return [gpus[start : start + size] for start in range(0, len(gpus) - size + 1, size)]


def _choose(rows: Sequence[Sequence[Bundle]], num: int, load: Mapping[int, int]) -> list[Bundle]:
    """Choose bundles with little load: from one row if one is long enough, else from few."""
    chosen: list[Bundle] = []
    rows = [row for row in rows if row]
    while len(chosen) < num:
        left = num - len(chosen)
        whole = [row for row in rows if len(row) >= left]
        runs = [_emptiest(row, min(left, len(row)), load) for row in whole or rows]
        best = min(runs, key=lambda run: (_mean(run, load), -len(run)))
        chosen += best
        rows = [row for row in rows if best[0] not in row]
    return chosen


def _emptiest(row: Sequence[Bundle], num: int, load: Mapping[int, int]) -> Sequence[Bundle]:
    """Least loaded run of `num` bundles."""
    runs = (row[start : start + num] for start in range(len(row) - num + 1))
    return min(runs, key=lambda run: _mean(run, load))


def _mean(run: Sequence[Bundle], load: Mapping[int, int]) -> float:
    gpus = _joined(run)
    return sum(load[gpu] for gpu in gpus) / len(gpus)


def _joined(bundles: Iterable[Bundle]) -> Bundle:
    return tuple(gpu for bundle in bundles for gpu in bundle)


def _faults(spec: PipelineSpec, state: FleetState) -> Iterator[str]:
    maps = {**spec.clusters, GENERATION_CLUSTER: spec.generation}
    if GENERATION_CLUSTER in spec.clusters:
        yield f"{GENERATION_CLUSTER} is reserved; name its GPUs in `generation`"
    if not spec.clusters and not spec.generation:
        yield "no clusters and no generation; give it GPUs"
    for name, gpus in maps.items():
        if not gpus and name in spec.clusters:
            yield f"{name} has no GPUs; name some, or leave it out"
        if unknown := [gpu for gpu in gpus if gpu not in state.node_of]:
            yield f"{name}: no node has GPU {unknown[0]}; see `rollmesh scheduler explain`"
        if twice := [gpu for gpu, count in Counter(gpus).items() if count > 1]:
            yield f"{name}: GPU {twice[0]} is listed twice; name each once"
    yield from _generation_faults(spec, state)


def _generation_faults(spec: PipelineSpec, state: FleetState) -> Iterator[str]:
    tp, num = spec.tp, len(spec.generation)
    if tp < 1 or num % tp:
        yield f"generation: {num} GPUs is not a multiple of tp = {tp}; give each worker tp GPUs"
        return
    for rank, gpus in enumerate(_bundles(spec.generation, tp)):
        if len({state.node_of[gpu].name for gpu in gpus}) > 1:
            yield f"generation: worker {rank} has GPUs {gpus} on two nodes; keep it on one"
    if not 0 < spec.weight < math.inf:
        yield f"weight: {spec.weight:g} is not a valid weight; use one above 0"
    for name in ("max_gpus", "min_gpus", "rollouts_per_worker"):
        if (value := getattr(spec, name)) < 0:
            yield f"{name}: {value} is below 0; 0 means no limit"
    if spec.max_gpus and spec.max_gpus < tp <= num:
        yield f"max_gpus: {spec.max_gpus} is less than one worker (tp = {tp}); raise it"
    most = min(spec.max_gpus or num, num)
    if spec.min_gpus > most:
        yield f"min_gpus: {spec.min_gpus} exceeds the {most} GPUs it may have; lower it"
