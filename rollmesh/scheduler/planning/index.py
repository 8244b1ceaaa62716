"""Index of the fleet state: derived data that is costly to compute, kept between plans.

- Derived only: a state with an empty index gives the same plan, and indexes compare equal.
- `users` and the cells change when a pipeline is added or removed. `availability` is compared with
  that of the last plan and recomputed where it differs.
"""

from typing import TYPE_CHECKING, NamedTuple

from rollmesh.scheduler.planning.shares import GpuPool

if TYPE_CHECKING:
    from rollmesh.scheduler.planning.state import GenerationWorker, PipelineState


class GpuCell(NamedTuple):
    """GPUs with the same users."""

    gpus: tuple[int, ...]
    users: tuple[str, ...]


class UsableBundles(NamedTuple):
    """Workers of a pipeline that could be awake."""

    pipeline: "PipelineState"
    bundles: "list[GenerationWorker]"


class ClaimedGpus(NamedTuple):
    """GPUs that a claim can use."""

    bundles: "list[GenerationWorker]"
    gpus: frozenset[int]


class Availability:
    """Where generation was possible at the last plan."""

    def __init__(self) -> None:
        self.closed: set[int] = set()
        """GPUs where no pipeline can generate."""
        self.exclusive: dict[int, str] = {}
        """GPUs where only one pipeline can generate, by its id."""
        self.usable: dict[str, UsableBundles] = {}
        self.claimed: dict[str, ClaimedGpus] = {}
        """By pipeline, the claim that `pools` was computed from."""
        self.pools: dict[int, GpuPool] = {}
        """By first GPU; replaced, never modified."""
        self.pools_of_cell: dict[int, tuple[int, ...]] = {}
        """Pools by the first GPU of their cell."""


class FleetIndex:
    def __init__(self) -> None:
        self.users: dict[int, dict[str, None]] = {}
        """By GPU, the pipelines that may generate there, in order of registration."""
        self.availability = Availability()
        self._cells: dict[int, GpuCell] | None = None
        self._cells_of: dict[str, list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FleetIndex)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        """Add a pipeline that may generate on these GPUs."""
        for gpu in gpus:
            self.users.setdefault(gpu, {})[pipeline_id] = None
        self._forget()

    def remove(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        for gpu in gpus:
            self.users[gpu].pop(pipeline_id, None)
            if not self.users[gpu]:
                del self.users[gpu]
        self.availability.usable.pop(pipeline_id, None)
        self._forget()

    def cells(self) -> dict[int, GpuCell]:
        """Cells by their first GPU, in its order."""
        if self._cells is None:
            self._cells, self._cells_of = self._find_cells()
        return self._cells

    def cells_of(self, pipeline_id: str) -> list[int]:
        """First GPUs of the cells where the pipeline may generate."""
        self.cells()
        return self._cells_of.get(pipeline_id, [])

    def update_availability(self, closed: set[int], exclusive: dict[int, str]) -> Availability:
        """Forget the usable bundles of pipelines where availability has changed."""
        availability = self.availability
        changed = closed ^ availability.closed
        changed.update(gpu for gpu, _ in exclusive.items() ^ availability.exclusive.items())
        for gpu in changed:
            for pipeline_id in self.users.get(gpu, ()):
                availability.usable.pop(pipeline_id, None)
        availability.closed, availability.exclusive = closed, exclusive
        return availability

    def _forget(self) -> None:
        self._cells = None
        self.availability.claimed, self.availability.pools, self.availability.pools_of_cell = (
            {},
            {},
            {},
        )

    def _find_cells(self) -> tuple[dict[int, GpuCell], dict[str, list[int]]]:
        gpus_of: dict[tuple[str, ...], list[int]] = {}
        for gpu in sorted(self.users):
            gpus_of.setdefault(tuple(self.users[gpu]), []).append(gpu)
        cells_of: dict[str, list[int]] = {}
        cells = {}
        for users, gpus in gpus_of.items():
            cells[gpus[0]] = GpuCell(tuple(gpus), users)
            for pipeline_id in users:
                cells_of.setdefault(pipeline_id, []).append(gpus[0])
        return cells, cells_of
