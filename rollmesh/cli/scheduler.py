"""`rollmesh scheduler VERB ...`: several pipelines on one GPU fleet.

- Lists the verbs, and runs the long-lived processes: service, admission, node agent, and the
  service in Ray.
- As in main.py, a verb's module is imported only when it is called; Ray is imported by its own verb
  only.
"""

import argparse
import socket
import threading
from pathlib import Path

from rollmesh.cli.main import Verb, load
from rollmesh.cli.options import parser
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.errors import ConfigError, JournalDamaged, JournalError, UserError
from rollmesh.core.logs import setup
from rollmesh.core.process import OK, USAGE, Stop
from rollmesh.core.share import FLEET_FILE
from rollmesh.core.text import instead_of
from rollmesh.scheduler.admission.fleet_file import (
    admission_path,
    convert_settings,
    keys_of_fleet,
    policy_of,
    read_fleet,
)
from rollmesh.scheduler.planning.policies import DEFAULT_POLICY, policy_names
from rollmesh.wire.keys import use_scheduler_keys
from rollmesh.wire.scheduling import JoinNode

# ruff: noqa: PLC0415 - each room is imported by its own verb only


VERBS = {
    "init": Verb("rollmesh.cli.scheduler:init", "write a scheduler.toml to begin with"),
    "up": Verb("rollmesh.cli.scheduler_verbs:up", "start the service and admission; admit all"),
    "serve": Verb("rollmesh.cli.scheduler:serve", "run the service alone"),
    "admission": Verb("rollmesh.cli.scheduler:admission", "run the admission process alone"),
    "agent": Verb("rollmesh.cli.scheduler:agent", "add this machine to the fleet"),
    "ray": Verb("rollmesh.cli.scheduler:ray", "run the scheduler in a Ray cluster"),
    "status": Verb("rollmesh.cli.scheduler_verbs:status", "show nodes and pipelines"),
    "explain": Verb("rollmesh.cli.scheduler_verbs:explain", "show why a pipeline waits"),
    "register": Verb("rollmesh.cli.scheduler_verbs:register", "place pipelines of the file"),
    "admit": Verb("rollmesh.cli.scheduler_verbs:admit", "let pipelines request GPUs"),
    "kill": Verb("rollmesh.cli.scheduler_verbs:kill", "kill a pipeline and free its GPUs"),
    "unregister": Verb("rollmesh.cli.scheduler_verbs:unregister", "let a pipeline leave"),
    "drain": Verb("rollmesh.cli.scheduler_verbs:drain", "start nothing new on a node"),
    "simulate": Verb(
        "rollmesh.scheduler.simulator.comparison:simulate", "compare policies on a trace"
    ),
    "gantt": Verb("rollmesh.scheduler.simulator.comparison:gantt", "draw the history of a journal"),
}

EXAMPLE = """\
# A fleet that pipelines share; docs/howto/share-a-fleet.md explains the keys.
# Start it with `rollmesh scheduler up {path}`.

bind = "tcp://127.0.0.1:7070"       # hooks, coordinators, agents and verbs dial this
http_bind = "127.0.0.1:7071"        # /status, /metrics, /healthz
journal = "scheduler"               # folder; a killed scheduler resumes from it
policy = "{policy}"                     # one of: {policies}

[[nodes]]                           # others join by `rollmesh scheduler agent`
name = "here"
gpus = 4

# GPUs by their numbers, or their count, to be placed for you.
[pipelines.math]
clusters.actor_train = [0, 1]
generation = [0, 1, 2, 3]

[pipelines.code]
clusters.actor_train = [2, 3]
generation = [0, 1, 2, 3]
"""


