"""A publication's cargo under way: its file written beside, and each engine reached by some way.

    begin: LAID --first the file, if engines are to read it, or what needs no pause--> UNDER WAY
    load:  the mode's carrier, if this engine takes it so; else the file, once it is whole
    finish: the file is whole and nobody looks at the cargo -> the next may be laid

Owns the cargo under way. Invariants: there is always a file, so an engine can join while the
trainer is dead, or later, when the cargo's memory holds the next version; an engine that refuses
the mode is reached by files from then on, and that is said once; a folder that an engine is
loading is not pruned. Driven by publish.py, on its loop.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError, NoRoom
from rollmesh.core.logs import get_logger
from rollmesh.engine.client import EngineClient
from rollmesh.trainer.models.folders import disk_errors, end_folder, partial_path
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.shards import write_shards

CLOSE_S = 0.7
"""How long a close waits for the file, and then for engines to leave the group."""

BEGIN_SHARE = 0.3
"""Of the time for a load, what an engine may take before; if it hangs, others wait no longer."""

AGAIN_S = 1.0
"""Between two times that a file is given to a disk that is full."""

log = get_logger()


class Carrier(Protocol):
    """A way for a cargo's weights that needs no file."""

    name: str
    """Of the mode."""

    async def begin(self, cargo: Cargo, clients: Sequence[EngineClient], timeout_s: float) -> None:
        """Engines will come to be loaded soon, most likely these, which still serve: what can be
        done for that without a pause. An engine has `timeout_s`; one that fails is told by `load`.
        """

    async def load(self, client: EngineClient, cargo: Cargo, timeout_s: float) -> None:
        """Bring them into an engine that is paused and has forgotten its prefixes.

        EngineRefused where it does not take them by this way, EngineUnavailable where it may the
        next time; whatever was begun there is ended.
        """

    async def finish(self) -> None:
        """Nobody looks at the cargo any more; what is kept is for the next."""

    async def close(self) -> None:
        """End all of it."""


class Shipping:
    """See the module; used from one event loop."""

    def __init__(self, carrier: Carrier | None, timeout_s: float) -> None:
        """Without a carrier everything goes by files; an engine has `timeout_s` for a load."""
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._cargo: Cargo | None = None
        self._writing: asyncio.Future[None] | None = None
        self._takes_files: set[str] = set()
        """Engines that refused the carrier."""
        self._carrying: set[asyncio.Task[None]] = set()
        self._loading: Counter[str] = Counter()
        self._closed = asyncio.Event()

    async def begin(self, cargo: Cargo, clients: Sequence[EngineClient] = ()) -> None:
        """Returns when engines can be called, of which these serve as yet, or as it is closed.

        Where there is no other way than the file, a full disk is waited for; ModelError where it
        cannot be written for another reason.
        """
        self._cargo = cargo
        self._write(cargo)
        if self._carrier:
            likely = [each for each in clients if each.url not in self._takes_files]
            with contextlib.suppress(EngineError):  # what is missing, load will tell
                within_s = self._timeout_s * BEGIN_SHARE
                await self._carrier.begin(cargo, likely if cargo.parts else (), within_s)
        else:
            await self._file_once_there_is_room(cargo)

    async def load(self, client: EngineClient, policy_version: int, folder: str) -> None:
        """Bring a version into an engine, by the first way that it takes."""
        cargo = self._cargo
        is_under_way = cargo is not None and cargo.policy_version == policy_version
        if is_under_way and cargo and cargo.parts and await self._is_carried(client, cargo):
            return
        if is_under_way:
            try:
                await self._file()
            except ModelError as error:
                raise EngineUnavailable(str(error)) from error
        self._loading[folder] += 1
        try:
            await client.update_from_disk(Path(folder), policy_version, self._timeout_s)
        finally:
            self._loading[folder] -= 1

    def is_loading(self, folder: Path) -> bool:
        """Whether an engine may be reading it right now."""
        return self._loading[str(folder.absolute())] > 0

    async def finish(self) -> None:
        """Wait until the file is whole, or known to fail, and no engine looks at the cargo."""
        if self._closed.is_set():
            return
        try:
            await self._file()
        except ModelError as error:
            log.warning("weights.not_written", error=str(error))
        self._cargo = None  # from here on nobody begins to look at it
        while self._carrying:
            await asyncio.gather(*self._carrying, return_exceptions=True)
        if self._carrier:
            await self._carrier.finish()
        self._writing = None

    async def close(self) -> None:
        """Let go of everything; a file that takes long is still made whole, by its thread, before
        the process ends."""
        self._closed.set()
        for each in self._carrying:
            each.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        if self._writing:
            await asyncio.wait([self._writing], timeout=CLOSE_S)
        if self._carrier:
            with contextlib.suppress(TimeoutError):  # an engine that does not answer
                await asyncio.wait_for(self._carrier.close(), CLOSE_S)

    async def _is_carried(self, client: EngineClient, cargo: Cargo) -> bool:
        carrier = self._carrier
        if carrier is None or client.url in self._takes_files:
            return False
        carrying = asyncio.ensure_future(carrier.load(client, cargo, self._timeout_s))
        self._carrying.add(carrying)
        carrying.add_done_callback(self._carrying.discard)
        try:
            await carrying
        except EngineRefused as error:
            self._takes_files.add(client.url)
            log.warning("engine.takes_files", url=client.url, mode=carrier.name, why=str(error))
        except EngineUnavailable as error:
            log.warning("engine.gets_file", url=client.url, mode=carrier.name, why=str(error))
        else:
            return True
        return False

    async def _file_once_there_is_room(self, cargo: Cargo) -> None:
        is_told = False
        while True:
            try:
                return await self._file()
            except NoRoom as error:
                if not is_told:
                    is_told = True
                    log.error("weights.wait", error=str(error), fix="make room; nothing is lost")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), AGAIN_S)
                return
            self._write(cargo)

    def _write(self, cargo: Cargo) -> None:
        self._writing = asyncio.ensure_future(asyncio.to_thread(write_folder, cargo))

    async def _file(self) -> None:
        """Wait for it; ModelError where it cannot be written."""
        if self._writing:
            await asyncio.shield(self._writing)


def write_folder(cargo: Cargo) -> None:
    """Make the folder whole that the policy has begun; nothing to do where it is. Errors are those
    of `disk_errors`."""
    if not cargo.parts:
        return
    folder = Path(cargo.folder)
    with disk_errors(folder):
        write_shards(partial_path(folder), cargo.parts)
        end_folder(folder)
