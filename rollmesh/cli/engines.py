"""`rollmesh engine add | remove | list`: change and show the engines of a living mesh.

- Each is a request to the router with the operator's key; only the router changes the fleet.
- A wait prints a line for each change. It survives a restart of the router, and Ctrl-C ends the
  wait alone: the router finishes the change.
- An engine is checked before it is added: it answers, serves the mesh's model, and its context is
  as long as the mesh's.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson
from rich.text import Text

from rollmesh.cli.mesh_state import OperatorConnection
from rollmesh.cli.options import parser
from rollmesh.cli.status import (
    PIPE_WIDTH,
    add_mesh,
    add_numbers,
    router_of,
    state_text,
    table_of,
)
from rollmesh.core.addresses import why_no_engine_url
from rollmesh.core.errors import AddressError, EngineError, UserError
from rollmesh.core.model_folders import resolve_model
from rollmesh.core.process import OK
from rollmesh.core.text import instead_of, printable
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.backend import ModelInfo, backend_factory
from rollmesh.engine.fleet import COUNTS
from rollmesh.engine.http import HttpClient
from rollmesh.launch.screen import Terminal, ignore_closed_output
from rollmesh.wire.fleet import (
    AddEngine,
    DropEngine,
    EngineOrigin,
    EnginePhase,
    EngineRow,
    EnginesListed,
    FleetAnswered,
    ListEngines,
)

CHECK_S = 10.0
"""Time in which an engine must answer before it is added."""
READ_S = 0.2
"""Interval between reads of the fleet while a verb waits."""
AWAY_S = 120.0
"""Time for which a verb that waits also waits for a router that does not answer."""


def main(argv: list[str]) -> int:
    """Run the verb that `argv` begins with."""
    verb = _VERBS.get(argv[0])
    if verb is None:
        raise UserError(
            f"engine {argv[0]!r}: {instead_of(argv[0], [*_VERBS, 'sglang'])}; "
            "options alone run the embedded engine"
        )
    return verb(argv[1:])


class _Fleet:
    """The fleet of a living router, as far as the operator's requests go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.router, run = router_of(options)
        self._connection = OperatorConnection(self.router, run)
        self._num_asks = 0

    def read(self) -> EnginesListed:
        return self._connection.ask(ListEngines(self._next_ask()), EnginesListed)

    def add(self, url: str) -> None:
        """Add the engine; UserError if the router refuses."""
        self._change(AddEngine(self._next_ask(), url))

    def drop(self, url: str, *, drains: bool, force: bool) -> None:
        """Remove the engine; UserError if the router refuses."""
        self._change(DropEngine(self._next_ask(), url, drains, force))

    def watch(
        self, url: str, until: Callable[[EngineRow | None], str], end_s: float
    ) -> EngineRow | None:
        """Read the engine's row until `until` is '', and return that row; print each other line
        that it returns. UserError at `end_s`. A router that is away is waited for."""
        last, seen_s = "", time.monotonic()
        while True:
            try:
                row = _row_of(url, self.read())
                line = until(row)
                seen_s = time.monotonic()
            except AddressError:
                if time.monotonic() >= seen_s + AWAY_S:
                    raise
                line = f"the router at {self.router} does not answer; waiting for it"
                row = None
            if not line:
                return row
            if line != last:
                print(printable(line), flush=True)
                last = line
            if time.monotonic() >= end_s:
                raise UserError(f"stopped waiting: {line}")
            time.sleep(READ_S)

    def close(self) -> None:
        self._connection.close()

    def _change(self, ask: AddEngine | DropEngine) -> None:
        answer = self._connection.ask(ask, FleetAnswered)
        if not answer.ok:
            raise UserError(answer.error)

    def _next_ask(self) -> int:
        self._num_asks += 1
        return self._num_asks


def _row_of(url: str, listed: EnginesListed) -> EngineRow | None:
    """Return the engine's row; None if it is not in the fleet."""
    found = (row for row in listed.engines if row.url == url)
    row = next(found, None)
    return None if row is None or row.phase is EnginePhase.GONE else row


