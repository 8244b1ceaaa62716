"""scheduler.toml: nodes and pipelines of a fleet, and the addresses of the scheduler.

- An unknown key is refused with its path, and a contradiction with the key to change. A fleet that
  was read never changes.
- The file holds no secrets.
- Device maps are checked at admission, since only then the nodes are known.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from rollmesh.core.config_parsing import explain, read_file
from rollmesh.core.errors import ConfigError
from rollmesh.core.share import JOURNAL, KEYS
from rollmesh.core.text import close_names
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.planning.policies import (
    DEFAULT_POLICY,
    make_policy,
    policy_names,
    policy_settings_type,
)
from rollmesh.scheduler.planning.state import MAX_NODE_GPUS
from rollmesh.wire.scheduling import GENERATION_CLUSTER

ADMISSION_SOCKET = "admission.sock"
EVERY_KEY = "docs/howto/share-a-fleet.md explains the keys"
WRITES_ONE = "`rollmesh scheduler init` writes one"

NAME_RULE = "a name is one word, without spaces and slashes"
MAX_PORT = 2**16 - 1
MANY = 10**9
"""More than any fleet has."""
Gpu = Annotated[int, msgspec.Meta(ge=0, le=MANY)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MANY)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MANY)]
NodeSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_NODE_GPUS)]
Weight = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Devices = Size | Annotated[tuple[Gpu, ...], msgspec.Meta(min_length=1)]
"""Number of GPUs, placed by the scheduler; or the GPUs themselves."""


class FileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table of the fleet file."""


_Settings = TypeVar("_Settings", bound=msgspec.Struct)


class NodeTable(FileTable, frozen=True):
    """[[nodes]]: a machine without an agent; its GPUs get the next numbers of the fleet."""

    name: str
    """Name of the node, one word."""
    gpus: NodeSize
    """Number of its GPUs."""
    labels: tuple[str, ...] = ()
    """Words by which pipelines choose nodes, such as "h200"."""


class PipelineTable(FileTable, frozen=True):
    """[pipelines.NAME]: GPUs and share of a pipeline."""

    clusters: dict[str, Devices] = {}
    """By name (actor_train, critic, reference...), GPUs needed all at once."""
    generation: tuple[Gpu, ...] = ()
    """GPUs of its engines: worker r has generation[r * tp : (r + 1) * tp], inside one node."""
    workers: Count = 0
    """Number of engines, placed by the scheduler; instead of `generation`."""
    tp: Size = 1
    """GPUs per engine."""
    labels: tuple[str, ...] = ()
    """Place it only on nodes with all of these."""
    weight: Weight = 1.0
    """Share relative to other pipelines."""
    max_gpus: Count = 0
    """Upper bound on GPUs of generation at a time; 0: no limit."""
    min_gpus: Count = 0
    """GPUs of generation guaranteed while it has demand."""
    preemptible: bool = True
    """Whether other pipelines may preempt its generation; its own clusters always may."""
    rollouts_per_worker: Count = 0
    """Rollouts that keep an engine busy, so that fewer left need fewer engines; 0: unknown."""


class FleetTables(FileTable, frozen=True):
    """The whole file."""

    bind: str = "tcp://127.0.0.1:7070"
    """Address for hooks, coordinators, agents and the command line."""
    http_bind: str = "127.0.0.1:7071"
    """Address of /status, /metrics and /healthz."""
    admission: str = ""
    """Unix socket of the admission process; '': admission.sock in the journal's folder."""
    journal: str = JOURNAL
    """Folder of the scheduler's journal; like all paths relative to the working directory."""
    policy: str = DEFAULT_POLICY
    """Name of a scheduling policy."""
    policy_settings: dict[str, dict[str, Any]] = msgspec.field(
        default_factory=dict, name="[POLICY]"
    )
    """Tables of policies with settings by policy name, such as [fair]."""
    service: dict[str, Any] = {}
    """Timeouts of the scheduler: fields of SchedulerSettings."""
    nodes: tuple[NodeTable, ...] = ()
    """Other nodes may join by agents."""
    pipelines: dict[str, PipelineTable] = {}
    """Tables [pipelines.NAME], one for each pipeline."""


def admission_path(fleet: FleetTables) -> str:
    """Path of the admission process's socket."""
    return fleet.admission or str(Path(fleet.journal) / ADMISSION_SOCKET)


def keys_of_fleet(fleet: FleetTables) -> Path | None:
    """Key folder that `rollmesh scheduler up` created; None if there is none."""
    folder = Path(fleet.journal) / KEYS
    return folder if folder.is_dir() else None


def read_fleet(path: Path) -> FleetTables:
    """Read a fleet file; one-line ConfigError with the file and the key."""
    return convert_fleet(read_file(path, WRITES_ONE), str(path))


