"""Broadcast weights to all engines at once: gloo between CPUs, NCCL between GPUs.

    an engine reaches LOADING -> GATHERING, for others that arrive soon -> one broadcast for all
    broadcast: update sessions, without engines that refuse -> the same group or a new one -> data
               a peer fails or takes too long -> the group is torn down; each engine gets the file

- Engines that arrive together share one broadcast; one that arrives late starts the next.
- A faulty engine delays the others at most by BROADCAST_SHARE of a load's time, since all then get
  the file (not guaranteed with NCCL: docs/explanation/weights.md).
- A group is kept as long as the same engines take part. A collective is not authenticated: beyond
  loopback its network must be private to the mesh.
- Protocol: SGLang's init_weights_update_group and update_weights_from_distributed.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from rollmesh.core.addresses import is_loopback
from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.engine.backend import READ_TIMEOUT_S, EngineBackend
from rollmesh.engine.embedded.weight_group import local_address_towards
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece
from rollmesh.trainer.weights.transfer import Payload
from rollmesh.trainer.weights.transports.sender import (
    BroadcastParts,
    JoinGroup,
    OpenGroup,
    WeightSender,
)
from rollmesh.trainer.weights.transports.sglang import begin_update, end_update

GATHER_S = 2.0
"""How long to wait for other engines (SGLang's pause alone polls once per second); less if all
engines of the last version are there."""
BROADCAST_SHARE = 0.4
"""Share of a load's time for the broadcast; the rest is for the file, if it is needed."""
BUCKET_BYTES = 512 * 2**20
"""Size of one update call; an engine needs this much more memory."""

log = get_logger()


class _Broadcast:
    """One broadcast to the engines that arrived together."""

    def __init__(self, payload: Payload, timeout_s: float) -> None:
        self.payload = payload
        self.timeout_s = timeout_s * BROADCAST_SHARE
        self.clients: dict[str, EngineBackend] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        """By URL: the engine's server_info."""
        self.refusals: dict[str, EngineRefused] = {}
        self.is_complete = asyncio.Event()
        """All engines of the last version have arrived."""
        self.task: asyncio.Task[None] | None = None
        self.limit: asyncio.Timeout | None = None
        """The timeout of the broadcast, once it has begun."""
        self.why = ""
        """Why it ended early."""
        self.group = ""

    async def open_session(self, client: EngineBackend) -> None:
        """Begin the engine's update session; a refusal is kept for the engine's own load and delays
        no other."""
        try:
            self.infos[client.url] = info = await client.server_info()
            check_ranks(client.url, info)
            await begin_update(client)
        except EngineRefused as error:
            self.refusals[client.url] = error

    def give_up(self, client: EngineBackend) -> bool:
        """Remove an engine whose load was cancelled, which ends a running broadcast; return whether
        it took part in one."""
        self.clients.pop(client.url, None)
        if self.limit is None or self.limit.expired():
            return self.limit is not None
        self.why = f"{client.url}: its load was cancelled"
        self.limit.reschedule(asyncio.get_running_loop().time())
        return True


class ExpectedEngines:
    """Engines that arrived for this version, and those expected: all that arrived for the last
    one."""

    def __init__(self) -> None:
        self._policy_version = -1
        self._seen: set[str] = set()
        self._expected: set[str] = set()

    def add(self, url: str, policy_version: int) -> None:
        """Record that an engine arrived."""
        if policy_version != self._policy_version:
            self._policy_version = policy_version
            self._expected, self._seen = self._seen, set()
        self._seen.add(url)

    def discard(self, url: str) -> None:
        """Do not expect the engine again."""
        self._seen.discard(url)

    @property
    def is_complete(self) -> bool:
        """Whether all expected engines have arrived; never true at the first version, when none are
        known."""
        return set() < self._expected <= self._seen


class DistributedTransport:
    """The `distributed` transport; used from one event loop."""

    name = "distributed"

    def __init__(self) -> None:
        self._gathering: _Broadcast | None = None
        self._expected = ExpectedEngines()
        self._tasks: set[asyncio.Task[None]] = set()
        """Broadcasts that gather or run, and the clean-up after one."""
        self._lock = asyncio.Lock()
        self._sender: WeightSender | None = None
        self._group = ""
        """The group's name ('' without a group), and the engines in it."""
        self._members: dict[str, EngineBackend] = {}

    async def begin(
        self, _payload: Payload, _clients: Sequence[EngineBackend], _timeout_s: float
    ) -> None:
        """Start the sender process. The group is formed later: an engine that waits for peers to
        join cannot serve."""
        await self._start_sender()

    async def load(self, client: EngineBackend, payload: Payload, timeout_s: float) -> None:
        broadcast = self._gathering
        if broadcast is None or broadcast.payload != payload:
            broadcast = self._gathering = _Broadcast(payload, timeout_s)
            broadcast.task = self._keep(self._run(broadcast))
        broadcast.clients[client.url] = client
        self._expected.add(client.url, payload.policy_version)
        if self._expected.is_complete:
            broadcast.is_complete.set()
        assert broadcast.task
        try:
            await asyncio.shield(broadcast.task)
        except asyncio.CancelledError:
            if not broadcast.task.done() and broadcast.give_up(client):
                self._keep(self._abort_later(broadcast, client))
            raise
        except EngineError:
            if client.url not in broadcast.refusals:
                await abort_update(client, broadcast.group)
                raise
        if client.url in broadcast.refusals:
            self._expected.discard(client.url)
            raise broadcast.refusals[client.url]

    async def finish(self) -> None:
        """Keep the group for the next version."""

    async def close(self) -> None:
        """Tear the group down."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        name, members = self._group, self._members
        await self._close_sender()
        await asyncio.gather(*(leave_group(client, name) for client in members.values()))

    async def _run(self, broadcast: _Broadcast) -> None:
        await self._gather(broadcast)
        async with self._lock:
            try:
                async with asyncio.timeout(broadcast.timeout_s) as broadcast.limit:
                    await self._send(broadcast)
            except (EngineError, TimeoutError) as error:
                broadcast.limit = None
                # End the sender first: peers that wait for it notice, and can process further
                # calls.
                await self._close_sender()
                why = broadcast.why or str(error) or f"timed out after {broadcast.timeout_s:.0f} s"
                log.warning("group.torn_down", engines=sorted(broadcast.clients), why=why)
                raise EngineUnavailable(f"the group is torn down: {why}") from None

    async def _abort_later(self, broadcast: _Broadcast, client: EngineBackend) -> None:
        assert broadcast.task
        await asyncio.wait([broadcast.task])
        await abort_update(client, broadcast.group)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _gather(self, broadcast: _Broadcast) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                await broadcast.is_complete.wait()
        if self._gathering is broadcast:
            self._gathering = None

    async def _send(self, broadcast: _Broadcast) -> None:
        await run_all(*(broadcast.open_session(client) for client in broadcast.clients.values()))
        for url in broadcast.refusals:
            broadcast.clients.pop(url, None)
        if not broadcast.clients:  # all of them refused or left
            return
        if broadcast.clients.keys() != self._members.keys():
            await self._tear_down()
            await self._form(broadcast)
        broadcast.group = self._group
        sender, clients = await self._start_sender(), broadcast.clients.values()
        for parts in buckets(broadcast.payload.parts):
            body = self._body(parts, broadcast.payload.policy_version)
            path = "/update_weights_from_distributed"
            loads = [client.command(path, body, broadcast.timeout_s) for client in clients]
            await run_all(sender.order(BroadcastParts(parts)), *loads)
        await run_all(*map(end_update, clients))

    async def _form(self, broadcast: _Broadcast) -> None:
        """Form a group of the sender and these engines, each with all its ranks."""
        sender = await self._start_sender()
        clients = list(broadcast.clients.values())
        infos = [broadcast.infos[client.url] for client in clients]
        ranks = [int(info.get("tp_size") or 1) for info in infos]
        devices = {info.get("device") or "cpu" for info in infos}
        has_gpus = devices == {"cuda"} and torch.cuda.is_available()
        name, backend = new_id("weights-"), "nccl" if has_gpus else "gloo"
        host = await asyncio.to_thread(common_address, list(broadcast.clients))
        size = 1 + sum(ranks)
        opened = await sender.order(OpenGroup(name, backend, host, size, broadcast.timeout_s))
        self._group, self._members = name, dict(broadcast.clients)
        broadcast.group = name
        joins = []
        for at, client in enumerate(clients):
            body = {
                "master_address": host,
                "master_port": opened.port,
                "rank_offset": 1 + sum(ranks[:at]),
                "world_size": size,
                "group_name": name,
                "backend": backend,
            }
            joins.append(client.command("/init_weights_update_group", body, broadcast.timeout_s))
        await run_all(sender.order(JoinGroup()), *joins)

    async def _tear_down(self) -> None:
        """Remove the engines from the group."""
        name, members = self._group, self._members
        self._group, self._members = "", {}
        if name:
            await asyncio.gather(*(leave_group(client, name) for client in members.values()))

    async def _close_sender(self) -> None:
        """Kill the sender, and with it the group."""
        sender, self._sender = self._sender, None
        self._group, self._members = "", {}
        if sender:
            await sender.close()

    async def _start_sender(self) -> WeightSender:
        self._sender = self._sender or await WeightSender.started()
        return self._sender

    def _body(self, parts: Sequence[SharedSegment], policy_version: int) -> dict[str, Any]:
        pieces = [piece for part in parts for piece in part.pieces]
        return {
            "names": [piece.name for piece in pieces],
            "dtypes": [piece.dtype for piece in pieces],
            "shapes": [piece.shape for piece in pieces],
            "group_name": self._group,
            "weight_version": str(policy_version),
            "flush_cache": True,
        }


async def run_all(*work: Coroutine[Any, Any, Any]) -> None:
    """Run all concurrently; on the first failure cancel the others and raise it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def check_ranks(url: str, info: dict[str, Any]) -> None:
    """Raise EngineRefused if the engine has more ranks than those of one tensor-parallel group."""
    has_replicas = (info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention")
    if has_replicas or (info.get("pp_size") or 1) > 1:
        raise EngineRefused(
            f"{url}: SGLang with replicas or pipeline stages cannot join a weight group"
        )


async def abort_update(client: EngineBackend, group: str) -> None:
    """End at an engine what a failed broadcast has begun there."""
    with contextlib.suppress(EngineError):
        await end_update(client, READ_TIMEOUT_S)
    await leave_group(client, group)


async def leave_group(client: EngineBackend, group: str) -> None:
    """Remove the engine from the group; ignore an engine that is gone or was never in it."""
    with contextlib.suppress(EngineError):
        body = {"group_name": group}
        await client.command("/destroy_weights_update_group", body, READ_TIMEOUT_S)


def buckets(
    parts: Sequence[SharedSegment], max_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[SharedSegment, ...]]:
    """Split the pieces, in order, into groups of at most `max_bytes`; empty pieces are left out."""
    for part in parts:
        chosen: list[TensorPiece] = []
        num_bytes = 0
        for piece in part.pieces:
            if chosen and num_bytes + piece.num_bytes > max_bytes:
                yield (SharedSegment(part.path, tuple(chosen)),)
                chosen, num_bytes = [], 0
            if piece.num_bytes:
                chosen.append(piece)
                num_bytes += piece.num_bytes
        if chosen:
            yield (SharedSegment(part.path, tuple(chosen)),)


def common_address(urls: Sequence[str]) -> str:
    """Return an address of this host that all these engines can reach: not loopback if one is
    remote."""
    found = [
        local_address_towards(urlsplit(url).hostname or "", urlsplit(url).port or 80)
        for url in urls
    ]
    outward = [address for address in found if not is_loopback(address)]
    return [*outward, *found][0]