def add(argv: list[str]) -> int:
    """`rollmesh engine add URL`: let an engine join, and wait until it serves."""
    arguments = parser("engine add", "Add an engine to a living mesh, and wait until it serves.")
    arguments.add_argument("url", metavar="URL", help="http(s)://HOST:PORT of an SGLang server")
    add_mesh(arguments)
    arguments.add_argument(
        "--no-check",
        dest="checks",
        action="store_false",
        help="do not check the engine from here, such as if only the router reaches it",
    )
    _add_wait(arguments, "until it serves", 300.0)
    options = arguments.parse_args(argv)
    url = options.url.rstrip("/")
    if why := why_no_engine_url(url):
        raise AddressError(f"{options.url}: {why}")
    with contextlib.closing(_Fleet(options)) as fleet:
        listed = fleet.read()
        if options.checks:
            asyncio.run(_check(url, listed))
        fleet.add(url)
        listed = fleet.read()
        if not listed.is_kept:
            print(
                "the router keeps no changes: add the engine again after its restart, or start it "
                "with --engine-changes FILE"
            )
        row = _row_of(url, listed)
        if options.waits:
            row = fleet.watch(url, _until_ready(url), time.monotonic() + options.wait_s)
        print(printable(_about(url, row)))
    return OK


def _until_ready(url: str) -> Callable[[EngineRow | None], str]:
    def until(row: EngineRow | None) -> str:
        if row is None:
            raise UserError(f"{url} was removed")
        return "" if row.phase is EnginePhase.READY else _about(url, row)

    return until


def _about(url: str, row: EngineRow | None) -> str:
    """Return the engine's state in a line."""
    if row is None:
        return f"{url} is removed"
    if row.phase is EnginePhase.READY:
        has_version = row.policy_version != UNVERSIONED
        return f"{url} is ready{f', policy version {row.policy_version}' * has_version}"
    return f"{url} is {row.phase.value}: {row.detail}".removesuffix(": ")


async def _check(url: str, listed: EnginesListed) -> None:
    """Raise AddressError if the engine does not answer, or does not suit the mesh."""
    async with HttpClient() as http:
        client = backend_factory()(url, http, read_timeout_s=CHECK_S)
        try:
            async with asyncio.timeout(CHECK_S):
                info, server = await client.model_info(), await client.server_info()
        except (EngineError, TimeoutError) as error:
            why = str(error).removeprefix(f"{url}: ") or f"no answer within {CHECK_S:g} s"
            raise AddressError(
                f"{url} does not answer ({why}); start SGLang there, or add --no-check if only the "
                "router reaches it"
            ) from None
        expected = _architecture_of(listed.model) or await _architecture_at(http, listed)
    if expected and info.architecture not in ("", expected):
        raise AddressError(f"{url} serves another model: {info.architecture}, the mesh {expected}")
    context = server.get("context_length")
    needed = listed.max_context_tokens if listed.model else 0
    if isinstance(context, int) and 0 < context < needed:
        raise AddressError(
            f"{url} has a context of {context} tokens, and model.max_context_tokens = {needed}; "
            f"start it with --context-length {needed}"
        )


def _architecture_of(model: str) -> str:
    """Return the model's class by its folder; '' if that is not on this machine."""
    path = Path(resolve_model(model), "config.json")
    try:
        classes = orjson.loads(path.read_bytes()).get("architectures") if model else None
    except (OSError, ValueError, AttributeError):
        return ""
    return str(classes[0]) if isinstance(classes, list) and classes else ""


async def _architecture_at(http: HttpClient, listed: EnginesListed) -> str:
    """Return the model's class by an engine of the mesh that answers here; '' if none does."""
    for row in listed.engines:
        if row.phase is not EnginePhase.READY:
            continue
        client = backend_factory()(row.url, http, read_timeout_s=CHECK_S)
        with contextlib.suppress(EngineError, TimeoutError):
            info: ModelInfo = await client.model_info()
            return info.architecture
    return ""


