"""`rollmesh gateway`: the capture gateway alone, for agents that run elsewhere.

A mistake on the command line is reported before anything serves, in one line that names the option.
"""

# ruff: noqa: PLC0415 - the room is imported by its own verb only

import argparse
import os
from pathlib import Path
from typing import Any

from rollmesh.cli.options import (
    add_listen,
    add_model_dir,
    add_process_options,
    config_of,
    model_defaults,
    parser,
    quoted,
    set_model,
)
from rollmesh.core.descriptors import PEERS, allow_descriptors
from rollmesh.core.errors import AddressError, ConfigError, ModelError
from rollmesh.core.model_folders import why_no_folder
from rollmesh.core.redaction import register_secret
from rollmesh.core.secret_files import protect_memory, read_or_make_secret, read_secret

BIND = "127.0.0.1:8100"
UPSTREAM_KEY_VARIABLE = "ROLLMESH_UPSTREAM_KEY"


def main(argv: list[str]) -> int:
    """Serve until stopped."""
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
    arguments = parser(
        "gateway", "Run the capture gateway: sessions for agents that run elsewhere."
    )
    arguments.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="URL",
        help="an SGLang server or, for relay, any server with a chat endpoint; may be repeated",
    )
    add_model_dir(arguments)
    arguments.add_argument("--host", help="listening address (default: 127.0.0.1)")
    arguments.add_argument(
        "--port", type=int, help="listening port (default: 8100; 0 picks a free one)"
    )
    arguments.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): serve https"
    )
    arguments.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="private key (PEM) of --tls-cert"
    )
    arguments.add_argument(
        "--plain",
        action="store_true",
        help="allow plain HTTP on an address that other machines can reach, behind a TLS proxy",
    )
    arguments.add_argument(
        "--admin-token-file",
        type=Path,
        required=True,
        help="file with the token for /admin; created with a random token if missing",
    )
    arguments.add_argument(
        "--capture",
        choices=["tokens", "relay"],
        default="tokens",
        help="tokens: render here and sample exact tokens; relay: forward requests unchanged",
    )
    arguments.add_argument(
        "--journal",
        type=Path,
        metavar="DIR",
        help="folder that persists sessions across restarts (default: beside the token file)",
    )
    arguments.add_argument("--no-journal", action="store_true", help="do not persist sessions")
    arguments.add_argument(
        "--upstream-key-file",
        type=Path,
        help=f"for relay: file with the provider's key (or set {UPSTREAM_KEY_VARIABLE})",
    )
    add_process_options(arguments)
    add_listen(arguments)
    return arguments


def _check_used(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that has no effect beside the others."""
    if options.capture == "tokens" and options.upstream_key_file is not None:
        raise ConfigError(
            f"--upstream-key-file {options.upstream_key_file}: engines need no key; "
            "leave it out, or use --capture relay"
        )
    if options.capture == "relay" and options.model_dir is not None:
        raise ConfigError(
            f"--model-dir {options.model_dir}: a relay renders no prompts; "
            "leave it out, or use --capture tokens"
        )
    if options.no_journal and options.journal is not None:
        raise ConfigError(f"--journal {options.journal}: excluded by --no-journal; leave one out")
    for name in ("host", "port"):
        value = getattr(options, name)
        if options.listen_fd is not None and value is not None:
            raise ConfigError(f"--{name} {value}: excluded by --listen-fd; leave one out")


def _lay_over(options: argparse.Namespace) -> None:
    """Turn options into overrides of the file's settings."""
    set_model(options)
    if options.host is not None or options.port is not None:
        host, _, port = BIND.rpartition(":")
        host = options.host or host
        host = f"[{host}]" if ":" in host else host
        port = port if options.port is None else str(options.port)
        options.overrides.append(f"interception.bind={quoted(f'{host}:{port}')}")


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the gateway's own defaults: its address, and the context length of the model."""
    return {"interception": {"bind": BIND}, **model_defaults(options)}


def _check(options: argparse.Namespace, engines: tuple[str, ...], model: str) -> None:
    """Raise UserError if the gateway cannot work with these."""
    from rollmesh.core.addresses import why_no_engine_url
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
        raise ModelError("--model-dir DIR is missing, which --capture tokens needs")
    if options.capture == "tokens" and (why := why_no_folder(model)):
        raise ModelError(f"--model-dir {model}: {why}")


def _tls(options: argparse.Namespace) -> tuple[Path, Path] | None:
    """Return certificate and key; ConfigError if one file is given without the other."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise ConfigError(f"--tls-{given} {certificate or key}: --tls-{missing} is missing")
    if options.plain:
        raise ConfigError("--plain: excluded by --tls-cert and --tls-key; leave it out")
    return certificate, key


def _journal(options: argparse.Namespace) -> Path | None:
    """Return the journal's folder, by default beside the token file, whose readers may read
    both.
    """
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
