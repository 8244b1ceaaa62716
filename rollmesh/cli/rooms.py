"""The verbs that run one process of a mesh: engine, router, train.

Invariants: nothing of a room is imported before its own verb is called, so that torch and its
weight stay out of every other process; a process that launch holds imports first and then waits.
Driven by launch, or by hand on another machine.
"""

# ruff: noqa: PLC0415 - each room is imported by its own verb only

import argparse
from contextlib import AbstractContextManager

from rollmesh.cli.options import add_listen, add_room, config_of, parser
from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.process import wait_for_go


def engine(argv: list[str]) -> int:
    """The embedded torch engine; it owns its arguments."""
    from rollmesh.engine.embedded.server import main

    allow_descriptors(PEERS, "an engine")
    return main(pass_gate(argv))


def router(argv: list[str]) -> int:
    """The router."""
    from rollmesh.serve.router.process import Engines, run

    arguments = parser("router", "Run a router: asks to workers, and the fleet table.")
    add_room(arguments)
    add_listen(arguments)
    arguments.add_argument(
        "--engine", dest="engines", action="append", default=[], help="URL of an engine"
    )
    arguments.add_argument("--bind", metavar="ADDRESS", help="instead of router.bind")
    arguments.add_argument(
        "--fixed-weights",
        action="store_true",
        help="nobody publishes here: engines serve the weights they have, whatever their version",
    )
    options = arguments.parse_args(argv)
    if options.bind:
        options.overrides.append(f"router.bind={options.bind}")
    allow_descriptors(PEERS, "a router")
    engines = Engines(tuple(options.engines), options.fixed_weights)
    run(config_of(options), engines, options.listen_fd, options.ready_fd)
    return 0


def train(argv: list[str]) -> int:
    """The trainer."""
    from rollmesh.trainer.process import run

    arguments = parser("train", "Train on the rollouts of a mesh.")
    add_room(arguments)
    arguments.add_argument("--router", required=True, help="tcp:// address of the router")
    arguments.add_argument(
        "--status",
        default="",
        metavar="URL",
        help="http:// address of the router, for the run's page; launch needs none",
    )
    options = arguments.parse_args(pass_gate(argv))
    config = config_of(options)
    if options.ready_fd is not None:
        run(config, options.router, options.ready_fd)
        return 0
    with watch_of(config, options.status):
        run(config, options.router, None)
    return 0


def watch_of(config: Config, url: str) -> AbstractContextManager[object]:
    """For a trainer without launch what launch does: the run's folder, and its telemetry."""
    from rollmesh.launch.folder import RunFolder
    from rollmesh.launch.watch import Watch

    return Watch(url, "trainer", RunFolder(config), SystemClock())


def pass_gate(argv: list[str]) -> list[str]:
    """Wait until launch lets us go, where it holds us; `argv` without its word for that.

    Called when the libraries are loaded: what takes seconds is done while the model is made.
    """
    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--go-fd", type=int)
    options, rest = arguments.parse_known_args(argv)
    wait_for_go(options.go_fd)
    return rest
