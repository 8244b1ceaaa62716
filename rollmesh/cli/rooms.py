"""The verbs that run one process of a mesh: engine, router, train.

Invariants: nothing of a room is imported before its own verb is called, so that torch and its
weight stay out of every other process; a process that launch holds imports first and then waits.
Driven by launch, or by hand on another machine.
"""

# ruff: noqa: PLC0415 - each room is imported by its own verb only

import argparse
from pathlib import Path

from rollmesh.cli.options import (
    add_listen,
    add_room,
    add_share,
    config_of,
    parser,
    share_of,
)
from rollmesh.core.clock import SystemClock
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.engine_url import why_no_engine_url
from rollmesh.core.errors import AddressError
from rollmesh.core.handed import protect_memory
from rollmesh.core.process import OK, wait_for_go
from rollmesh.core.run_state import RunState


def engine(argv: list[str]) -> int:
    """The embedded torch engine; it owns its arguments."""
    from rollmesh.engine.embedded.server import main

    allow_descriptors(PEERS, "an engine")
    return main(with_newest(pass_gate(argv)))


def router(argv: list[str]) -> int:
    """The router."""
    from rollmesh.engine.member import UNVERSIONED
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
    arguments.add_argument(
        "--asleep",
        action="store_true",
        help="engines stand on GPUs that others share: none serves until a coordinator wakes it",
    )
    arguments.add_argument(
        "--least-version",
        type=int,
        default=UNVERSIONED,
        help="engines whose weights are older than this wait for the publisher",
    )
    options = arguments.parse_args(argv)
    for url in options.engines:
        if why := why_no_engine_url(url):
            raise AddressError(f"--engine {url}: {why}")
    if options.bind:
        options.overrides.append(f"router.bind={options.bind}")
    allow_descriptors(PEERS, "a router")
    engines = Engines(
        tuple(options.engines), options.fixed_weights, options.least_version, options.asleep
    )
    protect_memory()
    run(config_of(options), engines, options.listen_fd, options.ready_fd)
    return 0


def train(argv: list[str]) -> int:
    """The trainer; alone, it does for its run's folder and telemetry what launch does."""
    from rollmesh.cli.resume import add_go_on, add_resume, resume_command, settings_of
    from rollmesh.launch.folder import RunFolder
    from rollmesh.launch.telemetry import TelemetryThread
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
    add_share(arguments)
    add_resume(arguments)
    add_go_on(arguments)
    options = arguments.parse_args(pass_gate(argv))
    share, config = share_of(options), settings_of(options)
    if options.ready_fd is not None:
        return run(config, options.router, options.ready_fd, share)
    command = resume_command("train", argv)
    folder = RunFolder(config, resume=options.resume, resume_command=command)
    try:
        with TelemetryThread(options.status, "trainer", folder, SystemClock()):
            code = run(config, options.router, None, share)
    except BaseException as error:
        folder.end(RunState.FAILED, str(error) or type(error).__name__)
        raise
    folder.end(RunState.DONE if code == OK else RunState.STOPPED)
    return code


def with_newest(argv: list[str]) -> list[str]:
    """`--newest-of RUN/weights` as the weights that were published last there, if any were.

    For launch, which starts an engine again: what is newest is known only by then.
    """
    from rollmesh.launch.plan import newest_published, weights_options

    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--newest-of", type=Path)
    options, rest = arguments.parse_known_args(argv)
    newest = newest_published(options.newest_of) if options.newest_of else None
    return [*rest, *weights_options(str(newest.weights), newest.policy_version)] if newest else rest


def pass_gate(argv: list[str]) -> list[str]:
    """Wait until launch lets us go, where it holds us; `argv` without its word for that.

    Called when the libraries are loaded: what takes seconds is done while the model is made.
    """
    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--go-fd", type=int)
    options, rest = arguments.parse_known_args(argv)
    wait_for_go(options.go_fd)
    return rest
