"""The stand-alone gateway: the same server as in a worker, for agents that run elsewhere.

    rollmesh gateway --engine URL --model-dir DIR --admin-token-file F

- It reports Ready only when it serves, with all sessions that its journal holds.
- Engines may come and go; a call waits for one within `engine_wait_s`.
- The first SIGTERM closes the socket and lets running calls end, the second ends the process.
- Every route but /healthz needs a secret. An address that other machines can reach needs TLS, or
  `--plain`.

What the gateway shows of itself to Prometheus.

Invariant: everything is read from plain numbers when somebody scrapes; nothing is counted twice and
no label is an id. Driven by the exposition of the gateway.
"""

import asyncio
import gc
import hashlib
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.heap import Heap
from rollmesh.core.inventory import Inventory
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.loopback import is_loopback
from rollmesh.core.metrics import Exposition, Figure
from rollmesh.core.process import Ready, announce, listen, stop_event
from rollmesh.runtime import blobs
from rollmesh.runtime.families import chats_of
from rollmesh.runtime.heap_trimmer import HeapTrimmer
from rollmesh.runtime.registry import GC_THRESHOLDS
from rollmesh.serve.interception.admin import AdminKit, AdminRoutes
from rollmesh.serve.interception.agent_server import add_blobs
from rollmesh.serve.interception.backends import GatewayBackend, RelayBackend, TokenBackend
from rollmesh.serve.interception.journal.entries import FORMAT, JournalHeader
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.recovery import JournalRecovery
from rollmesh.serve.interception.sessions import SessionRegistry

MAX_EXPIRY_S = 1.0
"""The book is looked through at least this often."""

log = get_logger()


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    config: Config
    capture: Literal["tokens", "relay"]
    engines: tuple[str, ...]
    admin_token: str
    upstream_key: str
    """The provider's, for relay; '' where it wants none."""
    journal: Path | None = None
    """Folder of what outlives the process; None for nothing."""
    listen_fd: int | None = None
    ready_fd: int | None = None
    tls: tuple[Path, Path] | None = None
    """Files of the certificate chain and its key, in PEM; None for plain HTTP."""
    is_plain: bool = False
    """Serve plain HTTP also where other machines can reach it."""
    say: Callable[[str], None]
    """Prints the address for the user."""


