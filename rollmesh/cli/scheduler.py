"""`rollmesh scheduler VERB ...`: several pipelines on one GPU fleet.

Owns the list of its verbs, and the two processes that it is made of: the service and admission.
Invariant: as in main.py, a verb's module is imported only when it is called. Driven by people, by
`rollmesh scheduler up`, and by the actor that keeps the service in a Ray cluster.
"""

# ruff: noqa: PLC0415 - each room is imported by its own verb only

import argparse
from pathlib import Path

from rollmesh.cli.main import Verb, load
from rollmesh.cli.options import parser
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.errors import JournalDamaged, JournalError, UserError
from rollmesh.core.process import OK, USAGE
from rollmesh.core.share import FLEET_FILE
from rollmesh.core.text import instead_of
from rollmesh.scheduler.admission.fleet_file import (
    admission_path,
    keys_of_fleet,
    policy_of,
    read_fleet,
    settings_of,
)
from rollmesh.scheduler.planning.policies import DEFAULT_POLICY, policy_names
from rollmesh.wire.keys import use_scheduler_keys
from rollmesh.wire.scheduling import JoinNode

VERBS = {
    "init": Verb("rollmesh.cli.scheduler:init", "write a scheduler.toml to begin with"),
    "up": Verb("rollmesh.cli.scheduler_up:main", "start the service and admission; let all in"),
    "serve": Verb("rollmesh.cli.scheduler:serve", "run the service alone"),
    "admission": Verb("rollmesh.cli.scheduler:admission", "run the admission process alone"),
    "agent": Verb("rollmesh.cli.scheduler_nodes:agent", "say that this machine is there"),
    "ray": Verb("rollmesh.cli.scheduler_nodes:ray", "run it all in a Ray cluster"),
    "status": Verb("rollmesh.cli.scheduler_verbs:status", "say how the fleet stands"),
    "explain": Verb("rollmesh.cli.scheduler_verbs:explain", "say why a pipeline waits"),
    "register": Verb("rollmesh.cli.scheduler_verbs:register", "place pipelines, by the file"),
    "admit": Verb("rollmesh.cli.scheduler_verbs:admit", "let pipelines ask for GPUs"),
    "kill": Verb("rollmesh.cli.scheduler_verbs:kill", "end a pipeline and free its GPUs"),
    "unregister": Verb("rollmesh.cli.scheduler_verbs:unregister", "let a pipeline go in order"),
    "drain": Verb("rollmesh.cli.scheduler_verbs:drain", "start nothing new on a node"),
    "simulate": Verb(
        "rollmesh.scheduler.simulator.command:simulate", "compare policies on a trace"
    ),
    "gantt": Verb("rollmesh.scheduler.simulator.command:gantt", "draw what a journal remembers"),
}

EXAMPLE = """\
# A fleet that pipelines share; docs/howto/share-a-fleet.md explains the keys.
# Start it with `rollmesh scheduler up {path}`.

bind = "tcp://127.0.0.1:7070"       # hooks, coordinators, agents and verbs dial this
http_bind = "127.0.0.1:7071"        # /status, /metrics, /healthz
journal = "scheduler"               # folder; a scheduler that was killed rises from it
policy = "{policy}"                     # one of: {policies}

[[nodes]]                           # others join by `rollmesh scheduler agent`
name = "here"
gpus = 4

# GPUs by their numbers, or how many: then they are placed for you.
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
    """What `rollmesh scheduler --help` says."""
    lines = [f"  {name:<12}{verb.line}" for name, verb in VERBS.items()]
    head = ["usage: rollmesh scheduler VERB ...", "", "Several pipelines on one GPU fleet.", ""]
    return "\n".join([*head, *lines, "", "`rollmesh scheduler VERB --help` explains a verb."])


def init(argv: list[str]) -> int:
    """Write the example; UserError if the file is there already."""
    arguments = parser("scheduler init", "Write a scheduler.toml with a fleet of two pipelines.")
    arguments.add_argument("path", type=Path, nargs="?", default=Path(FLEET_FILE))
    path: Path = arguments.parse_args(argv).path
    try:
        with path.open("x") as file:
            file.write(_example(path))
    except FileExistsError:
        raise UserError(f"{path} is there already; remove it or name another file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name another file") from None
    print(f"wrote {path}; `rollmesh scheduler up {path}` starts it")
    return OK


def _example(path: Path) -> str:
    policies = ", ".join(policy_names())
    return EXAMPLE.format(path=path, policy=DEFAULT_POLICY, policies=policies)


def serve(argv: list[str]) -> int:
    """The service."""
    from rollmesh.scheduler.admission.desk import Secrets
    from rollmesh.scheduler.service.process import ServiceOptions, run
    from rollmesh.scheduler.service.state import SchedulerSettings

    arguments = _arguments("serve", "Run the scheduler's service: it says whose each GPU is.")
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
        settings=settings_of(fleet.service, SchedulerSettings, f"{options.fleet}: [service]"),
        nodes=tuple(nodes),
        listen_fd=options.listen_fd,
        ready_fd=options.ready_fd,
        operator_token=Secrets(Path(fleet.journal)).operator_token(),
    )
    allow_descriptors(PEERS, "a scheduler")
    try:
        run(ask)
    except JournalDamaged as error:
        raise UserError(
            f"{error}; put a copy back, or move {fleet.journal} away: an empty one is begun, "
            "which knows of no pipeline that runs"
        ) from None
    except JournalError as error:
        raise UserError(f"{error}; look to its disk") from None
    return OK


def admission(argv: list[str]) -> int:
    """The admission process."""
    from rollmesh.scheduler.admission.process import run

    options = _arguments("admission", "Run admission: register, admit, kill...").parse_args(argv)
    fleet = read_fleet(options.fleet)
    use_scheduler_keys(keys_of_fleet(fleet))
    run(Path(admission_path(fleet)), fleet.bind, Path(fleet.journal), options.ready_fd)
    return OK


def _arguments(verb: str, description: str) -> argparse.ArgumentParser:
    """What both processes are started with."""
    arguments = parser(f"scheduler {verb}", description)
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    arguments.add_argument("--ready-fd", type=int, help="report on this descriptor when serving")
    return arguments
