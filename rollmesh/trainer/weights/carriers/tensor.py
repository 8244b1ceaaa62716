"""Weights from the trainer's memory straight into engines of the same host: no file between.

    our engine   is told where in shared memory each tensor lies, and copies it from there; where
                 it is not, it says so
    SGLang       is told the same in its own words (sglang_memory.py), of a copy that torch shares

What takes long is done while engines serve: ours copies, and lays the copy aside until it is told
to use it; for SGLang the copy is made, since that can only load what it uses at once.
Invariant: who cannot see our memory is not told of it: an engine on another host, and an SGLang
whose process is not there to be seen (what listens is a forwarder), or has a /dev/shm or a /tmp of
its own (a container): its scheduler ends when it looks for what is not there. Driven by
shipping.py.
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
from rollmesh.engine.client import EngineClient
from rollmesh.engine.in_memory import LOAD_FORMAT, told
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.weights.carriers.bracket import weight_update
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.ferry import Ferry, Share

SGLANG_PROGRAMS = {"sglang", "sglang.launch_server"}
"""What python runs: a command, or a module."""
SGLANG_TITLE = "sglang::"
"""How the names of processes begin that SGLang's server starts."""


class TensorCarrier:
    """See the module."""

    name = "tensor"

    def __init__(self, look: Callable[[str], bool] | None = None) -> None:
        """`look` says whether an SGLang shares our memory; default: by its process."""
        self._look = look or sees_us
        self._ferry: Ferry | None = None
        """Shares a copy with SGLangs, if there are any."""
        self._sharing = asyncio.Lock()
        self._sees_us: dict[str, bool] = {}
        """By address: whether an SGLang there shares our memory."""
        self._ready: dict[str, dict[str, Any]] = {}
        """By address: what an engine that `begin` has prepared is told in its pause."""

    async def begin(self, cargo: Cargo, clients: Sequence[EngineClient], timeout_s: float) -> None:
        """As Carrier has it."""
        self._ready.clear()
        await asyncio.gather(*(self._prepare(client, cargo, timeout_s) for client in clients))

    async def load(self, client: EngineClient, cargo: Cargo, timeout_s: float) -> None:
        """As Carrier has it."""
        body = self._ready.pop(client.url, None)
        if body is None or body["weight_version"] != str(cargo.policy_version):
            body = await self._body(client, cargo)
        async with weight_update(client):
            await client.order("/update_weights_from_tensor", body, timeout_s)

    async def finish(self) -> None:
        """The copy is overwritten by the next version."""

    async def close(self) -> None:
        """Nothing looks at the copy any more."""
        ferry, self._ferry = self._ferry, None
        if ferry:
            await ferry.end()

    async def _prepare(self, client: EngineClient, cargo: Cargo, timeout_s: float) -> None:
        """Do now what needs no pause; what fails, `load` tells."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                body = await self._body(client, cargo)
                if body.get("load_format") == LOAD_FORMAT:
                    await client.order("/stage_weights", body, timeout_s)
                self._ready[client.url] = body

    async def _body(self, client: EngineClient, cargo: Cargo) -> dict[str, Any]:
        """What the engine is told; EngineRefused where it cannot see our memory."""
        if not await asyncio.to_thread(is_here, client.url):
            raise EngineRefused(f"{client.url}: on another host, which cannot see our memory")
        body = await self._told(client.url, await client.server_info(), cargo)
        return body | {"weight_version": str(cargo.policy_version), "flush_cache": True}

    async def _told(self, url: str, info: dict[str, Any], cargo: Cargo) -> dict[str, Any]:
        """Where the tensors are, in the engine's words."""
        if LOAD_FORMAT in info.get("weight_load_formats", ()):
            return {"serialized_named_tensors": told(cargo.parts), "load_format": LOAD_FORMAT}
        num_ranks = int(info.get("tp_size") or 1)
        if url not in self._sees_us:
            self._sees_us[url] = await asyncio.to_thread(self._look, url)
        if not self._sees_us[url]:
            raise EngineRefused(f"{url}: no SGLang that sees our memory is seen to listen there")
        async with self._sharing:
            try:
                self._ferry = self._ferry or await Ferry.started()
                shared = await self._ferry.order(Share(cargo, num_ranks))
            except EngineUnavailable:
                await self.close()
                raise
        return {"serialized_named_tensors": shared.told}


def is_here(url: str) -> bool:
    """Whether the address is one of this machine's: then, and only then, a socket can have it."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_have(family, address) for family, _, _, _, address in found)


def sees_us(url: str) -> bool:
    """Whether an SGLang listens there that has our folders for memory, and for torch's socket."""
    port = urlsplit(url).port
    pids = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    try:
        return bool(pids) and all(pid and is_sglang(pid) and has_our_folders(pid) for pid in pids)
    except OSError:  # it is another user's, or has just ended
        return False


def is_sglang(pid: int) -> bool:
    """Whether it is a server of SGLang, by its command line.

    What forwards a port (ssh, kubectl, docker's proxy) has our folders too, and its engine is
    elsewhere.
    """
    title, *words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    program = next((word for word in words if not word.startswith("-")), "")
    is_server = Path(program).name in SGLANG_PROGRAMS and Path(title).name.startswith("python")
    return is_server or title.startswith(SGLANG_TITLE)


def has_our_folders(pid: int) -> bool:
    """Whether memory and sockets that we name are the same to it; OSError if we may not look."""
    return all(
        (Path(f"/proc/{pid}/root") / folder.relative_to("/")).samefile(folder)
        for folder in (SHARED_MEMORY, Path(tempfile.gettempdir()))
    )


def _can_have(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind(address)
        except OSError:
            return False
    return True
