"""Load weights from the trainer's memory into engines of the same host, without a file in between.

- Our engine receives the location of each tensor in shared memory and copies it from there; it
  reports an error if it cannot. SGLang receives the same in its own format, of a second copy that
  torch shares (sender_commands.py).
- Slow work happens while engines serve: our engine copies ahead and applies the copy when ordered;
  for SGLang only the shared copy is made, since it applies what it loads at once.
- An engine that cannot map our memory is never offered it, because SGLang's scheduler exits when
  the memory is missing: an engine on another host, an SGLang whose process is not visible (a port
  forwarder listens), or one with its own /dev/shm or /tmp (a container).
"""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.shared_memory import LOAD_FORMAT, encode_parts
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.weights.transfer import Payload
from rollmesh.trainer.weights.transports.sender import ShareParts, WeightSender
from rollmesh.trainer.weights.transports.sglang import update_session

SGLANG_PROGRAMS = {"sglang", "sglang.launch_server"}
"""Commands and modules that start SGLang."""
SGLANG_TITLE = "sglang::"
"""Prefix of the process titles that SGLang's server sets."""


class TensorTransport:
    """The `tensor` transport."""

    name = "tensor"

    def __init__(self, can_share: Callable[[str], bool] | None = None) -> None:
        """`can_share` returns whether an SGLang at a URL shares our memory; default: by its
        process."""
        self._can_share = can_share or shares_our_memory
        self._sender: WeightSender | None = None
        """Holds the copy for SGLang engines, if there are any."""
        self._sharing = asyncio.Lock()
        self._shares_memory: dict[str, bool] = {}
        """By URL: whether an SGLang there shares our memory."""
        self._prepared: dict[str, dict[str, Any]] = {}
        """By URL: the request body for an engine that `begin` has prepared."""

    async def begin(
        self, payload: Payload, clients: Sequence[EngineBackend], timeout_s: float
    ) -> None:
        self._prepared.clear()
        await asyncio.gather(*(self._prepare(client, payload, timeout_s) for client in clients))

    async def load(self, client: EngineBackend, payload: Payload, timeout_s: float) -> None:
        body = self._prepared.pop(client.url, None)
        if body is None or body["weight_version"] != str(payload.policy_version):
            body = await self._body(client, payload)
        async with update_session(client):
            await client.command("/update_weights_from_tensor", body, timeout_s)

    async def finish(self) -> None:
        """Keep the copy: the next version overwrites it."""

    async def close(self) -> None:
        """Release the copy; no engine may be reading it."""
        sender, self._sender = self._sender, None
        if sender:
            await sender.end()

    async def _prepare(self, client: EngineBackend, payload: Payload, timeout_s: float) -> None:
        """Do now what needs no pause; `load` reports a failure."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                body = await self._body(client, payload)
                if body.get("load_format") == LOAD_FORMAT:
                    await client.command("/stage_weights", body, timeout_s)
                self._prepared[client.url] = body

    async def _body(self, client: EngineBackend, payload: Payload) -> dict[str, Any]:
        """Return the body of the load call; EngineRefused if the engine cannot map our memory."""
        if not await asyncio.to_thread(is_on_this_host, client.url):
            raise EngineRefused(f"{client.url}: on another host, which cannot map our memory")
        body = await self._tensors(client.url, await client.server_info(), payload)
        return body | {"weight_version": str(payload.policy_version), "flush_cache": True}

    async def _tensors(self, url: str, info: dict[str, Any], payload: Payload) -> dict[str, Any]:
        """Return the locations of the tensors in the engine's format."""
        if LOAD_FORMAT in info.get("weight_load_formats", ()):
            return {
                "serialized_named_tensors": encode_parts(payload.parts),
                "load_format": LOAD_FORMAT,
            }
        num_ranks = int(info.get("tp_size") or 1)
        if url not in self._shares_memory:
            self._shares_memory[url] = await asyncio.to_thread(self._can_share, url)
        if not self._shares_memory[url]:
            raise EngineRefused(
                f"{url}: no SGLang with access to our memory was found listening there"
            )
        async with self._sharing:
            command = ShareParts(payload.policy_version, payload.parts, num_ranks)
            try:
                self._sender = self._sender or await WeightSender.started()
                shared = await self._sender.order(command)
            except EngineUnavailable:
                await self.close()
                raise
        return {"serialized_named_tensors": shared.serialized}


def is_on_this_host(url: str) -> bool:
    """Return whether the address belongs to this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def shares_our_memory(url: str) -> bool:
    """Return whether an SGLang listens there that shares our folders for memory and for torch's
    socket."""
    port = urlsplit(url).port
    pids = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    try:
        return bool(pids) and all(pid and is_sglang(pid) and has_our_folders(pid) for pid in pids)
    except OSError:  # another user's process, or one that has just exited
        return False


def is_sglang(pid: int) -> bool:
    """Return whether the process is an SGLang server, by its command line.

    A port forwarder (ssh, kubectl, docker's proxy) has our folders too, but its engine is
    elsewhere.
    """
    title, *argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    program = next((each for each in argv if not each.startswith("-")), "")
    is_server = Path(program).name in SGLANG_PROGRAMS and Path(title).name.startswith("python")
    return is_server or title.startswith(SGLANG_TITLE)


def has_our_folders(pid: int) -> bool:
    """Return whether the process has the same shared-memory and temporary folders; OSError if it
    may not be inspected."""
    return all(
        (Path(f"/proc/{pid}/root") / folder.relative_to("/")).samefile(folder)
        for folder in (SHARED_MEMORY, Path(tempfile.gettempdir()))
    )


def _can_bind(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
