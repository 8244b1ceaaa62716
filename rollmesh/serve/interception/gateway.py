"""The stand-alone gateway: the server of a worker, for agents that run elsewhere.

    rollmesh gateway --engine URL --model-dir DIR --admin-token-file F

- It reports Ready when it serves, with all sessions restored from its journal.
- Engines may come and go; a call waits for one for `engine_wait_s`.
- The first SIGTERM closes the socket and lets running calls end; the second ends the process.
- Every route but /healthz needs a secret. An address that other machines can reach needs TLS or
  `--plain`.
- Metrics are read from plain numbers at each scrape; no label is an id.
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

from rollmesh.core.addresses import is_loopback, public_url, split_address, with_host
from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.heap import Heap
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.metrics import Exposition, Figure, Inventory
from rollmesh.core.process import Ready, announce, http_address, listen, stop_event
from rollmesh.runtime import blobs
from rollmesh.runtime.heap_trimmer import HeapTrimmer
from rollmesh.runtime.registry import GC_THRESHOLDS
from rollmesh.runtime.tokens.families import chats_of
from rollmesh.serve.interception.admin import AdminRoutes
from rollmesh.serve.interception.agent_server import count_blobs
from rollmesh.serve.interception.backends import GatewayBackend, RelayBackend, TokenBackend
from rollmesh.serve.interception.journal.entries import FORMAT, JournalHeader
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.recovery import JournalRecovery
from rollmesh.serve.interception.sessions import SessionRegistry

MAX_EXPIRY_S = 1.0
"""Maximum interval between two checks for expired sessions."""

log = get_logger()


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `rollmesh gateway`."""

    config: Config
    capture: Literal["tokens", "relay"]
    engines: tuple[str, ...]
    admin_token: str
    upstream_key: str
    """The provider's key, for relay; '' if it needs none."""
    journal: Path | None = None
    """Folder of the journal; None to keep nothing on disk."""
    listen_fd: int | None = None
    ready_fd: int | None = None
    tls: tuple[Path, Path] | None = None
    """PEM files of the certificate chain and its key; None for plain HTTP."""
    is_plain: bool = False
    """Allow plain HTTP where other machines can reach it."""
    print_line: Callable[[str], None]
    """Prints a line for the user."""


def run(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT; UserError if the gateway cannot start."""
    setup("gateway", options.config.run_folder() if options.ready_fd is not None else None)
    Heap().settle()
    tls = _tls_of(options)
    listening = listen(options.config.interception.bind, options.listen_fd)
    _check_reach(options, listening)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, listening, tls))


def _tls_of(options: GatewayOptions) -> ssl.SSLContext | None:
    """Load the certificate; ConfigError if the files are invalid."""
    if options.tls is None:
        return None
    certificate, key = options.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        why = error.strerror or "not a certificate chain with its key, both in PEM"
        raise ConfigError(f"--tls-cert {certificate} --tls-key {key}: {why}") from None
    return context


def _check_reach(options: GatewayOptions, listening: socket.socket) -> None:
    """Raise AddressError if keys and prompts would be readable on a network."""
    host = listening.getsockname()[0]
    if options.tls is None and not options.is_plain and not is_loopback(host):
        listening.close()
        raise AddressError(
            f"{host}: others can reach it, and keys and prompts would be sent unencrypted; "
            "give --tls-cert and --tls-key, or --plain behind a proxy that has TLS"
        )


async def _serve(
    options: GatewayOptions, listening: socket.socket, tls: ssl.SSLContext | None
) -> None:
    interception = options.config.interception
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    async with AsyncExitStack() as stack:
        trimmer = HeapTrimmer(SystemClock())
        stack.callback(trimmer.close)
        folder = interception.spill_folder
        blobs.settle(interception.max_blob_bytes, Path(folder) if folder else None)
        journal = _open_journal(options, stack)
        backend = _new_backend(options, journal)
        stack.push_async_callback(backend.close)
        limits = interception.retention_s, options.config.worker.max_held_bytes
        registry = SessionRegistry(backend.capture, SystemClock(), *limits, journal)
        if journal is not None:
            JournalRecovery(journal, backend.capture, registry).run(_header(options))
        lag = LoopLag(loop)
        stack.callback(lag.close)
        exposition = Exposition("gateway")
        exposition.add(lambda: gateway_figures(registry, backend, lag))
        exposition.add(trimmer.figures)
        if journal is not None:
            exposition.add(lambda: journal_figures(journal))
        inventory = Inventory()
        shown = http_address(listening, options.config.network.advertise)
        admin = AdminRoutes(
            registry,
            options.admin_token,
            options.config.sampling.policy(),
            exposition,
            lambda: _health(options.capture, backend),
            scheme="http" if tls is None else "https",
            is_public=not is_loopback(listening.getsockname()[0]),
            public_url=interception.public_url and public_url(interception.public_url, shown),
        )
        frontend = backend.serve(admin.handle)
        count_blobs(inventory)
        backend.count_in(inventory, registry)
        exposition.add(inventory.figures)
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(backend.run()),
                group.create_task(_expire(registry, inventory, options)),
            ]
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            trimmer.start()
            address = await frontend.start(listening, tls)
            shown = with_host(address, split_address(shown)[0])
            announce(options.ready_fd, Ready("gateway", os.getpid(), shown))
            options.print_line(f"rollmesh gateway: {shown} (capture {options.capture})")
            log.info("gateway.started", address=shown, capture=options.capture)
            await stop.wait()
            log.info("gateway.stopping", num_open=backend.num_open())
            await frontend.stop()
            for task in beside:
                task.cancel()
    log.info("gateway.stopped")


def _open_journal(options: GatewayOptions, stack: AsyncExitStack) -> GatewayJournal | None:
    if options.journal is None:
        return None
    journal = GatewayJournal(options.journal, options.config.journal)
    stack.callback(journal.close_journal)
    return journal


def _new_backend(options: GatewayOptions, journal: GatewayJournal | None) -> GatewayBackend:
    if options.capture == "relay":
        return RelayBackend(options.config, options.engines, options.upstream_key, journal)
    return TokenBackend(options.config, options.engines, journal)


def _header(options: GatewayOptions) -> JournalHeader:
    """Return the journal's header: the tokenizer and chat renderer of its sessions."""
    if options.capture == "relay":
        return JournalHeader("relay", "", "", FORMAT)
    folder = Path(options.config.model.path)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:16]
    return JournalHeader("tokens", digest, chats_of(folder, options.config.model.renderer), FORMAT)