def main(argv: list[str]) -> int:
    """Find the verb and call it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return OK if argv else USAGE
    verb = VERBS.get(argv[0])
    if verb is None:
        raise UserError(f"no verb {argv[0]!r} of the scheduler; {instead_of(argv[0], VERBS)}")
    return load(verb)(argv[1:])


def usage() -> str:
    """Text of `rollmesh scheduler --help`."""
    lines = [f"  {name:<12}{verb.line}" for name, verb in VERBS.items()]
    head = ["usage: rollmesh scheduler VERB ...", "", "Several pipelines on one GPU fleet.", ""]
    return "\n".join([*head, *lines, "", "`rollmesh scheduler VERB --help` explains a verb."])


def init(argv: list[str]) -> int:
    """Write the example; UserError if the file exists."""
    arguments = parser("scheduler init", "Write a scheduler.toml with a fleet of two pipelines.")
    arguments.add_argument("path", type=Path, nargs="?", default=Path(FLEET_FILE))
    path: Path = arguments.parse_args(argv).path
    try:
        with path.open("x") as file:
            file.write(_example(path))
    except FileExistsError:
        raise UserError(f"{path} exists already; remove it or name another file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another file") from None
    print(f"wrote {path}; `rollmesh scheduler up {path}` starts it")
    return OK


def _example(path: Path) -> str:
    policies = ", ".join(policy_names())
    return EXAMPLE.format(path=path, policy=DEFAULT_POLICY, policies=policies)


def serve(argv: list[str]) -> int:
    """Run the service."""
    from rollmesh.scheduler.admission.server import TokenFiles
    from rollmesh.scheduler.service.process import ServiceOptions, run
    from rollmesh.scheduler.service.state import SchedulerSettings

    arguments = _arguments("serve", "Run the scheduler's service, which assigns the GPUs.")
    arguments.add_argument("--listen-fd", type=int, help="serve HTTP on this inherited socket")
    options = arguments.parse_args(argv)
    fleet = read_fleet(options.fleet)
    use_scheduler_keys(keys_of_fleet(fleet))
    nodes = [
        JoinNode(f"file-{node.name}", node.name, node.gpus, node.labels, beats=False)
        for node in fleet.nodes
    ]
    ask = ServiceOptions(
        bind=fleet.bind,
        http_bind=fleet.http_bind,
        journal=Path(fleet.journal),
        policy=policy_of(fleet, str(options.fleet)),
        settings=convert_settings(fleet.service, SchedulerSettings, f"{options.fleet}: [service]"),
        nodes=tuple(nodes),
        listen_fd=options.listen_fd,
        ready_fd=options.ready_fd,
        operator_token=TokenFiles(Path(fleet.journal)).operator_token(),
    )
    allow_descriptors(PEERS, "a scheduler")
    try:
        run(ask)
    except JournalDamaged as error:
        raise UserError(
            f"{error}; restore a copy, or move {fleet.journal} away to start with an empty "
            "journal, which knows of no running pipeline"
        ) from None
    except JournalError as error:
        raise UserError(f"{error}; check its disk") from None
    return OK


def admission(argv: list[str]) -> int:
    """Run the admission process."""
    from rollmesh.scheduler.admission.server import run_admission

    options = _arguments("admission", "Run admission: register, admit, kill...").parse_args(argv)
    fleet = read_fleet(options.fleet)
    use_scheduler_keys(keys_of_fleet(fleet))
    run_admission(Path(admission_path(fleet)), fleet.bind, Path(fleet.journal), options.ready_fd)
    return OK


def _arguments(verb: str, description: str) -> argparse.ArgumentParser:
    """Arguments of both processes."""
    arguments = parser(f"scheduler {verb}", description)
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    arguments.add_argument("--ready-fd", type=int, help="report on this descriptor when serving")
    return arguments


# ruff: noqa: PLC0415 - each room is imported by its own verb only


def agent(argv: list[str]) -> int:
    """Send heartbeats until stopped."""
    from rollmesh.scheduler.nodes.agent import NodeMachine, num_gpus, serve

    arguments = parser("scheduler agent", "Report each second that this machine is available.")
    arguments.add_argument("--scheduler", required=True, metavar="ADDRESS", help="tcp://host:port")
    arguments.add_argument(
        "--name", default=socket.gethostname(), help="name of the node (host name)"
    )
    arguments.add_argument("--gpus", type=int, help="how many (default: those CUDA sees)")
    arguments.add_argument("--labels", default="", metavar="A,B", help="labels for placement")
    options = arguments.parse_args(argv)
    if options.gpus is not None and options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: a node has at least one")
    labels = tuple(word for word in options.labels.split(",") if word)
    joining = NodeMachine(options.name, options.gpus or num_gpus(), labels)
    setup("agent", None)
    stop = threading.Event()
    Stop(stop.set)
    serve(options.scheduler, joining, stop)
    return OK


def ray(argv: list[str]) -> int:
    """Start the scheduler in a Ray cluster, show its agents, or stop it."""
    arguments = parser("scheduler ray", "Run the service in a Ray cluster, an agent on each node.")
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    arguments.add_argument("--cluster", default="auto", metavar="ADDRESS", help="of Ray (auto)")
    arguments.add_argument(
        "--resource", default="GPU", help="Ray resource that counts a node's GPUs (default: GPU)"
    )
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="show its agents")
    what.add_argument("--down", action="store_true", help="stop it; its journal stays")
    options = arguments.parse_args(argv)
    if not options.status and not options.down:
        _check_port(options.fleet)
    try:
        from rollmesh.scheduler.nodes import ray as cluster
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise UserError("scheduler ray needs Ray: pip install '.[ray]' in a checkout") from None
    if options.down:
        cluster.down(options.cluster)
    elif options.status:
        for node_id, (phase, why) in cluster.agent_states(options.cluster).items():
            print(f"{node_id} {phase}{f': {why}' if why else ''}")
    else:
        print(f"serves at {cluster.up(options.cluster, options.fleet, options.resource)}")
    return OK


def _check_port(path: Path) -> None:
    """ConfigError if a restarted service would have another address."""
    bind = read_fleet(path).bind
    if bind.rpartition(":")[2] in ("0", "*"):
        raise ConfigError(f"{path}: bind = {bind}: use a fixed port, for restarts")
