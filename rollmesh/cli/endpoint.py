"""Sessions without a mesh: a gateway of our own, before an engine or an OpenAI-style endpoint.

    eval --base-url, play --base-url    gateway --capture relay, before the endpoint
    play                                gateway --capture tokens, before an engine

- The child processes end with the block that started them, and with this process.
- The agent gets a session's key; the endpoint's own key stays with the gateway.
"""

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from rollmesh.cli.gateway import UPSTREAM_KEY_VARIABLE
from rollmesh.core.errors import AddressError, ConfigError, UserError
from rollmesh.core.process import LAUNCHER_VARIABLE, Ready
from rollmesh.core.redaction import register_secret
from rollmesh.launch.plan import ROLLMESH
from rollmesh.serve.client.gateway import Gateway

ANSWER_S = 10.0
STOP_S = 3.0


class Upstream(msgspec.Struct, frozen=True):
    """An OpenAI-style endpoint that is not ours."""

    base_url: str
    model: str
    """The model name that requests carry."""
    key: str
    """'' where it wants none."""


def add_upstream(parser: argparse.ArgumentParser) -> None:
    """`--base-url`, `--model` and `--api-key-env`, for `upstream_of`."""
    parser.add_argument(
        "--base-url", metavar="URL", help="any OpenAI-style endpoint, such as https://HOST/v1"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="with --base-url: its model (default: the first it lists)"
    )
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        default=UPSTREAM_KEY_VARIABLE,
        help="with --base-url: environment variable that holds its key (default: %(default)s)",
    )


def upstream_of(options: argparse.Namespace) -> Upstream | None:
    """The endpoint of `--base-url`; None without one. UserError if it does not answer."""
    if not options.base_url:
        if options.model:
            raise ConfigError(f"--model {options.model}: goes with --base-url")
        return None
    key = os.environ.get(options.api_key_env, "")
    register_secret(key)
    if not key and options.api_key_env != UPSTREAM_KEY_VARIABLE:
        raise ConfigError(f"--api-key-env {options.api_key_env}: the variable is not set")
    names = model_names(options.base_url, key)
    if options.model or names:
        return Upstream(options.base_url, options.model or names[0], key)
    raise ConfigError(f"--base-url {options.base_url}: lists no models; name one by --model")


def model_names(base_url: str, key: str) -> list[str]:
    """The models that the endpoint lists; AddressError if nothing answers, or refuses the key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        reply = httpx.get(url, headers=headers, timeout=ANSWER_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise AddressError(f"--base-url {base_url}: does not answer: {why}") from None
    if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AddressError(
            f"--base-url {base_url}: refuses the key ({reply.status_code}); "
            "name the variable that holds it by --api-key-env"
        )
    try:
        return [str(each["id"]) for each in msgspec.json.decode(reply.content)["data"]]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return []


@contextmanager
def relay(upstream: Upstream) -> Iterator[Gateway]:
    """A gateway that forwards calls to the endpoint and records them."""
    words = ("--capture", "relay", "--engine", upstream.base_url)
    with gateway(words, {UPSTREAM_KEY_VARIABLE: upstream.key} if upstream.key else {}) as found:
        yield found


@contextmanager
def gateway(words: tuple[str, ...], variables: Mapping[str, str] = {}) -> Iterator[Gateway]:
    """A gateway with these arguments, on loopback, and a client of its admin API."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
        token = Path(folder) / "token"
        more = ("--port", "0", "--no-journal", "--admin-token-file", str(token))
        settings = ("--set", f"run.folder={folder}")
        with (
            child("gateway", (*words, *more, *settings), variables) as ready,
            Gateway(ready.address, token) as found,
        ):
            yield found


@contextmanager
def child(verb: str, words: tuple[str, ...], variables: Mapping[str, str] = {}) -> Iterator[Ready]:
    """Run a verb as a child process while the block runs; UserError if it does not start."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        (*ROLLMESH, verb, *words, "--ready-fd", str(writing)),
        env={**os.environ, **variables, LAUNCHER_VARIABLE: str(os.getpid())},
        pass_fds=[writing],
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is for this process alone
    )
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            line = pipe.readline()
        if not line:
            raise UserError(f"rollmesh {verb} did not start; its output is above")
        yield msgspec.json.decode(line, type=Ready)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
