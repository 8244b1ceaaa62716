"""`rollmesh gateway`: the capture gateway alone, for agents that run elsewhere.

Invariant: what is wrong with the command line is told before anything serves, in one line that
names the option. Driven by people, and by scripts that wait for its address.
"""

# ruff: noqa: PLC0415 - the room is imported by its own verb only

import argparse
import os
from pathlib import Path
from typing import Any

from rollmesh.cli.options import (
    add_listen,
    add_model_dir,
    add_room,
    config_of,
    lay_model_over,
    model_defaults,
    parser,
    quoted,
)
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError, ModelError
from rollmesh.core.handed import protect_memory
from rollmesh.core.model_folder import why_no_folder
from rollmesh.core.redaction import register_secret
from rollmesh.core.secret_file import read_or_make_secret, read_secret

BIND = "127.0.0.1:8100"
UPSTREAM_KEY_VARIABLE = "ROLLMESH_UPSTREAM_KEY"


def main(argv: list[str]) -> int:
    """Serve."""
    options = _arguments().parse_args(argv)
    _check_used(options)
    from rollmesh.serve.interception.gateway import GatewayOptions, run

    _lay_over(options)
    config = config_of(options, _defaults(options))
    engines = tuple(options.engines or config.engine.urls)
    _check(options, engines, config.model.path)
    allow_descriptors(PEERS, "a gateway")
    protect_memory()
    ask = GatewayOptions(
        config=config,
        capture=options.capture,
        engines=engines,
        admin_token=read_or_make_secret(options.admin_token_file),
        upstream_key=_upstream_key(options),
        journal=_journal(options),
        listen_fd=options.listen_fd,
        ready_fd=options.ready_fd,
        tls=_tls(options),
        is_plain=options.plain,
        print_line=lambda line: print(line, flush=True),
    )
    run(ask)
    return 0


def _arguments() -> argparse.ArgumentParser:
    arguments = parser("gateway", "Run the capture gateway alone: sessions for agents elsewhere.")
    arguments.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="an SGLang server or, for relay, anything with a chat endpoint; may be given again",
    )
    add_model_dir(arguments)
    arguments.add_argument("--host", help="where to listen (127.0.0.1)")
    arguments.add_argument("--port", type=int, help="where to listen (8100; 0 picks a free one)")
    arguments.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): serve https"
    )
    arguments.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    arguments.add_argument(
        "--plain",
        action="store_true",
        help="plain HTTP also on an address that other machines can reach, behind a proxy with TLS",
    )
    arguments.add_argument(
        "--admin-token-file",
        type=Path,
        required=True,
        help="holds the token of /admin; made, random, if it is missing",
    )
    arguments.add_argument(
        "--capture",
        choices=["tokens", "relay"],
        default="tokens",
        help="tokens: rendered here and sampled as exact tokens; relay: forwarded as they are",
    )
    arguments.add_argument(
        "--journal",
        type=Path,
        metavar="DIR",
        help="keeps what sessions did, so that they outlive the gateway; beside the token file",
    )
    arguments.add_argument(
        "--no-journal", action="store_true", help="sessions end with the process"
    )
    arguments.add_argument(
        "--upstream-key-file",
        type=Path,
        help=f"relay: the provider's key (or set {UPSTREAM_KEY_VARIABLE})",
    )
    add_room(arguments)
    add_listen(arguments)
    return arguments


def _check_used(options: argparse.Namespace) -> None:
    """ConfigError for an option that would change nothing beside the others."""
    if options.capture == "tokens" and options.upstream_key_file is not None:
        raise ConfigError(
            f"--upstream-key-file {options.upstream_key_file}: engines are asked without a key; "
            "leave it out, or --capture relay"
        )
    if options.capture == "relay" and options.model_dir is not None:
        raise ConfigError(
            f"--model-dir {options.model_dir}: a relay renders nothing; "
            "leave it out, or --capture tokens"
        )
    if options.no_journal and options.journal is not None:
        raise ConfigError(f"--journal {options.journal}: --no-journal keeps none; leave one out")
    for name in ("host", "port"):
        told = getattr(options, name)
        if options.listen_fd is not None and told is not None:
            raise ConfigError(
                f"--{name} {told}: the socket of --listen-fd has its address; leave one out"
            )


def _lay_over(options: argparse.Namespace) -> None:
    """What the options say becomes settings, over the file's."""
    lay_model_over(options)
    if options.host is not None or options.port is not None:
        host, _, port = BIND.rpartition(":")
        host = options.host or host
        host = f"[{host}]" if ":" in host else host
        port = port if options.port is None else str(options.port)
        options.overrides.append(f"interception.bind={quoted(f'{host}:{port}')}")


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """A gateway's own, under the file's: its address, and the context length of the model."""
    return {"interception": {"bind": BIND}, **model_defaults(options)}


def _check(options: argparse.Namespace, engines: tuple[str, ...], model: str) -> None:
    """UserError if the gateway cannot work with these."""
    from rollmesh.core.engine_url import why_no_engine_url
    from rollmesh.engine.http import target

    if not engines:
        raise ConfigError("--engine URL: name at least one engine, such as http://127.0.0.1:30000")
    for url in engines:
        if options.capture == "tokens" and (why := why_no_engine_url(url)):
            raise AddressError(f"--engine {url}: {why}")
        try:
            target("GET", url)
        except AddressError as error:
            raise AddressError(f"--engine {error}") from None
    if options.capture == "tokens" and not model:
        raise ModelError("--model-dir DIR is needed to capture tokens; --capture relay needs none")
    if options.capture == "tokens" and (why := why_no_folder(model)):
        raise ModelError(f"--model-dir {model}: {why}")


def _tls(options: argparse.Namespace) -> tuple[Path, Path] | None:
    """ConfigError if one file is given without the other."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise ConfigError(f"--tls-{given} {certificate or key}: --tls-{missing} is missing")
    if options.plain:
        raise ConfigError("--plain: --tls-cert and --tls-key serve https; leave --plain out")
    return certificate, key


def _journal(options: argparse.Namespace) -> Path | None:
    """Beside the token file: whoever may read the one may read the other."""
    if options.no_journal:
        return None
    token_file: Path = options.admin_token_file
    return options.journal or token_file.with_name(f"{token_file.name}.journal")


def _upstream_key(options: argparse.Namespace) -> str:
    if options.upstream_key_file is not None:
        return read_secret(options.upstream_key_file)
    key = os.environ.get(UPSTREAM_KEY_VARIABLE, "")
    register_secret(key)
    return key