async def _expire(registry: SessionRegistry, inventory: Inventory, options: GatewayOptions) -> None:
    while True:
        registry.expire()
        registry.set_held_bytes(inventory.held_bytes())
        await asyncio.sleep(min(MAX_EXPIRY_S, options.config.interception.retention_s / 4))


def _health(capture: str, backend: GatewayBackend) -> dict[str, Any]:
    """Return the health, always with status 200: a restart because engines are down would lose
    every session, and engines recover without it."""
    engines = backend.engines()
    is_ready = any(engine["phase"] == "ready" for engine in engines)
    status = "ok" if is_ready else "no engine is ready"
    health = {"status": status, "capture": capture, "engines": engines}
    waiting = backend.waiting()
    return health | {"waiting": waiting} if waiting else health


LAG_PROBE_S = 0.25


class LoopLag:
    """Measures how late the event loop is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worst_s = 0.0
        self._due_s = 0.0
        self._timer = loop.call_soon(self._probe)

    def take(self) -> float:
        """Return the worst lag in seconds since the last call."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _probe(self) -> None:
        now_s = self._loop.time()
        if self._due_s:
            self._worst_s = max(self._worst_s, now_s - self._due_s)
        self._due_s = now_s + LAG_PROBE_S
        self._timer = self._loop.call_at(self._due_s, self._probe)


def gateway_figures(
    registry: SessionRegistry, backend: GatewayBackend, lag: LoopLag
) -> Iterator[Figure]:
    """Yield the gateway's metrics."""
    for (route, state), number in backend.exchanges().items():
        labels = {"dialect": route.strip("/"), "state": state}
        yield Figure("exchanges_total", number, "Ended requests of agents.", labels)
    yield Figure("exchanges_open", backend.num_open(), "Running requests of agents.")
    yield Figure("live_legs", backend.num_live(), "Requests that engines process.")
    num_calls, num_tokens = backend.totals()
    yield Figure("calls_total", num_calls, "Calls that requested sampling.")
    yield Figure("sampled_tokens_total", num_tokens, "Sampled tokens; 0 in a relay.")
    phases: Counter[str] = Counter()
    for engine in backend.engines():
        phase, labels = engine["phase"], {"engine": engine["url"]}
        phases[phase] += 1
        yield Figure("engine_ready", phase == "ready", "Whether the engine is usable.", labels)
    for phase, number in phases.items():
        yield Figure("engines", number, "Engines by phase.", {"phase": phase})
    yield from _session_figures(registry)
    yield Figure(
        "loop_lag_seconds", lag.take(), "Worst lag of the event loop since the last scrape."
    )


def journal_figures(journal: GatewayJournal) -> Iterator[Figure]:
    """Yield the journal's metrics."""
    yield Figure("journal_bytes", journal.journal.size_bytes, "Size of the gateway's journal.")
    yield Figure("journal_live_bytes", journal.live_bytes, "Live bytes of the gateway's journal.")


def _session_figures(registry: SessionRegistry) -> Iterator[Figure]:
    num_sessions = num_finished = 0
    for entry in registry.entries():
        num_sessions += 1
        num_finished += entry.finished is not None
    states = {
        "open": num_sessions - num_finished,
        "finished": num_finished,
        "set_aside": len(registry.set_aside_sessions),
    }
    for state, number in states.items():
        yield Figure("sessions", number, "Registered sessions.", {"state": state})
    yield Figure("sessions_opened_total", registry.num_opened, "Sessions opened.")
    yield Figure("sessions_expired_total", registry.num_expired, "Sessions that expired unused.")
    for cause, number in registry.forks().items():
        yield Figure("forks_total", number, "Forked histories.", {"cause": cause})
    for kind, number in registry.healed().items():
        yield Figure("healed_total", number, "Repaired differences in histories.", {"kind": kind})