def convert_fleet(tree: dict[str, Any], source: str) -> FleetTables:
    """Convert a parsed fleet file; `source` names it in errors."""
    tables = tree.get("pipelines", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{source}: pipelines: write each as a table [pipelines.NAME]")
    policies = {name for name in policy_names() if policy_settings_type(name)}
    rest = {key: value for key, value in tree.items() if key not in {*policies, "pipelines"}}
    fleet: FleetTables = _converted(rest, FleetTables, source, "")
    settings = {
        name: _converted(tree[name], dict[str, Any], source, name)
        for name in sorted(policies & tree.keys())
    }
    for why in (*_policy_faults(fleet), *_address_faults(fleet), *_node_faults(fleet.nodes)):
        raise ConfigError(f"{source}: {why}")
    pipelines = {name: convert_pipeline(name, each, source) for name, each in tables.items()}
    return msgspec.structs.replace(fleet, pipelines=pipelines, policy_settings=settings)


def convert_pipeline(name: str, tree: Any, source: str) -> PipelineTable:
    """Convert one [pipelines.NAME] table."""
    where = f"pipelines.{name}"
    if not is_valid_name(name):
        raise ConfigError(f"{source}: {where}: {NAME_RULE}")
    clusters = tree.get("clusters") if isinstance(tree, dict) else None
    if isinstance(clusters, dict):
        for key, devices in clusters.items():
            _converted(devices, Devices, source, f"{where}.clusters.{key}")
    table: PipelineTable = _converted(tree, PipelineTable, source, where)
    if why := _misnamed(table) or _contradiction(table):
        raise ConfigError(f"{source}: {where}.{why}")
    return table


def convert_settings(table: dict[str, Any], kind: type[_Settings], where: str) -> _Settings:
    """Convert a table of seconds to its struct with ranges; ConfigError names the key, and the
    known keys or the range."""
    known = {field.name: field.type for field in _fields(kind)}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known keys: {', '.join(known)}")
        span = known[key]
        assert isinstance(span, msgspec.inspect.FloatType)
        assert span.ge is not None
        assert span.le is not None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and span.ge <= value <= span.le):
            allowed = f"{span.ge:g} to {span.le:.0f} seconds"
            raise ConfigError(f"{where}.{key}: {value!r} is not a valid time; use {allowed}")
    return kind(**table)


def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def policy_of(fleet: FleetTables, source: str) -> SchedulingPolicy:
    """Make the fleet's policy with its settings; ConfigError names the table and the key."""
    settings: dict[str, msgspec.Struct] = {}
    for name, table in fleet.policy_settings.items():
        if kind := policy_settings_type(name):
            settings[name] = convert_settings(table, kind, f"{source}: [{name}]")
    return make_policy(fleet.policy, settings.get(fleet.policy))


def _policy_faults(fleet: FleetTables) -> Iterator[str]:
    if fleet.policy not in policy_names():
        close = close_names(fleet.policy, policy_names())
        hint = f"; did you mean {close[0]!r}?" if close else ""
        yield f"policy: {fleet.policy!r} is not one of {', '.join(policy_names())}{hint}"


def _address_faults(fleet: FleetTables) -> Iterator[str]:
    for key in ("bind", "http_bind"):
        address: str = getattr(fleet, key)
        scheme = "" if key == "http_bind" else "tcp://"
        host, _, port = address.removeprefix(scheme).rpartition(":")
        is_port = (port == "*" and scheme) or (
            port.isascii() and port.isdigit() and int(port) <= MAX_PORT
        )
        if not (address.startswith(scheme) and host and "/" not in host and is_port):
            yield f"{key}: {address!r} is not an address; write it as {scheme}HOST:PORT"
    if not fleet.journal.strip():
        yield f"journal: {fleet.journal!r} is not a folder name; give one"
    if ":" in fleet.admission:
        yield (
            f"admission: {fleet.admission!r} is not a path; admission serves at a unix "
            f"socket of this machine: leave it out for {ADMISSION_SOCKET} in the journal's folder, "
            "or give a path"
        )


def _node_faults(nodes: Sequence[NodeTable]) -> Iterator[str]:
    names = [node.name for node in nodes]
    for index, node in enumerate(nodes):
        if not is_valid_name(node.name):
            yield f"nodes[{index}].name: {NAME_RULE}"
        if names.count(node.name) > 1:
            yield f"nodes: {node.name!r} is listed twice; name each once"
        if not all(map(is_valid_name, node.labels)):
            yield f"nodes[{index}].labels: {NAME_RULE}"


def is_valid_name(name: str) -> bool:
    """Whether this is a valid name of a node, pipeline or label."""
    return bool(name) and name.isprintable() and not {" ", "/"} & set(name)


def _misnamed(table: PipelineTable) -> str:
    """Fault in names or GPU lists, with its key; '' if none."""
    for name in table.clusters:
        if not is_valid_name(name):
            return f"clusters.{name}: {NAME_RULE}"
    if not all(map(is_valid_name, table.labels)):
        return f"labels: {NAME_RULE}"
    maps = {f"clusters.{name}": devices for name, devices in table.clusters.items()}
    for key, gpus in {**maps, "generation": table.generation}.items():
        if not isinstance(gpus, int) and len(set(gpus)) < len(gpus):
            return f"{key}: a GPU is listed twice; name each once"
    return ""


def _contradiction(table: PipelineTable) -> str:
    """Contradictory keys and the remedy; '' if none."""
    num = len(table.generation)
    total = num or table.workers * table.tp
    if table.generation and table.workers:
        return "workers: `generation` already sets the number; leave one out"
    if num % table.tp:
        return (
            f"generation: {num} GPUs is not a multiple of tp = {table.tp}; give each worker tp GPUs"
        )
    if table.max_gpus and table.max_gpus < table.tp and total:
        return f"max_gpus: {table.max_gpus} is less than one worker (tp = {table.tp}); raise it"
    if table.min_gpus > (min(table.max_gpus, total) if table.max_gpus else total):
        return f"min_gpus: {table.min_gpus} exceeds what generation may have; lower it"
    if GENERATION_CLUSTER in table.clusters:
        return f"clusters.{GENERATION_CLUSTER}: use `generation` or `workers` instead"
    if not table.clusters and not total:
        return "clusters: no GPUs requested; add a cluster, `generation` or `workers`"
    return ""


def _converted(tree: Any, kind: Any, source: str, where: str) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        fault = explain(str(error), kind, EVERY_KEY, where)
        raise ConfigError(f"{source}: {fault}") from None
