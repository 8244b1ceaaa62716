"""scheduler.toml: the fleet's nodes, its pipelines, and where the scheduler serves.

Owns its keys, their defaults and meanings. Invariants: an unknown key is refused with its path,
and what contradicts itself with the key to mend; a fleet that was read never changes; secrets never
stand here. Whether GPUs of these numbers exist is only known where the nodes have joined, so the
device maps are checked at admission. Driven by `rollmesh scheduler` and by the admission process.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollmesh.core.config import NonNegative, Positive
from rollmesh.core.config_tree import explain, read_file
from rollmesh.core.errors import ConfigError
from rollmesh.wire.scheduling import GENERATION_CLUSTER

FLEET_FILE = "scheduler.toml"
"""What it is called where nobody names another."""
EVERY_KEY = "docs/scheduler.md lists all keys"
WRITES_ONE = "`rollmesh scheduler init` writes one"

Gpu = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(gt=0)]
Devices = Positive | Annotated[tuple[Gpu, ...], msgspec.Meta(min_length=1)]
"""How many GPUs, placed by the scheduler; or which, by their numbers."""
Policy = Literal["fair", "gap-ratio", "static"]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the file."""


_Table = TypeVar("_Table", bound=Table)
_Settings = TypeVar("_Settings", bound=msgspec.Struct)


class NodeTable(Table, frozen=True):
    """[[nodes]]: a machine that is there without an agent, and numbers its GPUs in turn."""

    name: str
    gpus: Positive
    """How many."""
    labels: tuple[str, ...] = ()


class PipelineTable(Table, frozen=True):
    """[pipelines.NAME]: what a pipeline wants of the fleet."""

    clusters: dict[str, Devices] = {}
    """By name (actor_train, critic, reference...), the GPUs that it needs all of."""
    generation: tuple[Gpu, ...] = ()
    """GPUs of its engines: worker r has generation[r * tp : (r + 1) * tp], inside one node."""
    workers: NonNegative = 0
    """Instead of `generation`: so many engines, placed by the scheduler."""
    tp: Positive = 1
    """GPUs of an engine."""
    labels: tuple[str, ...] = ()
    """Of nodes: where it may be placed; all of them."""
    weight: Weight = 1.0
    """Its share against that of the others."""
    max_gpus: NonNegative = 0
    """Of generation, at most so many at a time; 0: no limit."""
    min_gpus: NonNegative = 0
    """Of generation, what it has for certain while it has demand."""
    preemptible: bool = True
    """Whether its generation gives way to other pipelines; to its own clusters it always does."""
    rollouts_per_worker: NonNegative = 0
    """So many rollouts keep an engine busy, and fewer left need fewer; 0: unknown."""


class FleetTables(Table, frozen=True):
    """The whole file."""

    bind: str = "tcp://127.0.0.1:7070"
    """Where the scheduler serves hooks, coordinators, agents and verbs."""
    http_bind: str = "127.0.0.1:7071"
    """Where it serves /status, /metrics and /healthz."""
    admission: str = "tcp://127.0.0.1:7072"
    """Where the admission process serves."""
    journal: str = "scheduler"
    """The folder of the scheduler's journal; as the others, told from where it is started."""
    policy: Policy = "fair"
    """Who generates where: weighted max-min, the known formula, or fixed parts."""
    fair: dict[str, float] = {}
    """Of the policy `fair`, what FairSettings has: quantum_s, hold_s..."""
    service: dict[str, float] = {}
    """How patient the scheduler is, as SchedulerSettings has it: patience_s, node_grace_s..."""
    nodes: tuple[NodeTable, ...] = ()
    """Others may join by agents."""
    pipelines: dict[str, PipelineTable] = {}


def read_fleet(path: Path) -> FleetTables:
    """The fleet of a file; ConfigError in one line naming the file and the key."""
    return fleet_of(read_file(path, WRITES_ONE), str(path))


def fleet_of(tree: dict[str, Any], source: str) -> FleetTables:
    """The same of a tree that was read already, in `source`."""
    told = tree.get("pipelines", {})
    if not isinstance(told, dict):
        raise ConfigError(f"{source}: pipelines: write each as a table [pipelines.NAME]")
    rest = {key: value for key, value in tree.items() if key != "pipelines"}
    fleet = _converted(rest, FleetTables, source, "")
    names = [node.name for node in fleet.nodes]
    for twice in {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{source}: nodes: {twice!r} stands there twice; name each once")
    pipelines = {name: pipeline_of(name, each, source) for name, each in told.items()}
    return msgspec.structs.replace(fleet, pipelines=pipelines)


def pipeline_of(name: str, tree: dict[str, Any], source: str) -> PipelineTable:
    """One [pipelines.NAME]; ConfigError as above."""
    where = f"pipelines.{name}"
    if not name or "/" in name or not name.isprintable() or " " in name:
        raise ConfigError(f"{source}: {where}: a name is one word, without spaces and slashes")
    table = _converted(tree, PipelineTable, source, where)
    if why := _contradiction(table):
        raise ConfigError(f"{source}: {where}.{why}")
    return table


def settings_of(told: dict[str, float], kind: type[_Settings], where: str) -> _Settings:
    """A table of seconds, as the struct that has them; ConfigError names the key and all others."""
    known = kind.__struct_fields__
    for key, value in told.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; there are {', '.join(known)}")
        if not value >= 0:
            raise ConfigError(f"{where}.{key}: {value:g} is no time; make it 0 or more")
    return kind(**told)


def _contradiction(table: PipelineTable) -> str:
    """The key at fault, and what to do; '' if there is none."""
    num = len(table.generation)
    total = num or table.workers * table.tp
    if table.generation and table.workers:
        return "workers: the numbers in `generation` say how many; leave one out"
    if num % table.tp:
        return f"generation: {num} GPUs are not workers of tp = {table.tp}; give each all of its"
    if table.max_gpus and table.max_gpus < table.tp and total:
        return f"max_gpus: {table.max_gpus} is less than one worker, tp = {table.tp}; raise it"
    if table.min_gpus > (min(table.max_gpus, total) if table.max_gpus else total):
        return f"min_gpus: {table.min_gpus} is more than generation may have; lower it"
    if GENERATION_CLUSTER in table.clusters:
        return f"clusters.{GENERATION_CLUSTER}: that is `generation`, or `workers`; name it there"
    if not table.clusters and not total:
        return "clusters: it wants no GPU at all; name a cluster, `generation` or `workers`"
    return ""


def _converted(tree: Any, kind: type[_Table], source: str, where: str) -> _Table:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        text, at, key = str(error).partition(" - at `$")
        inside = f"{text} - at `$.{where}{key}" if at else f"{text} - at `$.{where}`"
        told = explain(inside if where else str(error), EVERY_KEY)
        raise ConfigError(f"{source}: {told}") from None
