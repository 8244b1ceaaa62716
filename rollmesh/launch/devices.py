"""The GPUs of this machine that each process of a run uses.

- Pure: settings, the machine's GPUs and a share's GPUs in, the devices of each role out.
- A process sees only its own GPUs (CUDA_VISIBLE_DEVICES), so that servers and trainer cannot meet
  on one. Roles that are not assigned any see what launch sees.
- On a cluster its scheduler assigns GPUs, and nothing is assigned here.
"""

from collections.abc import Mapping, Sequence

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError
from rollmesh.core.gpus import DEVICES_VARIABLE, PLACES_VARIABLE
from rollmesh.launch.plan import TRAINER, ChildPlan, engine_roles

Devices = Mapping[str, tuple[str, ...]]
"""By role: names of GPUs, as CUDA_VISIBLE_DEVICES has them."""


class GrantedGpus(msgspec.Struct, frozen=True):
    """The GPUs of a pipeline on one machine, by their place among the machine's GPUs."""

    engines: tuple[tuple[int, ...], ...]
    """The GPUs of each generation worker, in order."""
    trainer: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    """Names of the machines that have them: one launch can use those of one machine."""


def assign_devices(
    config: Config, gpus: Sequence[str], granted: GrantedGpus | None = None, *, trains: bool = True
) -> Devices:
    """Return the devices of SGLang servers and trainer; ConfigError if there are too few GPUs.

    Without a share the trainer has the first GPUs, or that of trainer.device, and the servers have
    the next ones.
    """
    if granted:
        return _granted(config, gpus, granted)
    engine, roles = config.engine, engine_roles(config)
    if engine.launch != "sglang":
        return {}
    trained = gpus_of_trainer(config, len(gpus)) if trains else range(0)
    num_needed = len(trained) + len(roles) * engine.gpus_each
    if engine.gpus_each and num_needed > len(gpus):
        of_trainer = f" with the {len(trained)} of the trainer" if trained else ""
        raise ConfigError(
            f"engine.num_servers = {engine.num_servers}, engine.gpus_each = {engine.gpus_each}: "
            f"{num_needed} GPUs{of_trainer}, and this machine has {len(gpus)}; start fewer servers"
        )
    left = [gpu for at, gpu in enumerate(gpus) if at not in trained]
    each = engine.gpus_each
    devices = {role: tuple(left[at * each : at * each + each]) for at, role in enumerate(roles)}
    if trained and config.trainer.device in ("auto", "cuda"):
        devices[TRAINER] = tuple(gpus[at] for at in trained)
    return devices


def with_devices(plans: Sequence[ChildPlan], devices: Devices) -> list[ChildPlan]:
    """Return the plans, in which each process sees its devices only."""
    return [
        msgspec.structs.replace(
            plan,
            variables={**plan.variables, DEVICES_VARIABLE: ",".join(devices[plan.role])},
        )
        if plan.role in devices
        else plan
        for plan in plans
    ]


def with_places(
    config: Config, plans: Sequence[ChildPlan], homes: Mapping[str, str], gpus_per_node: int
) -> list[ChildPlan]:
    """Return the plans, in which each SGLang server has GPUs of its own on its node.

    `homes` are the nodes of the roles that do not run on the first. The ranks of the trainer have
    the first GPUs of their nodes. Nodes of a job share their GPUs between its processes.
    """
    if config.engine.launch != "sglang":
        return list(plans)
    of_ranks = len(gpus_of_trainer(config, gpus_per_node))
    used = {homes[plan.role]: of_ranks for plan in plans if plan.is_rank} | {"": of_ranks}
    found = []
    for plan in plans:
        if plan.role in engine_roles(config):
            node, each = homes.get(plan.role, ""), config.engine.gpus_each
            first = used.get(node, 0)
            used[node] = first + each
            places = ",".join(map(str, range(first, first + each)))
            variables = {**plan.variables, PLACES_VARIABLE: places}
            plan = msgspec.structs.replace(plan, variables=variables)
        found.append(plan)
    return found


def gpus_of_trainer(config: Config, num_gpus: int) -> range:
    """Return the places of the trainer's GPUs: one for each rank on its node."""
    device = config.trainer.device
    if device == "cpu" or (device == "auto" and not num_gpus):
        return range(0)
    first = device.partition(":")[2]
    start = int(first) if first.isdecimal() else 0
    return range(start, start + config.trainer.local_ranks)


def _granted(config: Config, gpus: Sequence[str], granted: GrantedGpus) -> Devices:
    devices: dict[str, tuple[str, ...]] = {}
    engine, device = config.engine, config.trainer.device
    if engine.launch == "sglang":
        for role, places in zip(engine_roles(config), granted.engines, strict=True):
            if len(places) != engine.gpus_each:
                raise ConfigError(
                    f"engine.gpus_each = {engine.gpus_each}: the pipeline's engines have "
                    f"{len(places)} GPUs each (tp); make them equal"
                )
            devices[role] = _named(gpus, places, role)
    if device.startswith("cuda:"):
        raise ConfigError(
            f'trainer.device = "{device}": on a shared fleet the scheduler grants GPUs; set "cuda"'
        )
    is_on_gpus = device == "cuda" or (device == "auto" and len(gpus) > 0)
    if is_on_gpus and granted.trainer:
        devices[TRAINER] = _named(gpus, granted.trainer, TRAINER)
    if devices and len(granted.nodes) > 1:
        raise ConfigError(
            f"the pipeline's GPUs are on {' and '.join(granted.nodes)}, and one launch starts "
            "engines and trainer on one machine; start engines there, and name them by engine.urls"
        )
    return devices


def _named(gpus: Sequence[str], places: Sequence[int], role: str) -> tuple[str, ...]:
    if max(places) >= len(gpus):
        raise ConfigError(
            f"{role}: the scheduler grants GPU {max(places)} of its node, counted from 0, and this "
            f"machine has {len(gpus)}; start the run on the node of its GPUs"
        )
    return tuple(gpus[at] for at in places)
