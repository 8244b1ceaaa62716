"""The weights of one policy version: stored in memory, written to a folder, loaded by engines.

    begin: STORED --the file first, if engines will read it, or what needs no pause--> IN PROGRESS
    load:  the mode's transport, if the engine accepts it; else the file, once it is complete
    finish: the file is complete and no engine reads the payload -> the next may be stored

- Weights are copied once, from wherever they are into shared memory (or into a file, if /dev/shm is
  too small), and the rank trains on while they are written and transferred. The bytes do not change
  until their publication has ended; then the rank may store the next version there.
- The file is always written, so an engine can join while the trainer is dead, or later, when the
  payload's memory holds the next version. It gets the bytes unchanged, straight from shared memory
  and without the interpreter's lock, so that a concurrent train step loses little time.
- An engine that refuses the transport gets files from then on; that is logged once.
- A folder that an engine is loading is not pruned.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable, ModelError, NoRoom
from rollmesh.core.logs import get_logger
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment, Segment
from rollmesh.trainer.models.folders import (
    INDEX,
    MAX_FILE_BYTES,
    TensorSpec,
    disk_errors,
    end_folder,
    partial_path,
    plan_layout,
)
from rollmesh.trainer.ranks import full_tensor


class Payload(msgspec.Struct, frozen=True):
    policy_version: int
    folder: str
    """Absolute path; complete once the file is written, until a later version replaces it."""
    parts: tuple[SharedSegment, ...] = ()
    """Empty if the folder is already complete: adapters, and models whose files transformers has to
    convert."""


ALIGNMENT = 64
"""A cache line, which satisfies every dtype and every vector unit."""

log = get_logger()


class WeightBuffer:
    """Shared memory into which one rank copies the weights it publishes, reused for every
    version."""

    def __init__(self, shared: Path = SHARED_MEMORY) -> None:
        self._shared = shared
        self._segment: Segment | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """A view of the whole segment."""

    @torch.no_grad()
    def store(
        self, weights: Mapping[str, Tensor], own: Collection[str], beside: Path
    ) -> SharedSegment:
        """Copy the tensors of `weights` that are named in `own`; sharded ones are gathered on all
        ranks.

        `beside` is the folder for the file that is used if shared memory is too small. The part
        stays valid until the next call.
        """
        pieces = lay_out_pieces({name: weights[name] for name in weights if name in own})
        num_bytes = max([1, *(piece.offset + piece.num_bytes for piece in pieces)])
        segment = self._opened(num_bytes, beside)
        places = {piece.name: piece for piece in pieces}
        for name, tensor in weights.items():
            full = full_tensor(tensor)  # a collective: in the same order on all ranks
            piece = places.get(name)
            if piece and piece.num_bytes:
                data = self._bytes[piece.offset : piece.offset + piece.num_bytes]
                data.view(full.dtype).view(full.shape).copy_(full)
        return SharedSegment(str(segment.path), tuple(pieces))

    def close(self) -> None:
        """Release the memory; nothing may be reading it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._segment:
            self._segment.close()
            self._segment = None

    def _opened(self, num_bytes: int, beside: Path) -> Segment:
        if self._segment and len(self._bytes) >= num_bytes:
            return self._segment
        self.close()
        try:
            self._segment = _allocated_segment(self._shared, num_bytes)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            log.warning("weights.beside_memory", folder=str(self._shared), bytes=num_bytes, why=why)
            beside.mkdir(parents=True, exist_ok=True)
            self._segment = _allocated_segment(beside, num_bytes)
        self._bytes = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        return self._segment


def lay_out_pieces(weights: Mapping[str, Tensor]) -> list[TensorPiece]:
    """Lay the tensors out one after the other, each aligned."""
    pieces: list[TensorPiece] = []
    end = 0
    for name, tensor in weights.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(TensorPiece(name, dtype, tuple(tensor.shape), offset, num_bytes))
        end = offset + num_bytes
    return pieces


def _allocated_segment(folder: Path, num_bytes: int) -> Segment:
    """Create a segment whose memory is fully allocated."""
    segment = Segment(folder, num_bytes)
    try:
        segment.back(0, num_bytes)
    except OSError:
        segment.close()
        raise
    return segment


CHUNK_BYTES = 16 * 2**20
"""Size of one write call."""
STEM = "model"


def write_folder(payload: Payload) -> None:
    """Complete the folder that the policy has begun; do nothing if it is complete. Raises the
    errors of `disk_errors`."""
    if not payload.parts:
        return
    folder = Path(payload.folder)
    with disk_errors(folder):
        write_shards(partial_path(folder), payload.parts)
        end_folder(folder)


def write_shards(
    folder: Path, parts: Sequence[SharedSegment], max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write all pieces of all parts into files in `folder`.

    If the disk refuses (OSError), the files are removed, so that other writers have the space.
    """
    wholes = dict(_tensors_of(parts))
    layout = plan_layout(wholes, STEM, max_bytes)
    data = {whole.name: data for whole, data in wholes.items()}
    try:
        for file_name, head in layout.heads.items():
            names = [name for name, at in layout.spots.items() if at.file_name == file_name]
            _write_file(folder / file_name, [head, *(data[name] for name in names)])
    except OSError:
        for file_name in layout.heads:
            (folder / file_name).unlink(missing_ok=True)
        raise
    if layout.table:
        (folder / f"{STEM}{INDEX}").write_bytes(layout.table)


def _write_file(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            for at in range(0, len(piece), CHUNK_BYTES):
                file.write(piece[at : at + CHUNK_BYTES])


def _tensors_of(parts: Sequence[SharedSegment]) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Yield each tensor and its bytes in memory."""
    for part in parts:
        memory = AttachedSegment(part.path)
        for piece in part.pieces:
            whole = TensorSpec(piece.name, getattr(torch, piece.dtype), piece.shape)
            yield whole, memory.view(piece.offset, piece.num_bytes).data


CLOSE_S = 0.7
"""How long a close waits for the file, and then for engines to leave the group."""

BEGIN_SHARE = 0.3
"""Share of a load's time that `begin` may take per engine, so that an engine that hangs does not
delay the others."""

RETRY_FILE_S = 1.0
"""Between two attempts to write a file to a full disk."""


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
