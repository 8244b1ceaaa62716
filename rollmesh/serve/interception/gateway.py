"""The stand-alone gateway: the same server as in a worker, for agents that run elsewhere.

    rollmesh gateway --engine URL --model-dir DIR --admin-token-file F

- It reports Ready only when it serves, with all sessions that its journal holds.
- Engines may come and go; a call waits for one within `engine_wait_s`.
- The first SIGTERM closes the socket and lets running calls end, the second ends the process.
- Every route but /healthz needs a secret. An address that other machines can reach needs TLS, or
  `--plain`.
"""

import asyncio
import gc
import hashlib
import os
import socket
import ssl
from collections.abc import Callable
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
from rollmesh.core.metrics import Exposition
from rollmesh.core.process import Ready, announce, listen, stop_event
from rollmesh.runtime import blobs
from rollmesh.runtime.families import chats_of
from rollmesh.runtime.heap_trimmer import HeapTrimmer
from rollmesh.runtime.registry import GC_THRESHOLDS
from rollmesh.serve.interception.admin import Admin, AdminKit
from rollmesh.serve.interception.archive.archive import Archive
from rollmesh.serve.interception.archive.entries import FORMAT, Began
from rollmesh.serve.interception.archive.recovery import Recovery
from rollmesh.serve.interception.backends import Backend, RelayBackend, TokenBackend
from rollmesh.serve.interception.book import SessionBook
from rollmesh.serve.interception.counts import add_blobs
from rollmesh.serve.interception.gauges import LoopLag, archive_figures, gateway_figures

MAX_EXPIRY_S = 1.0
"""The book is looked through at least this often."""

log = get_logger()


class GatewayAsk(msgspec.Struct, frozen=True, kw_only=True):
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


def run(ask: GatewayAsk) -> None:
    """Serve until SIGTERM or SIGINT; UserError in one line where it cannot begin."""
    setup("gateway", ask.config.run_folder() if ask.ready_fd is not None else None)
    Heap().settle()
    tls = _tls_of(ask)
    listening = listen(ask.config.interception.bind, ask.listen_fd)
    _check_reach(ask, listening)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ask, listening, tls))


def _tls_of(ask: GatewayAsk) -> ssl.SSLContext | None:
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


def _check_reach(ask: GatewayAsk, listening: socket.socket) -> None:
    """AddressError where keys and prompts would be readable on a network."""
    host = listening.getsockname()[0]
    if ask.tls is None and not ask.is_plain and not is_loopback(host):
        listening.close()
        raise AddressError(
            f"{host}: others can reach it, and keys and prompts would travel in clear; "
            "give --tls-cert and --tls-key, or --plain behind a proxy that has TLS"
        )


async def _serve(ask: GatewayAsk, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
    interception = ask.config.interception
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    async with AsyncExitStack() as stack:
        keeper = HeapTrimmer(SystemClock())
        stack.callback(keeper.close)
        folder = interception.spill_folder
        blobs.settle(interception.max_blob_bytes, Path(folder) if folder else None)
        archive = Archive(ask.journal, ask.config.journal) if ask.journal else None
        if archive is not None:
            stack.callback(archive.close_journal)
        backend = _new_backend(ask, archive)
        stack.push_async_callback(backend.close)
        limits = interception.retention_s, ask.config.worker.max_held_bytes
        book = SessionBook(backend.capture, SystemClock(), *limits, archive)
        if archive is not None:
            Recovery(archive, backend.capture, book).run(_began(ask))
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
        face = backend.serve(Admin(kit).handle)
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


def _new_backend(ask: GatewayAsk, archive: Archive | None) -> Backend:
    if ask.capture == "relay":
        return RelayBackend(ask.config, ask.engines, ask.upstream_key, archive)
    return TokenBackend(ask.config, ask.engines, archive)


def _began(ask: GatewayAsk) -> Began:
    """What the sessions of a journal have in common: whose tokens they hold, and who made them."""
    if ask.capture == "relay":
        return Began("relay", "", "", FORMAT)
    folder = Path(ask.config.model.path)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:16]
    return Began("tokens", digest, chats_of(folder, ask.config.model.renderer), FORMAT)


async def _expire(book: SessionBook, inventory: Inventory, ask: GatewayAsk) -> None:
    while True:
        book.expire()
        book.weigh(inventory.held_bytes())
        await asyncio.sleep(min(MAX_EXPIRY_S, ask.config.interception.retention_s / 4))


def _health(capture: str, backend: Backend) -> dict[str, Any]:
    """Always with status 200: a gateway that is restarted because its engines died loses every
    session, and they come back by themselves."""
    engines = backend.engines()
    is_ready = any(engine["phase"] == "ready" for engine in engines)
    status = "ok" if is_ready else "no engine is ready"
    health = {"status": status, "capture": capture, "engines": engines}
    waiting = backend.waiting()
    return health | {"waiting": waiting} if waiting else health
