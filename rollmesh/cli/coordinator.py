"""`rollmesh coordinator`: connects the engines of a pipeline with the scheduler of a shared fleet.

- Options are checked before anything is dialled. Engines are given in the order of the pipeline's
  generation workers.
- For engines not started by launch, run the router with `--asleep`.
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
    from rollmesh.core.config import EngineConfig
    from rollmesh.serve.coordinator.process import CoordinatorOptions, run_coordinator
    from rollmesh.serve.coordinator.worker import CoordinatorSettings

    options = _arguments().parse_args(pass_gate(argv))
    _check(options)
    allow_descriptors(PEERS, "a coordinator")
    is_launched = options.ready_fd is not None
    config = config_of(options) if is_launched or options.config else None
    ask = CoordinatorOptions(
        settings=CoordinatorSettings(pipeline_id=options.pipeline, urls=tuple(options.engines)),
        scheduler=options.scheduler,
        router=options.router,
        weights=options.weights,
        run_folder=config.run_folder() if config and is_launched else None,
        engine=config.engine if config else EngineConfig(),
        ready_fd=options.ready_fd,
        token=read_token(options.pipeline, options.pipeline_token),
    )
    return run_coordinator(ask)


def _arguments() -> argparse.ArgumentParser:
    arguments = parser("coordinator", "Wake a pipeline's engines and put them to sleep.")
    arguments.add_argument("--scheduler", required=True, help="tcp:// address of the scheduler")
    arguments.add_argument("--pipeline", required=True, help="the pipeline's name at the scheduler")
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
        help="engine of generation worker 0, then 1...; repeatable",
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
    """UserError for options that cannot work."""
    from rollmesh.core.addresses import why_no_engine_url

    if not options.engines:
        raise ConfigError("--engine URL: name the engine of each generation worker, in order")
    for url in options.engines:
        if why := why_no_engine_url(url):
            raise AddressError(f"--engine {url}: {why}")
    if len(set(options.engines)) < len(options.engines):
        raise ConfigError("--engine URL: an engine is listed twice")
