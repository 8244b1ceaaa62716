"""The nodes of a Slurm job as hosts: launch runs on the first, and reaches the others by srun.

    first node: launch --srun--> runner on node 2   its workers and engines
                       --srun--> runner on node 3   ...

- Slurm places and ends processes. Results, weights and tokens go directly between our processes.
- A child starts on its home node, and on another one for a while after that node was lost.
- `python -m rollmesh.launch.hosts.slurm prepare MARK FILE` prepares a node: it kills what an
  earlier attempt of the job left there, and checks that the node sees FILE.
- Slurm does not end a job with --no-kill, even if its first node is lost.
  `... slurm run` is a runner which then queues the job again.
"""

import argparse
import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import kill_marked, sweep_memory
from rollmesh.core.process import OK, USAGE
from rollmesh.launch.devices import gpus_of_trainer, with_places
from rollmesh.launch.hosts import runner
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder
from rollmesh.launch.hosts.remote import CommandHost, RemoteChild, RunnerConnection
from rollmesh.launch.plan import ChildPlan, engine_roles, with_local_ranks, with_ranks

log = get_logger()

MODULE = "rollmesh.launch.hosts.slurm"
JOB_VARIABLE = "SLURM_JOB_ID"
NODE_VARIABLE = "SLURMD_NODENAME"
GPUS_VARIABLE = "SLURM_GPUS_ON_NODE"
SCONTROL_TIMEOUT_S = 60.0
SHARED_WITHIN_S = 20.0
"""Time for a shared file system to show another node's new file."""
LOOK_S = 0.5
FIRST_NODE_S = 900.0
"""Time for Slurm to report a lost first node; its SlurmdTimeout is 300 s by default."""


class Allocation(NamedTuple):
    """The nodes of the job in which this process runs."""

    job_id: str
    nodes: dict[str, str]
    """Addresses by name; the first is this node's."""

    @property
    def address(self) -> str:
        """The address of this node for the others."""
        return next(iter(self.nodes.values()))

    @property
    def others(self) -> list[str]:
        """The names of the other nodes."""
        return [*self.nodes][1:]


def find_allocation(environ: Mapping[str, str] = os.environ) -> Allocation:
    """Return the job's nodes; ConfigError if this process runs on none of them."""
    job_id, here = environ.get(JOB_VARIABLE, ""), environ.get(NODE_VARIABLE, "")
    names = scontrol("show", "hostnames", environ.get("SLURM_JOB_NODELIST", "")).split()
    if here not in names:
        raise ConfigError(
            f"--on slurm: job {job_id} has the nodes {', '.join(names)}, and this is none of them; "
            "run it there (srun --overlap --nodes=1 --ntasks=1 --pty ...), or submit a job by "
            "--nodes N"
        )
    found = node_addresses(scontrol("--oneliner", "show", "node", ",".join(names)))
    others = {name: resolved(name, found.get(name, name)) for name in names if name != here}
    return Allocation(job_id, {here: own_address([*others.values()]), **others})


