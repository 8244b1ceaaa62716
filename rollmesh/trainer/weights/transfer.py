"""Transfer one publication's payload: write its file, and load it into each engine.

    begin: STORED --the file first, if engines will read it, or what needs no pause--> IN PROGRESS
    load:  the mode's transport, if the engine accepts it; else the file, once it is complete
    finish: the file is complete and no engine reads the payload -> the next may be stored

- The file is always written, so an engine can join while the trainer is dead, or later, when the
  payload's memory holds the next version.
- An engine that refuses the transport gets files from then on; that is logged once.
- A folder that an engine is loading is not pruned.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError, NoRoom
from rollmesh.core.logs import get_logger
from rollmesh.engine.backend import EngineBackend
from rollmesh.trainer.weights.payload import Payload, write_folder

CLOSE_S = 0.7
"""How long a close waits for the file, and then for engines to leave the group."""

BEGIN_SHARE = 0.3
"""Share of a load's time that `begin` may take per engine, so that an engine that hangs does not
delay the others."""

RETRY_FILE_S = 1.0
"""Between two attempts to write a file to a full disk."""

log = get_logger()


class WeightTransport(Protocol):
    """A way to load a payload's weights into an engine without a file."""

    name: str
    """The `publish.mode` it implements."""

    async def begin(
        self, payload: Payload, clients: Sequence[EngineBackend], timeout_s: float
    ) -> None:
        """Prepare a load that will follow soon: do now what needs no pause.

        `clients` are engines that still serve and will probably be loaded. Each may take
        `timeout_s`; a failure here is reported by `load`.
        """

    async def load(self, client: EngineBackend, payload: Payload, timeout_s: float) -> None:
        """Load the payload into an engine that is paused and whose prefix cache is flushed.

        Raises EngineRefused if the engine does not support this transport, EngineUnavailable if it
        may succeed next time. Whatever was begun at the engine has ended then.
        """

    async def finish(self) -> None:
        """Called when no engine reads the payload any more; what is kept is for the next
        version."""

    async def close(self) -> None:
        """Release everything."""


class Transfer:
    """The payload being published, and how each engine gets it; used from one event loop."""

    def __init__(self, transport: WeightTransport | None, timeout_s: float) -> None:
        """`transport` None: every engine reads files. A load may take `timeout_s` per engine."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._payload: Payload | None = None
        self._writing: asyncio.Future[None] | None = None
        self._takes_files: set[str] = set()
        """URLs of engines that refused the transport."""
        self._loads: set[asyncio.Task[None]] = set()
        self._loading: Counter[str] = Counter()
        self._closed = asyncio.Event()

    async def begin(self, payload: Payload, clients: Sequence[EngineBackend] = ()) -> None:
        """Start the transfer; return when engines can be called, or on close. `clients` serve at
        present.

        If files are the only way, wait while the disk is full; ModelError if the file cannot be
        written for another reason.
        """
        self._payload = payload
        self._write(payload)
        if self._transport:
            likely = [each for each in clients if each.url not in self._takes_files]
            with contextlib.suppress(EngineError):  # `load` reports the failure
                within_s = self._timeout_s * BEGIN_SHARE
                await self._transport.begin(payload, likely if payload.parts else (), within_s)
        else:
            await self._file_when_room(payload)

    async def load(self, client: EngineBackend, policy_version: int, folder: str) -> None:
        """Load a version into an engine, by the transport if possible, else from the file."""
        payload = self._payload
        is_under_way = payload is not None and payload.policy_version == policy_version
        if (
            is_under_way
            and payload
            and payload.parts
            and await self._load_by_transport(client, payload)
        ):
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
        """Return whether an engine may be reading the folder now."""
        return self._loading[str(folder.absolute())] > 0

    async def finish(self) -> None:
        """Wait until the file is complete or has failed, and no engine reads the payload."""
        if self._closed.is_set():
            return
        try:
            await self._file()
        except ModelError as error:
            log.warning("weights.not_written", error=str(error))
        self._payload = None  # no further load can start reading it
        while self._loads:
            await asyncio.gather(*self._loads, return_exceptions=True)
        if self._transport:
            await self._transport.finish()
        self._writing = None

    async def close(self) -> None:
        """Release everything; a slow file is still completed by its thread before the process
        exits."""
        self._closed.set()
        for each in self._loads:
            each.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        if self._writing:
            await asyncio.wait([self._writing], timeout=CLOSE_S)
        if self._transport:
            with contextlib.suppress(TimeoutError):  # an engine that does not answer
                await asyncio.wait_for(self._transport.close(), CLOSE_S)

    async def _load_by_transport(self, client: EngineBackend, payload: Payload) -> bool:
        transport = self._transport
        if transport is None or client.url in self._takes_files:
            return False
        load = asyncio.ensure_future(transport.load(client, payload, self._timeout_s))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        try:
            await load
        except EngineRefused as error:
            self._takes_files.add(client.url)
            log.warning("engine.takes_files", url=client.url, mode=transport.name, why=str(error))
        except EngineUnavailable as error:
            log.warning("engine.gets_file", url=client.url, mode=transport.name, why=str(error))
        else:
            return True
        return False

    async def _file_when_room(self, payload: Payload) -> None:
        is_logged = False
        while True:
            try:
                return await self._file()
            except NoRoom as error:
                if not is_logged:
                    is_logged = True
                    log.error("weights.wait", error=str(error), fix="make room; nothing is lost")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), RETRY_FILE_S)
                return
            self._write(payload)

    def _write(self, payload: Payload) -> None:
        self._writing = asyncio.ensure_future(asyncio.to_thread(write_folder, payload))

    async def _file(self) -> None:
        """Wait until the file is written; ModelError if it cannot be."""
        if self._writing:
            await asyncio.shield(self._writing)