def run(ask: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT; UserError in one line where it cannot begin."""
    setup("gateway", ask.config.run_folder() if ask.ready_fd is not None else None)
    Heap().settle()
    tls = _tls_of(ask)
    listening = listen(ask.config.interception.bind, ask.listen_fd)
    _check_reach(ask, listening)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ask, listening, tls))


def _tls_of(ask: GatewayOptions) -> ssl.SSLContext | None:
    """ConfigError where the files are no certificate and its key."""
    if ask.tls is None:
        return None
    certificate, key = ask.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        why = error.strerror or "no certificate chain with its key, both in PEM"
        raise ConfigError(f"--tls-cert {certificate} --tls-key {key}: {why}") from None
    return context


def _check_reach(ask: GatewayOptions, listening: socket.socket) -> None:
    """AddressError where keys and prompts would be readable on a network."""
    host = listening.getsockname()[0]
    if ask.tls is None and not ask.is_plain and not is_loopback(host):
        listening.close()
        raise AddressError(
            f"{host}: others can reach it, and keys and prompts would travel in clear; "
            "give --tls-cert and --tls-key, or --plain behind a proxy that has TLS"
        )


async def _serve(ask: GatewayOptions, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
    interception = ask.config.interception
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    async with AsyncExitStack() as stack:
        keeper = HeapTrimmer(SystemClock())
        stack.callback(keeper.close)
        folder = interception.spill_folder
        blobs.settle(interception.max_blob_bytes, Path(folder) if folder else None)
        archive = GatewayJournal(ask.journal, ask.config.journal) if ask.journal else None
        if archive is not None:
            stack.callback(archive.close_journal)
        backend = _new_backend(ask, archive)
        stack.push_async_callback(backend.close)
        limits = interception.retention_s, ask.config.worker.max_held_bytes
        book = SessionRegistry(backend.capture, SystemClock(), *limits, archive)
        if archive is not None:
            JournalRecovery(archive, backend.capture, book).run(_began(ask))
        lag = LoopLag(loop)
        stack.callback(lag.close)
        exposition = Exposition("gateway")
        exposition.add(lambda: gateway_figures(book, backend, lag))
        exposition.add(keeper.figures)
        if archive is not None:
            exposition.add(lambda: archive_figures(archive))
        inventory = Inventory()
        kit = AdminKit(
            book,
            ask.admin_token,
            ask.config.sampling.policy(),
            exposition,
            lambda: _health(ask.capture, backend),
            scheme="http" if tls is None else "https",
            is_public=not is_loopback(listening.getsockname()[0]),
        )
        face = backend.serve(AdminRoutes(kit).handle)
        add_blobs(inventory)
        backend.join(inventory, book)
        exposition.add(inventory.figures)
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(backend.run()),
                group.create_task(_expire(book, inventory, ask)),
            ]
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            keeper.start()
            address = await face.start(listening, tls)
            announce(ask.ready_fd, Ready("gateway", os.getpid(), address))
            ask.say(f"rollmesh gateway: {address} (capture {ask.capture})")
            log.info("gateway.started", address=address, capture=ask.capture)
            await stop.wait()
            log.info("gateway.stopping", num_open=backend.num_open())
            await face.stop()
            for task in beside:
                task.cancel()
    log.info("gateway.stopped")


def _new_backend(ask: GatewayOptions, archive: GatewayJournal | None) -> GatewayBackend:
    if ask.capture == "relay":
        return RelayBackend(ask.config, ask.engines, ask.upstream_key, archive)
    return TokenBackend(ask.config, ask.engines, archive)


def _began(ask: GatewayOptions) -> JournalHeader:
    """What the sessions of a journal have in common: whose tokens they hold, and who made them."""
    if ask.capture == "relay":
        return JournalHeader("relay", "", "", FORMAT)
    folder = Path(ask.config.model.path)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:16]
    return JournalHeader("tokens", digest, chats_of(folder, ask.config.model.renderer), FORMAT)


async def _expire(book: SessionRegistry, inventory: Inventory, ask: GatewayOptions) -> None:
    while True:
        book.expire()
        book.weigh(inventory.held_bytes())
        await asyncio.sleep(min(MAX_EXPIRY_S, ask.config.interception.retention_s / 4))


def _health(capture: str, backend: GatewayBackend) -> dict[str, Any]:
    """Always with status 200: a gateway that is restarted because its engines died loses every
    session, and they come back by themselves."""
    engines = backend.engines()
    is_ready = any(engine["phase"] == "ready" for engine in engines)
    status = "ok" if is_ready else "no engine is ready"
    health = {"status": status, "capture": capture, "engines": engines}
    waiting = backend.waiting()
    return health | {"waiting": waiting} if waiting else health


LAG_PROBE_S = 0.25


class LoopLag:
    """How late the event loop is; the worst since it was asked last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worst_s = 0.0
        self._due_s = 0.0
        self._timer = loop.call_soon(self._probe)

    def take(self) -> float:
        """Seconds."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def close(self) -> None:
        """Probe no more."""
        self._timer.cancel()

    def _probe(self) -> None:
        now_s = self._loop.time()
        if self._due_s:
            self._worst_s = max(self._worst_s, now_s - self._due_s)
        self._due_s = now_s + LAG_PROBE_S
        self._timer = self._loop.call_at(self._due_s, self._probe)


def gateway_figures(
    book: SessionRegistry, backend: GatewayBackend, lag: LoopLag
) -> Iterator[Figure]:
    """A source for the exposition, but for its arguments."""
    for (route, state), number in backend.exchanges().items():
        labels = {"dialect": route.strip("/"), "state": state}
        yield Figure("exchanges_total", number, "Agents' requests by their end.", labels)
    yield Figure("exchanges_open", backend.num_open(), "Agents' requests that run.")
    yield Figure("live_legs", backend.num_live(), "Calls that engines work on.")
    num_calls, num_tokens = backend.totals()
    yield Figure("calls_total", num_calls, "Calls that asked for sampling.")
    yield Figure("sampled_tokens_total", num_tokens, "Sampled tokens; 0 in a relay.")
    phases: Counter[str] = Counter()
    for engine in backend.engines():
        phase, labels = engine["phase"], {"engine": engine["url"]}
        phases[phase] += 1
        yield Figure("engine_ready", phase == "ready", "Whether it may be used.", labels)
    for phase, number in phases.items():
        yield Figure("engines", number, "Engines by phase.", {"phase": phase})
    yield from _book_figures(book)
    yield Figure("loop_lag_seconds", lag.take(), "Worst lag of the event loop since last asked.")


def archive_figures(archive: GatewayJournal) -> Iterator[Figure]:
    """A source for the exposition: what outlives the gateway."""
    yield Figure("journal_bytes", archive.journal.size_bytes, "Of the gateway's journal.")
    yield Figure("journal_live_bytes", archive.live_bytes, "Of it, what sessions still need.")


def _book_figures(book: SessionRegistry) -> Iterator[Figure]:
    num_sessions = num_finished = 0
    for entry in book.entries():
        num_sessions += 1
        num_finished += entry.finished is not None
    states = {
        "open": num_sessions - num_finished,
        "finished": num_finished,
        "set_aside": len(book.aside),
    }
    for state, number in states.items():
        yield Figure("sessions", number, "Sessions in the book.", {"state": state})
    yield Figure("sessions_opened_total", book.num_opened, "Sessions opened.")
    yield Figure("sessions_expired_total", book.num_expired, "Sessions that nobody deleted.")
    for cause, number in book.forks().items():
        yield Figure("forks_total", number, "Histories that did not go on.", {"cause": cause})
    for kind, number in book.healed().items():
        yield Figure("healed_total", number, "Differences that did not fork.", {"kind": kind})
