"""Arguments that several verbs share.

Invariant: an argument of one name means the same with every verb, and settings are laid over each
other in one order: defaults, the file, `--set`. Driven by the verbs.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollmesh.core import file_modes
from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import ConfigError
from rollmesh.core.handed import process_engine_key
from rollmesh.core.model_folder import resolve_model
from rollmesh.core.share import Share, fleet_keys, token_file
from rollmesh.wire.keys import KEYS_VARIABLE, use_scheduler_keys


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


def add_no_keys(parser: argparse.ArgumentParser) -> None:
    """`--no-keys`, for verbs that start a mesh."""
    parser.add_argument(
        "--no-keys",
        dest="has_keys",
        action="store_false",
        help="make no keys: any user of this machine can then join",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """`--run`, for verbs that dial a mesh."""
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help=f"run folder with the mesh's keys (default: {KEYS_VARIABLE}, or the run under runs/ "
        "whose router has that address)",
    )


def add_listen(parser: argparse.ArgumentParser) -> None:
    """`--listen-fd`, for processes with an HTTP face."""
    parser.add_argument("--listen-fd", type=int, help="serve HTTP on this inherited socket")


def add_share(parser: argparse.ArgumentParser) -> None:
    """`--scheduler`, `--pipeline` and `--pipeline-token`, for `share_of`."""
    parser.add_argument(
        "--scheduler",
        default="",
        metavar="ADDRESS",
        help="tcp:// address of the scheduler of a fleet that other runs share",
    )
    parser.add_argument("--pipeline", default="", metavar="ID", help="this run's name there")
    parser.add_argument(
        "--pipeline-token",
        default="",
        metavar="FILE",
        help="file with the token of that name (default: ROLLMESH_PIPELINE_TOKEN_FILE, else "
        "tokens/ID in the journal's folder of ./scheduler.toml)",
    )


def share_of(options: argparse.Namespace) -> Share | None:
    """What they say; None for a run that shares nothing, ConfigError where one is missing."""
    address, pipeline = options.scheduler, options.pipeline
    if bool(address) != bool(pipeline):
        lacking = "--pipeline" if address else "--scheduler"
        raise ConfigError(f"--scheduler and --pipeline go together: name {lacking}, too")
    if address and not address.startswith("tcp://"):
        raise ConfigError(f"--scheduler {address}: write it as tcp://HOST:PORT")
    if not address:
        return None
    use_scheduler_keys(fleet_keys(token_file(pipeline, options.pipeline_token)))
    return Share(address, pipeline, options.pipeline_token)


def add_model_dir(parser: argparse.ArgumentParser) -> None:
    """`--model-dir`, for `lay_model_over` and `model_defaults`."""
    parser.add_argument(
        "--model-dir",
        type=lambda text: Path(resolve_model(text)),
        metavar="DIR",
        help="model folder in Hugging Face layout, or the id of a downloaded model of the hub",
    )


def lay_model_over(options: argparse.Namespace) -> None:
    """`--model-dir` becomes the setting, over the file's."""
    if options.model_dir is not None:
        options.overrides.append(f"model.path={quoted(str(options.model_dir))}")


def model_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """What follows from `--model-dir`, under the file's: the context length of the model."""
    num_tokens = context_of(options.model_dir) if options.model_dir else None
    return {"model": {"max_context_tokens": num_tokens}} if num_tokens else {}


def context_of(folder: Path) -> int | None:
    """What the folder's config.json says that the model can hold."""
    try:
        told = orjson.loads((folder / "config.json").read_bytes())
        told = told if "max_position_embeddings" in told else told.get("text_config", {})
        return int(told["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def quoted(text: str) -> str:
    """As a string of TOML."""
    return orjson.dumps(text).decode()


def config_of(options: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """Load the settings of `--config` and `--set` over `defaults`; ConfigError in one line.

    A hub id in model.path becomes its folder in the local cache. Files that the process writes from
    now on have the permissions of run.mode.
    """
    process_engine_key()  # a fault in it is reported at the start, and not by the first request
    config = load_config(options.config, options.overrides, defaults)
    file_modes.use(config.run.mode)
    model = msgspec.structs.replace(config.model, path=resolve_model(config.model.path))
    return msgspec.structs.replace(config, model=model)


def add_view(parser: argparse.ArgumentParser) -> None:
    """`--no-live`, for verbs that show a run."""
    parser.add_argument(
        "--no-live",
        dest="is_live",
        action="store_false",
        help="print a plain line now and then instead of a live view",
    )
