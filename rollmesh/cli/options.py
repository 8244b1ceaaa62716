"""Arguments that several verbs share.

Invariant: an argument of one name means the same with every verb, and settings are laid over each
other in one order: defaults, the file, `--set`. Driven by the verbs.
"""

import argparse
from pathlib import Path
from typing import Any

from rollmesh.core.config import Config, load_config


def parser(verb: str, description: str) -> argparse.ArgumentParser:
    """A parser that calls itself `rollmesh VERB`."""
    return argparse.ArgumentParser(prog=f"rollmesh {verb}", description=description)


def add_set(parser: argparse.ArgumentParser) -> None:
    """`--set section.key=value`, any number of times."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a setting; may be given again",
    )


def add_room(parser: argparse.ArgumentParser) -> None:
    """What every process of a mesh is started with."""
    parser.add_argument("--config", type=Path, help="mesh.toml, or a run folder's config.json")
    add_set(parser)
    parser.add_argument("--ready-fd", type=int, help="report on this descriptor when serving")


def add_listen(parser: argparse.ArgumentParser) -> None:
    """`--listen-fd`, for processes with an HTTP face."""
    parser.add_argument("--listen-fd", type=int, help="serve HTTP on this inherited socket")


def config_of(options: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """The settings that `--config` and `--set` make, over `defaults`; ConfigError in one line."""
    return load_config(options.config, options.overrides, defaults)


def add_view(parser: argparse.ArgumentParser) -> None:
    """`--no-live`, for verbs that show a run."""
    parser.add_argument(
        "--no-live",
        dest="is_live",
        action="store_false",
        help="print a plain line now and then instead of a live view",
    )