def remove(argv: list[str]) -> int:
    """`rollmesh engine remove URL [--drain]`: take an engine out of the mesh."""
    arguments = parser(
        "engine remove",
        "Remove an engine from a living mesh. Its process is not ended, and it does not join again "
        "until it is added.",
    )
    arguments.add_argument("url", metavar="URL", help="as `rollmesh engine list` shows it")
    add_mesh(arguments)
    arguments.add_argument(
        "--drain",
        dest="drains",
        action="store_true",
        help="let its running requests end first; without it they resume on other engines, from "
        "their exact tokens",
    )
    arguments.add_argument(
        "--force", action="store_true", help="remove it also if it is the last engine"
    )
    _add_wait(arguments, "for the end of a drain", float("inf"))
    options = arguments.parse_args(argv)
    with contextlib.closing(_Fleet(options)) as fleet:
        before = fleet.read()
        url = _named(options.url, before)
        fleet.drop(url, drains=options.drains, force=options.force)
        _warn(url, before)
        if options.drains and options.waits:
            try:
                fleet.watch(url, _until_drained(url), time.monotonic() + options.wait_s)
            except KeyboardInterrupt:
                print(f"{url} still drains; it is removed when its requests have ended")
                raise
        elif options.drains:
            print(f"{url} drains; it is removed when its requests have ended")
            return OK
    how = "it is drained" if options.drains else "its requests resume on other engines"
    print(f"{url} is removed; {how}")
    return OK


def _named(url: str, listed: EnginesListed) -> str:
    """Return the engine's URL in the spelling of the fleet; UserError if it is not there."""
    known = {row.url.rstrip("/"): row.url for row in listed.engines}
    if url.rstrip("/") in known:
        return known[url.rstrip("/")]
    there = ", ".join(known.values()) or "none"
    raise UserError(f"{url} is not an engine of this mesh; there are: {there}")


def _warn(url: str, before: EnginesListed) -> None:
    """Print a line if no other engine serves now."""
    others = [row for row in before.engines if row.url != url]
    serving = EnginePhase.READY, EnginePhase.UPDATING
    if not any(row.phase in serving for row in others):
        print("no other engine serves now: rollouts wait until one does")


def _until_drained(url: str) -> Callable[[EngineRow | None], str]:
    def until(row: EngineRow | None) -> str:
        if row is None:
            return ""
        if row.phase is not EnginePhase.DRAINING:
            return f"{_about(url, row)}; it drains after that"
        if row.detail == COUNTS:
            return f"{url} drains: it {COUNTS}"
        number = row.num_running + row.num_waiting
        return f"{url} drains: {number} request{'s' * (number != 1)} left"

    return until


class ListedEngine(msgspec.Struct, frozen=True):
    """An engine in the output of `rollmesh engine list --json`."""

    url: str
    phase: EnginePhase
    policy_version: int
    """-1 while unknown."""
    num_running: int
    num_waiting: int
    origin: EngineOrigin
    detail: str


def show(argv: list[str]) -> int:
    """`rollmesh engine list`: show the engines of a mesh."""
    arguments = parser("engine list", "Show the engines of a living mesh.")
    add_mesh(arguments)
    arguments.add_argument("--json", dest="is_json", action="store_true", help="print a JSON line")
    options = arguments.parse_args(argv)
    with contextlib.closing(_Fleet(options)) as fleet:
        listed = fleet.read()
    rows = [
        ListedEngine(
            row.url,
            row.phase,
            row.policy_version,
            row.num_running,
            row.num_waiting,
            origin,
            row.detail,
        )
        for row, origin in zip(listed.engines, listed.origins, strict=True)
    ]
    with ignore_closed_output():
        if options.is_json:
            print(msgspec.json.encode(rows).decode(), flush=True)
        else:
            _print_table(rows)
    return OK


def _print_table(rows: list[ListedEngine]) -> None:
    table = table_of("engine", "state", "from")
    add_numbers(table, "version", "running", "waiting")
    table.add_column("detail", overflow="fold")
    for row in rows:
        policy_version = "" if row.policy_version == UNVERSIONED else str(row.policy_version)
        table.add_row(
            Text(row.url),
            state_text(row.phase, good=("ready",)),
            row.origin.value,
            policy_version,
            str(row.num_running),
            str(row.num_waiting),
            Text(row.detail),
        )
    console = Terminal(highlight=False)
    Terminal(highlight=False, width=None if console.is_terminal else PIPE_WIDTH).print(table)


def _add_wait(arguments: argparse.ArgumentParser, what: str, wait_s: float) -> None:
    arguments.add_argument(
        "--no-wait", dest="waits", action="store_false", help=f"do not wait {what}"
    )
    shown = "no limit" if wait_s == float("inf") else f"{wait_s:g}"
    arguments.add_argument(
        "--wait-s",
        type=float,
        default=wait_s,
        metavar="SECONDS",
        help=f"wait {what} for at most this long (default: {shown}); the router continues after it",
    )


_VERBS = {"add": add, "remove": remove, "list": show}
