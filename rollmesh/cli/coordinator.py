"""`rollmesh coordinator`: between the engines of a pipeline and the scheduler of a shared fleet.

Invariant: what is wrong with the command line is told in one line before anything is dialled; the
order in which engines are named is that of the pipeline's generation workers. Driven by launch, or
by hand beside engines that somebody else started, with the router's `--asleep`.
"""

# ruff: noqa: PLC0415 - the room is imported by its own verb only

import argparse
from pathlib import Path

from rollmesh.cli.options import add_process_options, config_of, parser
from rollmesh.cli.processes import pass_gate
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.share import read_token


def main(argv: list[str]) -> int:
    """Coordinate until stopped."""
    from rollmesh.engine.backend import DEFAULT_BACKEND
    from rollmesh.serve.coordinator.events import CoordinatorSettings
    from rollmesh.serve.coordinator.process import CoordinatorAsk, run

    options = _arguments().parse_args(pass_gate(argv))
    _check(options)
    allow_descriptors(PEERS, "a coordinator")
    is_launched = options.ready_fd is not None
    config = config_of(options) if is_launched or options.config else None
    ask = CoordinatorAsk(
        settings=CoordinatorSettings(pipeline_id=options.pipeline, urls=tuple(options.engines)),
        scheduler=options.scheduler,
        router=options.router,
        weights=options.weights,
        run_folder=config.run_folder() if config and is_launched else None,
        backend=config.engine.backend if config else DEFAULT_BACKEND,
        ready_fd=options.ready_fd,
        token=read_token(options.pipeline, options.pipeline_token),
    )
    return run(ask)


def _arguments() -> argparse.ArgumentParser:
    arguments = parser("coordinator", "Wake a pipeline's engines, and put them to sleep.")
    arguments.add_argument("--scheduler", required=True, help="tcp:// address of the scheduler")
    arguments.add_argument("--pipeline", required=True, help="its name at the scheduler")
    arguments.add_argument(
        "--pipeline-token", default="", metavar="FILE", help="file with the token of that name"
    )
    arguments.add_argument("--router", required=True, help="tcp:// address of its router")
    arguments.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="of generation worker 0, then 1...: give it again for each",
    )
    arguments.add_argument(
        "--weights",
        type=Path,
        required=True,
        metavar="DIR",
        help="where its trainer publishes, such as runs/NAME/weights",
    )
    add_process_options(arguments)
    return arguments


def _check(options: argparse.Namespace) -> None:
    """UserError if nothing can be coordinated with these."""
    from rollmesh.core.addresses import why_no_engine_url

    if not options.engines:
        raise ConfigError("--engine URL: name the engine of each generation worker, in order")
    for url in options.engines:
        if why := why_no_engine_url(url):
            raise AddressError(f"--engine {url}: {why}")
    if len(set(options.engines)) < len(options.engines):
        raise ConfigError("--engine URL: one engine is named twice")