def scontrol(*words: str) -> str:
    """Return what scontrol writes; ConfigError if it fails."""
    try:
        done = subprocess.run(
            ["scontrol", *words],
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        raise ConfigError(f"--on slurm: scontrol {words[0]} failed: {why.strip()}") from None
    return done.stdout


def node_addresses(lines: str) -> dict[str, str]:
    """Return NodeAddr by NodeName from `scontrol --oneliner show node`."""
    found = {}
    for line in lines.splitlines():
        fields = record(line)
        if name := fields.get("NodeName"):
            found[name] = fields.get("NodeAddr", name)
    return found


def resolved(node: str, address: str) -> str:
    """Return the IP address of a node; AddressError if its name is unknown here."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise AddressError(f"node {node}: no address of {address}: {error.strerror}") from None


def own_address(others: Sequence[str]) -> str:
    """Return this node's address for the others; the loopback's if there are none.

    The name of a machine often resolves to its loopback, so the route to another node decides.
    """
    if not others:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in others[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 9))  # sends nothing
        return str(probe.getsockname()[0])


def gpus_of_job(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that the job has on this node, as far as Slurm reports it."""
    word = environ.get(GPUS_VARIABLE, "")
    return int(word) if word.isdecimal() else 0


def sized(config: Config, num_nodes: int, num_gpus: int = 0) -> Config:
    """Return the settings with the numbers of ranks, engines and workers of a job of so many nodes;
    each has `num_gpus` GPUs (0: slurm.gpus_per_node). ConfigError if it has too few nodes.
    """
    num_gpus = num_gpus or config.slurm.gpus_per_node
    slurm = msgspec.structs.replace(config.slurm, gpus_per_node=num_gpus)
    config = with_local_ranks(config, num_gpus, num_local=num_gpus)
    trainer, engine, worker = config.trainer, config.engine, config.worker
    if (needed := num_trainer_nodes(config)) > num_nodes:
        raise ConfigError(
            f"trainer.num_ranks = {trainer.num_ranks}: with {trainer.local_ranks} on a node they "
            f"need {needed} nodes, and the job has {num_nodes}; raise --nodes, or "
            "trainer.num_local_ranks"
        )
    others = num_serving_nodes(config, num_nodes)
    if slurm.engines_per_node:
        count = slurm.engines_on_first + slurm.engines_per_node * others
        key = "num_servers" if engine.launch == "sglang" else "num_embedded"
        engine = msgspec.structs.replace(engine, **{key: count})
    if slurm.workers_per_node:
        worker = msgspec.structs.replace(worker, num_workers=slurm.workers_per_node * others)
    return msgspec.structs.replace(config, engine=engine, worker=worker, slurm=slurm)


def num_trainer_nodes(config: Config) -> int:
    """Return the number of nodes that have ranks of the trainer: the first ones of the job."""
    return math.ceil(config.trainer.num_ranks / config.trainer.local_ranks)


def num_serving_nodes(config: Config, num_nodes: int) -> int:
    """Return the number of nodes that have engines and workers: the last ones of the job.

    They are those without ranks of the trainer; if all have some, those besides the first.
    """
    return num_nodes - num_trainer_nodes(config) or max(num_nodes - 1, 1)


def check_gpus(config: Config) -> None:
    """Raise ConfigError if a node of the job has too few GPUs for its ranks and engines."""
    slurm = config.slurm
    config = sized(config, slurm.nodes)
    engine, trainer = config.engine, config.trainer
    if engine.launch != "sglang" or not engine.gpus_each:
        return
    is_on_gpus = len(gpus_of_trainer(config, slurm.gpus_per_node)) > 0
    ranks = Counter(rank // trainer.local_ranks for rank in range(trainer.num_ranks * is_on_gpus))
    num_serving = num_serving_nodes(config, slurm.nodes)
    spread = range(max(engine.num_servers - slurm.engines_on_first, 0))
    engines = Counter(slurm.nodes - num_serving + at % num_serving for at in spread)
    engines[0] += min(slurm.engines_on_first, engine.num_servers)
    for node in range(slurm.nodes):
        needed = ranks[node] + engines[node] * engine.gpus_each
        if needed > slurm.gpus_per_node:
            raise ConfigError(
                f"slurm.gpus_per_node = {slurm.gpus_per_node}: node {node + 1} of the job has "
                f"{ranks[node]} ranks of the trainer and {engines[node]} engines with "
                f"engine.gpus_each = {engine.gpus_each}, which need {needed} GPUs"
            )


def home_nodes(config: Config, plans: Sequence[ChildPlan], others: Sequence[str]) -> dict[str, str]:
    """Return the home nodes of the processes that do not run on the first node, by role.

    Ranks of the trainer fill one node after another. Engines and workers are dealt out in turn;
    router, trainer and dashboard stay on the first.
    """
    if not others:
        return {}
    trainer, serving = config.trainer, others[-num_serving_nodes(config, len(others) + 1) :]
    ranks = [plan.role for plan in plans if plan.is_rank]
    engines = [role for role in engine_roles(config) if role in {plan.role for plan in plans}]
    workers = [plan.role for plan in plans if plan.is_worker]
    homes = {role: others[number // trainer.local_ranks] for number, role in enumerate(ranks)}
    for roles in (engines[config.slurm.engines_on_first :], workers):
        homes |= {role: serving[number % len(serving)] for number, role in enumerate(roles)}
    return homes


class NodeChoice:
    """Which node a process is started on."""

    def __init__(self, homes: Mapping[str, str], avoid_s: float) -> None:
        """`homes` are the nodes of the roles; a lost node is avoided for `avoid_s`."""
        self._homes = homes
        self._avoid_s = avoid_s
        self._lost_at_s: dict[str, float] = {}
        self._places = dict(homes)
        """The node of each role's last start."""

    def lose(self, node: str, now_s: float) -> None:
        """Record that a node was lost."""
        self._lost_at_s[node] = now_s

    def choose(self, order: ChildOrder, now_s: float) -> str:
        """Return the node for a process: its home, unless that was lost and another was not.

        A process with GPUs stays at home, since the GPUs of the other nodes have their processes.
        """
        home = self._homes[order.role]
        usable = [
            node for node in dict.fromkeys(self._homes.values()) if self._is_usable(node, now_s)
        ]
        if home not in usable and usable and not order.num_gpus:
            placed = [*self._places.values()]
            home = min(usable, key=placed.count)
        self._places[order.role] = home
        return home

    def _is_usable(self, node: str, now_s: float) -> bool:
        lost_s = self._lost_at_s.get(node)
        return lost_s is None or now_s - lost_s >= self._avoid_s


class SlurmHost:
    """The nodes of the job besides the first; each has one runner, which srun starts."""

    def __init__(
        self,
        allocation: Allocation,
        homes: Mapping[str, str],
        config: Config,
        mark: str,
    ) -> None:
        """`homes` are the nodes of the roles; `mark` is that of the mesh."""
        settings, logs = config.slurm, config.run_folder() / "logs"
        self._choice = NodeChoice(homes, settings.avoid_node_s)
        self._nodes = {
            node: CommandHost(
                srun_command(allocation.job_id, node),
                node,
                allocation.nodes[node],
                logs,
                mark,
                settings.runner_timeout_s,
                config.launch.node_timeout_s,
                ("-m", MODULE, "run"),
            )
            for node in dict.fromkeys(homes.values())
        }
        self._connections: dict[str, RunnerConnection] = {}

    def start(self, order: ChildOrder, hooks: ChildCallbacks) -> RemoteChild:
        return RemoteChild(order, hooks, self._connect)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._nodes.values()))

    async def _connect(self, child: RemoteChild) -> RunnerConnection:
        for node, connection in [*self._connections.items()]:
            if not connection.is_open:
                self._lose(node)
        node = self._choice.choose(child.order, time.monotonic())
        try:
            self._connections[node] = await self._nodes[node].connect(child)
        except OSError:
            self._lose(node)
            raise
        return self._connections[node]

    def _lose(self, node: str) -> None:
        log.warning("node.lost", node=node)
        self._connections.pop(node, None)
        self._choice.lose(node, time.monotonic())


def place_in_job(
    config: Config, plans: Sequence[ChildPlan], allocation: Allocation, mark: str
) -> tuple[list[ChildPlan], dict[str, SlurmHost]]:
    """Return the plans with the addresses that they listen on, and the hosts of those that run on
    other nodes than the first.
    """
    on_gpus = len(gpus_of_trainer(config, config.slurm.gpus_per_node)) > 0
    plans = with_ranks(config, [*plans], allocation.address, int(on_gpus), share_nodes=True)
    homes = home_nodes(config, plans, allocation.others)
    host = SlurmHost(allocation, homes, config, mark)
    placed, engines = [], engine_roles(config)
    for plan in with_places(config, plans, homes, config.slurm.gpus_per_node):
        if plan.role in engines:
            node_address = "{host}" if plan.role in homes else allocation.address
            plan = msgspec.structs.replace(plan, bind=f"{node_address}:0")
        placed.append(plan)
    return placed, dict.fromkeys(homes, host)


def srun_command(job_id: str, node: str) -> list[str]:
    """Return the prefix of a command that runs on a node of the job, beside other steps."""
    one = ["--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    # All CPUs, memory and GPUs of the job on that node; the processes share them.
    shared = ["--overlap", "--cpu-bind=none"]
    return ["srun", f"--jobid={job_id}", *one, *shared, "--unbuffered", "--export=ALL"]


def prepare(mark: str, file: Path | None, within_s: float = SHARED_WITHIN_S) -> int:
    """Kill the processes with `mark` on this machine; return OK if it sees `file` in time."""
    node = os.environ.get(NODE_VARIABLE) or socket.gethostname()
    if num_killed := kill_marked(mark):
        sys.stderr.write(f"{node}: killed {num_killed} processes that {mark} left\n")
    sweep_memory()
    if file is None or is_seen(file, within_s):
        return OK
    sys.stderr.write(
        f"rollmesh: node {node} does not see {file}: run.folder must be on a file system that all "
        'nodes share, or publish.mode = "distributed"\n'
    )
    return USAGE


def is_seen(file: Path, within_s: float) -> bool:
    """Return whether a file exists, which another node has just made."""
    until_s = time.monotonic() + within_s
    while not file.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_S)
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # NFS: drops the cached absence
    return True


def end_job() -> None:
    """Queue the job again once its first node is lost, or cancel it if it may not be requeued.

    Return without that if the node is alive, or another one has done it.
    """
    job_id, restarts = os.environ[JOB_VARIABLE], os.environ.get("SLURM_RESTART_COUNT", "0")
    first = scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()[0]
    until_s = time.monotonic() + FIRST_NODE_S
    while "DOWN" not in record(scontrol("--oneliner", "show", "node", first)).get("State", ""):
        if time.monotonic() > until_s:
            return
        time.sleep(LOOK_S)
    job = record(scontrol("--oneliner", "show", "job", job_id))
    if job.get("JobState") == "RUNNING" and job.get("Restarts", "0") == restarts:
        sys.stderr.write(f"rollmesh: {first}, the first node of job {job_id}, is lost\n")
        is_requeued = job.get("Requeue") == "1"
        subprocess.run(
            ["scontrol", "requeue", job_id] if is_requeued else ["scancel", job_id], check=False
        )


def record(line: str) -> dict[str, str]:
    """Return the fields of one line of `scontrol --oneliner show`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def main() -> None:
    """Prepare a node, or be its runner."""
    if sys.argv[1:2] == ["run"]:
        if runner.main(sys.argv[2:]):
            end_job()
        return
    arguments = argparse.ArgumentParser(prog="slurm", allow_abbrev=False)
    arguments.add_argument("verb", choices=("prepare",))
    arguments.add_argument("mark", help="mark of the job's processes")
    arguments.add_argument("file", nargs="?", type=Path, help="a file that the node must see")
    options = arguments.parse_args()
    sys.exit(prepare(options.mark, options.file))


if __name__ == "__main__":
    main()
