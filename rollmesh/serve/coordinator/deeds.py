"""What is done to an engine when it goes to sleep or wakes: the I/O behind CallEngine.

Invariants: every call is answered by exactly one EngineDone, whatever the engine does; its memory
is given up only when nothing runs there; what was done is said by the name of its weights, before
and after, so that whoever comes next knows; woken weights are those that the run published last,
with their adapter. Driven by process.py.
"""

import asyncio
from pathlib import Path

import msgspec

from rollmesh.core.errors import AddressError, EngineError, EngineRefused, LocalShortage
from rollmesh.core.model_folders import find_probe, newest_adapter, newest_published
from rollmesh.engine.backend import (
    UNBOUNDED_S,
    BackendFactory,
    EngineBackend,
    MemoryState,
    backend_factory,
    memory_state_of,
    policy_version_of,
    weights_name,
)
from rollmesh.engine.http import HttpClient
from rollmesh.engine.members import ADAPTER_PREFIX, adapter_name
from rollmesh.serve.coordinator.events import (
    UNVERSIONED,
    CallEngine,
    Deed,
    EngineDone,
    EngineSeen,
)

FLUSH_S = 5.0
"""What was aborted has so long to end."""
LOOK_AGAIN_S = 0.05


async def carry_out(
    call: CallEngine, http: HttpClient, weights: Path, connect: BackendFactory | None = None
) -> EngineDone:
    """Do it, and answer; `weights` is where the run publishes.

    LocalShortage if not all of it could be sent, by no fault of the engine; it may be repeated.
    """
    try:
        engine = _Engine((connect or backend_factory())(call.url, http), weights)
        done = await engine.do(call)
    except LocalShortage:
        raise
    except (AddressError, EngineError, TimeoutError) as error:
        detail = str(error) or "it took too long"
        return _failed(call, detail)
    except Exception as error:  # noqa: BLE001 - door: who waits for an answer must have one
        return _failed(call, f"{type(error).__name__}: {error}")
    return done


def _failed(call: CallEngine, detail: str) -> EngineDone:
    return EngineDone(url=call.url, serial=call.serial, ok=False, detail=detail)


class _Engine:
    """One engine, told one thing at a time."""

    def __init__(self, client: EngineBackend, weights: Path) -> None:
        self._client = client
        self._weights = weights

    async def do(self, call: CallEngine) -> EngineDone:
        """The deed, and what came of it."""
        done = EngineDone(
            url=call.url, serial=call.serial, ok=True, policy_version=call.policy_version
        )
        match call.deed:
            case Deed.LOOK:
                seen = await self._look()
                return msgspec.structs.replace(done, seen=seen, policy_version=UNVERSIONED)
            case Deed.PAUSE:
                await self._client.pause("abort")
            case Deed.RELEASE:
                await self._release()
            case Deed.RESUME:
                await self._resume()
            case Deed.LOAD:
                called, adapter = await self._load()
                return msgspec.structs.replace(
                    done, policy_version=policy_version_of(called), adapter=adapter
                )
            case Deed.PROBE:
                await self._probe(call.policy_version)
        return done

    async def _look(self) -> EngineSeen:
        info, load = await self._client.model_info(), await self._client.loads()
        occupation, _ = memory_state_of(info.weight_version)
        adapter = adapter_name(info.policy_version)
        return EngineSeen(
            is_released=occupation is MemoryState.RELEASED,
            is_moving=occupation is MemoryState.MOVING,
            policy_version=info.policy_version,
            adapter=adapter if adapter in await self._client.adapters() else "",
            num_requests=load.num_running + load.num_waiting,
            kv_tokens=load.num_tokens,
        )

    async def _release(self) -> None:
        occupation, called = await self._called()
        if occupation is MemoryState.RELEASED:
            return
        await self._flush()
        await self._rename(MemoryState.MOVING, called)
        await self._client.memory.release()
        await self._rename(MemoryState.RELEASED, called)

    async def _flush(self) -> None:
        """Forget all prefixes, once what was aborted has ended."""
        async with asyncio.timeout(FLUSH_S):
            while True:
                try:
                    return await self._client.flush()
                except EngineRefused:
                    await asyncio.sleep(LOOK_AGAIN_S)

    async def _resume(self) -> None:
        occupation, called = await self._called()
        if occupation is MemoryState.RELEASED:
            await self._rename(MemoryState.MOVING, called)
        if occupation is not MemoryState.HELD:
            await self._client.memory.resume()

    async def _load(self) -> tuple[str, str]:
        """What its weights are called now, and the adapter over them."""
        info = await self._client.model_info()
        _, called = memory_state_of(info.weight_version)
        folder = info.model_path
        loop = asyncio.get_running_loop()
        newest = await loop.run_in_executor(None, newest_published, self._weights)
        adapter = await loop.run_in_executor(None, newest_adapter, self._weights)
        if newest:
            folder, called = str(newest.folder.absolute()), str(newest.policy_version)
        if adapter and newest and adapter.policy_version < newest.policy_version:
            adapter = None
        for name in await self._client.adapters():
            if name.startswith(ADAPTER_PREFIX):  # it stood over weights that are gone
                await self._client.unload_adapter(name)
        # Without its adapter it has nobody's weights: nothing is to take them for a version's.
        base = weights_name(MemoryState.MOVING, called) if adapter else called
        body = {"model_path": folder, "weight_version": base, "flush_cache": True}
        await self._client.command("/update_weights_from_disk", body, UNBOUNDED_S)
        if adapter:
            called, name = str(adapter.policy_version), adapter_name(adapter.policy_version)
            await self._client.load_adapter(name, adapter.folder.absolute())
            await self._rename(MemoryState.HELD, called)
        await self._client.resume()
        return called, adapter_name(adapter.policy_version) if adapter else ""

    async def _probe(self, policy_version: int) -> None:
        """EngineRefused where it serves something else."""
        info = await self._client.model_info()
        if info.policy_version != policy_version:
            told = f"it was brought version {policy_version} and serves {info.policy_version}"
            raise EngineRefused(f"{self._client.url}: {told}")
        probe = find_probe(Path(info.model_path))
        if probe is None or adapter_name(policy_version) in await self._client.adapters():
            return
        scores = await self._client.score(probe.token_ids, info.weight_version)
        if why := probe.why_not(scores):
            raise EngineRefused(f"{self._client.url}: {why}")

    async def _called(self) -> tuple[MemoryState, str]:
        return memory_state_of((await self._client.model_info()).weight_version)

    async def _rename(self, occupation: MemoryState, called: str) -> None:
        body = {"new_version": weights_name(occupation, called), "abort_all_requests": False}
        await self._client.command("/update_weight_version", body)
