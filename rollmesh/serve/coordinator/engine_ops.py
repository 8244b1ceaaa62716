"""Engine operations: sleep, wake and check calls to the engines, one at a time per engine.

    call     waits for the one before -> sent -> its result is reported
             a newer one comes: one that waits, or only reads, is cancelled;
                                one that was sent is waited for, and its result dropped

- An order that was given up on its way may be held in the network and arrive after the next: the
  engine would take memory again on GPUs that belong to another by then. So no order is sent to an
  engine before the last one is answered or its connection has ended.
- Each call is answered by exactly one EngineOpDone. A hanging engine is LOST by the machine's own
  timeout.
- Memory is released only when nothing runs there. Progress is recorded in the name of the weights,
  for any later caller. Woken weights are those that the run published last, with their adapter.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollmesh.core.config import EngineConfig
from rollmesh.core.errors import AddressError, EngineError, EngineRefused, LocalShortage
from rollmesh.core.model_folders import find_probe, newest_adapter, newest_published
from rollmesh.core.types import UNVERSIONED, policy_version_of
from rollmesh.engine.backend import (
    UNBOUNDED_S,
    BackendFactory,
    EngineBackend,
    MemoryState,
    backend_factory,
    configured_backend,
    memory_state_of,
    weights_name,
)
from rollmesh.engine.http import HttpClient
from rollmesh.engine.members import ADAPTER_PREFIX, adapter_name
from rollmesh.serve.coordinator.worker import (
    EngineOp,
    EngineOpDone,
    EngineSnapshot,
    RunEngineOp,
)

FLUSH_S = 5.0
"""Time for aborted requests to end."""
POLL_S = 0.05


async def run_engine_op(
    call: RunEngineOp, http: HttpClient, weights: Path, connect: BackendFactory | None = None
) -> EngineOpDone:
    """Run the call and return its result; `weights` is where the run publishes.

    LocalShortage if it could not be sent completely for a local reason; it may be repeated.
    """
    try:
        engine = _OpRunner((connect or backend_factory())(call.url, http), weights)
        done = await engine.do(call)
    except LocalShortage:
        raise
    except (AddressError, EngineError, TimeoutError) as error:
        detail = str(error) or "timed out"
        return _failed(call, detail)
    except Exception as error:  # noqa: BLE001 - door: the failure is the call's result
        return _failed(call, f"{type(error).__name__}: {error}")
    return done


def _failed(call: RunEngineOp, detail: str) -> EngineOpDone:
    return EngineOpDone(url=call.url, serial=call.serial, ok=False, detail=detail)


class _OpRunner:
    """One call to one engine."""

    def __init__(self, client: EngineBackend, weights: Path) -> None:
        self._client = client
        self._weights = weights

    async def do(self, call: RunEngineOp) -> EngineOpDone:
        """Run the operation."""
        done = EngineOpDone(
            url=call.url, serial=call.serial, ok=True, policy_version=call.policy_version
        )
        match call.op:
            case EngineOp.LOOK:
                seen = await self._look()
                return msgspec.structs.replace(done, seen=seen, policy_version=UNVERSIONED)
            case EngineOp.PAUSE:
                await self._client.pause("abort")
            case EngineOp.RELEASE:
                await self._release()
            case EngineOp.RESUME:
                await self._resume()
            case EngineOp.LOAD:
                called, adapter = await self._load()
                return msgspec.structs.replace(
                    done, policy_version=policy_version_of(called), adapter=adapter
                )
            case EngineOp.PROBE:
                await self._probe(call.policy_version)
        return done

    async def _look(self) -> EngineSnapshot:
        info, load = await self._client.model_info(), await self._client.loads()
        occupation, _ = memory_state_of(info.weight_version)
        adapter = adapter_name(info.policy_version)
        return EngineSnapshot(
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
        """Flush the prefix cache once aborted requests have ended."""
        async with asyncio.timeout(FLUSH_S):
            while True:
                try:
                    return await self._client.flush()
                except EngineRefused:
                    await asyncio.sleep(POLL_S)

    async def _resume(self) -> None:
        occupation, called = await self._called()
        if occupation is MemoryState.RELEASED:
            await self._rename(MemoryState.MOVING, called)
        if occupation is not MemoryState.HELD:
            await self._client.memory.resume()

    async def _load(self) -> tuple[str, str]:
        """Load the newest weights; return their name and the adapter over them."""
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
            if name.startswith(ADAPTER_PREFIX):  # its base weights are gone
                await self._client.unload_adapter(name)
        # Until the adapter is loaded the weights are of no version and must not look like one.
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
        """EngineRefused if it serves something else."""
        info = await self._client.model_info()
        if info.policy_version != policy_version:
            why = f"it was given version {policy_version} and serves {info.policy_version}"
            raise EngineRefused(f"{self._client.url}: {why}")
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


READ_ONLY_OPS = frozenset({EngineOp.LOOK, EngineOp.PROBE})
"""Operations that change nothing at an engine."""
RESEND_S = 0.5
"""Between attempts to send a call."""


class _PendingOp:
    """A call and its task."""

    def __init__(self, call: RunEngineOp) -> None:
        self.call = call
        self.is_sent = False
        self.task: asyncio.Task[None] | None = None

    @property
    def is_bound(self) -> bool:
        """Whether its result must be waited for."""
        return self.is_sent and self.call.op not in READ_ONLY_OPS


class EngineOps:
    """Runs calls to engines; used from one event loop."""

    def __init__(
        self,
        http: HttpClient,
        weights: Path,
        on_done: Callable[[EngineOpDone], None],
        engine: EngineConfig | None = None,
    ) -> None:
        """`weights` is where the run publishes; `on_done` gets the results of the newest calls."""
        self._http = http
        self._connect = configured_backend(engine or EngineConfig())
        self._weights = weights
        self._on_done = on_done
        self._newest: dict[str, _PendingOp] = {}
        """By engine."""
        self._gates: dict[str, asyncio.Lock] = {}
        """By engine: held while a call is sent."""
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: RunEngineOp) -> None:
        """Run the call as soon as possible; results of earlier ones are dropped."""
        before = self._newest.get(call.url)
        if before and before.task and not before.is_bound:
            before.task.cancel()
        pending = self._newest[call.url] = _PendingOp(call)
        pending.task = asyncio.get_running_loop().create_task(self._run(pending))
        self._tasks.add(pending.task)
        pending.task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all; nothing is undone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, pending: _PendingOp) -> None:
        call = pending.call
        async with self._gates.setdefault(call.url, asyncio.Lock()):
            await asyncio.sleep(call.after_s)
            pending.is_sent = True
            done = await self._carry_out(pending)
        if self._newest.get(call.url) is pending:
            del self._newest[call.url]
            self._on_done(done)

    async def _carry_out(self, pending: _PendingOp) -> EngineOpDone:
        """Result of a call. One that could not be sent for a local shortage is repeated until a
        newer call comes, since that says nothing about the engine."""
        call = pending.call
        while True:
            try:
                return await run_engine_op(call, self._http, self._weights, self._connect)
            except LocalShortage as error:
                if self._newest.get(call.url) is not pending:
                    why = str(error)
                    return EngineOpDone(url=call.url, serial=call.serial, ok=False, detail=why)
            await asyncio.sleep(RESEND_S)
