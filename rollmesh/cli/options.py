"""Arguments shared by several verbs.

- An argument of one name means the same with every verb.
- Settings are merged in one order: defaults, the file, `--set`.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollmesh.core import files
from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import ConfigError
from rollmesh.core.model_folders import resolve_model
from rollmesh.core.secret_files import process_engine_key
from rollmesh.core.share import Share, fleet_keys, token_file
from rollmesh.wire.keys import KEYS_VARIABLE, use_scheduler_keys
from rollmesh.wire.sockets import set_silence_timeout


def parser(verb: str, description: str) -> argparse.ArgumentParser:
    """Return a parser whose program name is `rollmesh VERB`."""
    return argparse.ArgumentParser(prog=f"rollmesh {verb}", description=description)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add `--set section.key=value`, which may be repeated."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a setting; may be repeated",
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every process of a mesh takes."""
    parser.add_argument("--config", type=Path, help="mesh.toml, or a run folder's config.json")
    add_set(parser)
    parser.add_argument(
        "--ready-fd", type=int, help="write a report to this descriptor when ready (used by launch)"
    )


def add_no_keys(parser: argparse.ArgumentParser) -> None:
    """Add `--no-keys`, for verbs that start a mesh."""
    parser.add_argument(
        "--no-keys",
        dest="has_keys",
        action="store_false",
        help="create no keys: any user of this machine can then join the mesh",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add `--run`, for verbs that connect to a mesh."""
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help=f"run folder with the mesh's keys (default: {KEYS_VARIABLE}, or the run under runs/ "
        "whose router has that address)",
    )


def add_listen(parser: argparse.ArgumentParser) -> None:
    """Add `--listen-fd`, for processes that serve HTTP."""
    parser.add_argument(
        "--listen-fd", type=int, help="serve HTTP on this inherited socket (used by launch)"
    )


def add_share(parser: argparse.ArgumentParser) -> None:
    """Add `--scheduler`, `--pipeline` and `--pipeline-token`, for `share_of`."""
    parser.add_argument(
        "--scheduler",
        default="",
        metavar="ADDRESS",
        help="tcp:// address of a shared fleet's scheduler",
    )
    parser.add_argument(
        "--pipeline", default="", metavar="ID", help="this run's name at the scheduler"
    )
    parser.add_argument(
        "--pipeline-token",
        default="",
        metavar="FILE",
        help="file with the token of that name (default: ROLLMESH_PIPELINE_TOKEN_FILE, else "
        "tokens/ID in the journal's folder of ./scheduler.toml)",
    )


def share_of(options: argparse.Namespace) -> Share | None:
    """Return the share of these options; None if the run shares nothing, ConfigError if one is
    missing.
    """
    address, pipeline = options.scheduler, options.pipeline
    if bool(address) != bool(pipeline):
        lacking = "--pipeline" if address else "--scheduler"
        raise ConfigError(f"--scheduler and --pipeline go together: {lacking} is missing")
    if address and not address.startswith("tcp://"):
        raise ConfigError(f"--scheduler {address}: write it as tcp://HOST:PORT")
    if not address:
        return None
    use_scheduler_keys(fleet_keys(token_file(pipeline, options.pipeline_token)))
    return Share(address, pipeline, options.pipeline_token)


def add_model_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--model-dir`, for `set_model` and `model_defaults`."""
    parser.add_argument(
        "--model-dir",
        type=lambda text: Path(resolve_model(text)),
        metavar="DIR",
        help="model folder in Hugging Face layout, or the id of a downloaded Hub model",
    )


def set_model(options: argparse.Namespace) -> None:
    """Make `--model-dir` an override of model.path."""
    if options.model_dir is not None:
        options.overrides.append(f"model.path={quoted(str(options.model_dir))}")


def model_defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the defaults that follow from `--model-dir`: the context length of the model."""
    num_tokens = context_of(options.model_dir) if options.model_dir else None
    return {"model": {"max_context_tokens": num_tokens}} if num_tokens else {}


def context_of(folder: Path) -> int | None:
    """Return the context length in the folder's config.json; None if unknown."""
    try:
        settings = orjson.loads((folder / "config.json").read_bytes())
        settings = (
            settings if "max_position_embeddings" in settings else settings.get("text_config", {})
        )
        return int(settings["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def quoted(text: str) -> str:
    """Return a TOML string."""
    return orjson.dumps(text).decode()


def config_of(options: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Config:
    """Load the settings of `--config` and `--set` over `defaults`; ConfigError in one line.

    A Hub id in model.path is replaced by its folder in the local cache. Files that the process
    writes from now on have the permissions of run.mode, and its connections the times of [network].
    """
    process_engine_key()  # reports a broken key at the start, and not at the first request
    config = load_config(options.config, options.overrides, defaults)
    files.set_file_mode(config.run.mode)
    set_silence_timeout(config.network.silence_timeout_s)
    model = msgspec.structs.replace(config.model, path=resolve_model(config.model.path))
    return msgspec.structs.replace(config, model=model)


def add_view(parser: argparse.ArgumentParser) -> None:
    """Add `--no-live`, for verbs that show a run."""
    parser.add_argument(
        "--no-live",
        dest="is_live",
        action="store_false",
        help="print a plain line now and then instead of a live view",
    )
