"""`rollmesh scheduler agent` and `rollmesh scheduler ray`: how machines come into the fleet.

Invariants: a node is there while its agent beats; Ray is loaded by its own verb only, and is told
of in one line where it is not installed. Driven by people, one agent for each machine, or once for
a Ray cluster.
"""

# ruff: noqa: PLC0415 - each room is imported by its own verb only

import socket
import threading
from pathlib import Path

from rollmesh.cli.options import parser
from rollmesh.core.errors import ConfigError, UserError
from rollmesh.core.logs import setup
from rollmesh.core.process import OK, Stop
from rollmesh.core.share import FLEET_FILE
from rollmesh.scheduler.admission.fleet_file import read_fleet


def agent(argv: list[str]) -> int:
    """Beat until stopped."""
    from rollmesh.scheduler.nodes.agent import Agent, num_gpus, serve

    arguments = parser("scheduler agent", "Say each second that this machine's GPUs are there.")
    arguments.add_argument("--scheduler", required=True, metavar="ADDRESS", help="tcp://host:port")
    arguments.add_argument("--name", default=socket.gethostname(), help="(this host's)")
    arguments.add_argument("--gpus", type=int, help="how many (those that CUDA may see here)")
    arguments.add_argument("--labels", default="", metavar="A,B", help="what placement may ask for")
    options = arguments.parse_args(argv)
    if options.gpus is not None and options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: a node has one at least")
    labels = tuple(word for word in options.labels.split(",") if word)
    joining = Agent(options.name, options.gpus or num_gpus(), labels)
    setup("agent", None)
    stop = threading.Event()
    Stop(stop.set)
    serve(options.scheduler, joining, stop)
    return OK


def ray(argv: list[str]) -> int:
    """Start it in a cluster, look at it, or end it."""
    arguments = parser("scheduler ray", "Run the service in a Ray cluster, an agent on each node.")
    arguments.add_argument("fleet", type=Path, nargs="?", default=Path(FLEET_FILE))
    arguments.add_argument("--cluster", default="auto", metavar="ADDRESS", help="of Ray (auto)")
    arguments.add_argument(
        "--resource", default="GPU", help="what Ray counts a node's GPUs by (GPU)"
    )
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="say how its agents stand")
    what.add_argument("--down", action="store_true", help="end it; its journal stays")
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
        for node_id, (phase, why) in cluster.standing(options.cluster).items():
            print(f"{node_id} {phase}{f': {why}' if why else ''}")
    else:
        print(f"serves at {cluster.up(options.cluster, options.fleet, options.resource)}")
    return OK


def _check_port(path: Path) -> None:
    """ConfigError where a service that is started again would have another address."""
    bind = read_fleet(path).bind
    if bind.rpartition(":")[2] in ("0", "*"):
        raise ConfigError(f"{path}: bind = {bind}: name a port, by which it is found again")
