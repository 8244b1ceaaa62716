"""What follows from the planner's state and costs much to find: kept, so that it need not be again.

    users     by GPU, the pipelines that may generate there     when a pipeline comes or goes
    cells     GPUs with the same users                          the same, when first asked for
    ground    where nobody can generate now, and what each pipeline is left there; compared with
              that of the last plan, and found anew where they differ

Invariants: nothing here says more than the state does, so that a state with a new index plans the
same, and two states are the same whatever is kept about them. Driven by State, which tells of each
pipeline that comes or goes, and by policies/claims.py.
"""

from typing import TYPE_CHECKING, NamedTuple

from rollmesh.scheduler.planning.water import Basin

if TYPE_CHECKING:
    from rollmesh.scheduler.planning.state import Pipeline, Worker


class Cell(NamedTuple):
    """GPUs with the same users."""

    gpus: tuple[int, ...]
    users: tuple[str, ...]


class Site(NamedTuple):
    """What the ground leaves to a pipeline."""

    pipeline: "Pipeline"
    bundles: "list[Worker]"


class Used(NamedTuple):
    """What a claim has of the ground."""

    bundles: "list[Worker]"
    gpus: frozenset[int]


class Ground:
    """Of the last plan."""

    def __init__(self) -> None:
        self.closed: set[int] = set()
        """GPUs where nobody can generate."""
        self.kept: dict[int, str] = {}
        """GPUs where only one can."""
        self.sites: dict[str, Site] = {}
        self.used: dict[str, Used] = {}
        """By claim, what the basins were made of."""
        self.basins: dict[int, Basin] = {}
        """By their first GPU. Never changed: there is another one then."""
        self.firsts: dict[int, tuple[int, ...]] = {}
        """By cell, its basins."""


class Index:
    """See the module."""

    def __init__(self) -> None:
        self.users: dict[int, dict[str, None]] = {}
        """By GPU, in the order of their registration."""
        self.ground = Ground()
        self._cells: dict[int, Cell] | None = None
        self._cells_of: dict[str, list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        """It generates there."""
        for gpu in gpus:
            self.users.setdefault(gpu, {})[pipeline_id] = None
        self._forget()

    def remove(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        """It is gone."""
        for gpu in gpus:
            self.users[gpu].pop(pipeline_id, None)
            if not self.users[gpu]:
                del self.users[gpu]
        self.ground.sites.pop(pipeline_id, None)
        self._forget()

    def cells(self) -> dict[int, Cell]:
        """By their first GPU, in its order."""
        if self._cells is None:
            self._cells, self._cells_of = self._find_cells()
        return self._cells

    def cells_of(self, pipeline_id: str) -> list[int]:
        """Where it may generate."""
        self.cells()
        return self._cells_of.get(pipeline_id, [])

    def move_ground(self, closed: set[int], kept: dict[int, str]) -> Ground:
        """Forget what was found where the ground is another now."""
        ground = self.ground
        changed = closed ^ ground.closed
        changed.update(gpu for gpu, _ in kept.items() ^ ground.kept.items())
        for gpu in changed:
            for pipeline_id in self.users.get(gpu, ()):
                ground.sites.pop(pipeline_id, None)
        ground.closed, ground.kept = closed, kept
        return ground

    def _forget(self) -> None:
        self._cells = None
        self.ground.used, self.ground.basins, self.ground.firsts = {}, {}, {}

    def _find_cells(self) -> tuple[dict[int, Cell], dict[str, list[int]]]:
        gpus_of: dict[tuple[str, ...], list[int]] = {}
        for gpu in sorted(self.users):
            gpus_of.setdefault(tuple(self.users[gpu]), []).append(gpu)
        cells_of: dict[str, list[int]] = {}
        cells = {}
        for users, gpus in gpus_of.items():
            cells[gpus[0]] = Cell(tuple(gpus), users)
            for pipeline_id in users:
                cells_of.setdefault(pipeline_id, []).append(gpus[0])
        return cells, cells_of
