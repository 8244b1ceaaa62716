"""Weights by a broadcast to all engines at once: gloo between CPUs, NCCL between GPUs.

    an engine comes to LOADING -> MUSTERING, for those who come soon after -> one crossing for all
    crossing:  brackets, without who refuses -> the group of before, or a new one -> broadcasts
               a peer fails, or takes too long -> the group is torn down; each gets the file

Invariants: engines that come together share one broadcast, and one that comes late starts the next;
what one of them does wrong keeps nobody longer than its share of the time for a load, since all are
then reached by the file (with NCCL not surely: docs/explanation/weights.md); a group lasts as long
as the same
engines come. A collective has no keys: beyond loopback its network has to be the mesh's own.
Protocol: SGLang's init_weights_update_group and update_weights_from_distributed. Driven by
shipping.py.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.loopback import is_loopback
from rollmesh.engine.client import READ_TIMEOUT_S, EngineClient
from rollmesh.engine.embedded.groups import facing
from rollmesh.engine.in_memory import Part, Piece
from rollmesh.trainer.weights.carriers.bracket import begun, ended
from rollmesh.trainer.weights.carriers.cargo import Cargo
from rollmesh.trainer.weights.carriers.ferry import Ferry, Meet, Open, Send

MUSTER_S = 2.0
"""For others to come: SGLang's pause alone polls each second. Those of the last version are not
waited for longer than until all of them are there."""
CROSSING_SHARE = 0.4
"""Of the time for a load; the rest is for the file, should it be needed."""
BUCKET_BYTES = 512 * 2**20
"""Told of at once: so much more memory an engine needs."""

log = get_logger()


class _Convoy:
    """Engines that cross together."""

    def __init__(self, cargo: Cargo, timeout_s: float) -> None:
        self.cargo = cargo
        self.timeout_s = timeout_s * CROSSING_SHARE
        self.clients: dict[str, EngineClient] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        """How each was started."""
        self.refusals: dict[str, EngineRefused] = {}
        self.is_complete = asyncio.Event()
        """Everybody of the last version is here."""
        self.crossing: asyncio.Task[None] | None = None
        self.limit: asyncio.Timeout | None = None
        """Of the crossing, once it has begun."""
        self.why = ""
        """That it is over before its time."""
        self.group = ""

    async def ask(self, client: EngineClient) -> None:
        """Open its bracket; who refuses hears why from its own load, and keeps nobody."""
        try:
            self.infos[client.url] = info = await client.server_info()
            check_ranks(client.url, info)
            await begun(client)
        except EngineRefused as error:
            self.refusals[client.url] = error

    def give_up(self, client: EngineClient) -> bool:
        """Nothing is to come to this engine any more, so a crossing that it is in cannot go on;
        whether it was in one."""
        self.clients.pop(client.url, None)
        if self.limit is None or self.limit.expired():
            return self.limit is not None
        self.why = f"{client.url}: its load was given up"
        self.limit.reschedule(asyncio.get_running_loop().time())
        return True


class Roll:
    """Who came for this version, and who is waited for: all that came for the one before."""

    def __init__(self) -> None:
        self._policy_version = -1
        self._came: set[str] = set()
        self._awaited: set[str] = set()

    def note(self, url: str, policy_version: int) -> None:
        """An engine came."""
        if policy_version != self._policy_version:
            self._policy_version = policy_version
            self._awaited, self._came = self._came, set()
        self._came.add(url)

    def strike(self, url: str) -> None:
        """It will not come again."""
        self._came.discard(url)

    @property
    def is_complete(self) -> bool:
        """Whether nobody else is waited for; never at the first version, where nobody knows."""
        return set() < self._awaited <= self._came


class DistributedCarrier:
    """See the module; used from one event loop."""

    name = "distributed"

    def __init__(self) -> None:
        self._mustering: _Convoy | None = None
        self._roll = Roll()
        self._under_way: set[asyncio.Task[None]] = set()
        """Crossings, mustering or begun, and what comes after one."""
        self._crossing = asyncio.Lock()
        self._ferry: Ferry | None = None
        self._group = ""
        """The group's name, '' while there is none; and who is in it beside us."""
        self._members: dict[str, EngineClient] = {}

    async def begin(
        self, _cargo: Cargo, _clients: Sequence[EngineClient], _timeout_s: float
    ) -> None:
        """As Carrier has it. A group is not formed before: an engine that waits for the others to
        join serves nobody."""
        await self._our_side()

    async def load(self, client: EngineClient, cargo: Cargo, timeout_s: float) -> None:
        """As Carrier has it."""
        convoy = self._mustering
        if convoy is None or convoy.cargo != cargo:
            convoy = self._mustering = _Convoy(cargo, timeout_s)
            convoy.crossing = self._keep(self._cross(convoy))
        convoy.clients[client.url] = client
        self._roll.note(client.url, cargo.policy_version)
        if self._roll.is_complete:
            convoy.is_complete.set()
        assert convoy.crossing
        try:
            await asyncio.shield(convoy.crossing)
        except asyncio.CancelledError:
            if not convoy.crossing.done() and convoy.give_up(client):
                self._keep(self._parted_later(convoy, client))
            raise
        except EngineError:
            if client.url not in convoy.refusals:
                await parted(client, convoy.group)
                raise
        if client.url in convoy.refusals:
            self._roll.strike(client.url)
            raise convoy.refusals[client.url]

    async def finish(self) -> None:
        """The group is kept for the next version."""

    async def close(self) -> None:
        """Tear the group down."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        name, members = self._group, self._members
        await self._sink()
        await asyncio.gather(*(left(client, name) for client in members.values()))

    async def _cross(self, convoy: _Convoy) -> None:
        await self._muster(convoy)
        async with self._crossing:
            try:
                async with asyncio.timeout(convoy.timeout_s) as convoy.limit:
                    await self._carry(convoy)
            except (EngineError, TimeoutError) as error:
                convoy.limit = None
                # Our side first: peers that wait for us see that, and are free to be told more.
                await self._sink()
                why = convoy.why or str(error) or f"not all was done in {convoy.timeout_s:.0f} s"
                log.warning("group.torn_down", engines=sorted(convoy.clients), why=why)
                raise EngineUnavailable(f"the group is torn down: {why}") from None

    async def _parted_later(self, convoy: _Convoy, client: EngineClient) -> None:
        assert convoy.crossing
        await asyncio.wait([convoy.crossing])
        await parted(client, convoy.group)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _muster(self, convoy: _Convoy) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MUSTER_S):
                await convoy.is_complete.wait()
        if self._mustering is convoy:
            self._mustering = None

    async def _carry(self, convoy: _Convoy) -> None:
        await together(*(convoy.ask(client) for client in convoy.clients.values()))
        for url in convoy.refusals:
            convoy.clients.pop(url, None)
        if not convoy.clients:  # those who came refuse, or have gone
            return
        if convoy.clients.keys() != self._members.keys():
            await self._tear_down()
            await self._form(convoy)
        convoy.group = self._group
        ferry, clients = await self._our_side(), convoy.clients.values()
        for parts in buckets(convoy.cargo.parts):
            body = self._told(parts, convoy.cargo.policy_version)
            path = "/update_weights_from_distributed"
            loads = [client.order(path, body, convoy.timeout_s) for client in clients]
            await together(ferry.order(Send(parts)), *loads)
        await together(*map(ended, clients))

    async def _form(self, convoy: _Convoy) -> None:
        """A group of the ferry and these engines, each with as many ranks as it has."""
        ferry = await self._our_side()
        clients = list(convoy.clients.values())
        infos = [convoy.infos[client.url] for client in clients]
        ranks = [int(info.get("tp_size") or 1) for info in infos]
        devices = {info.get("device") or "cpu" for info in infos}
        has_gpus = devices == {"cuda"} and torch.cuda.is_available()
        name, backend = new_id("weights-"), "nccl" if has_gpus else "gloo"
        host = await asyncio.to_thread(common_address, list(convoy.clients))
        size = 1 + sum(ranks)
        opened = await ferry.order(Open(name, backend, host, size, convoy.timeout_s))
        self._group, self._members = name, dict(convoy.clients)
        convoy.group = name
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
            joins.append(client.order("/init_weights_update_group", body, convoy.timeout_s))
        await together(ferry.order(Meet()), *joins)

    async def _tear_down(self) -> None:
        """End the group at its engines."""
        name, members = self._group, self._members
        self._group, self._members = "", {}
        if name:
            await asyncio.gather(*(left(client, name) for client in members.values()))

    async def _sink(self) -> None:
        """End our side of the group, and so the group."""
        ferry, self._ferry = self._ferry, None
        self._group, self._members = "", {}
        if ferry:
            await ferry.close()

    async def _our_side(self) -> Ferry:
        self._ferry = self._ferry or await Ferry.started()
        return self._ferry

    def _told(self, parts: Sequence[Part], policy_version: int) -> dict[str, Any]:
        pieces = [piece for part in parts for piece in part.pieces]
        return {
            "names": [piece.name for piece in pieces],
            "dtypes": [piece.dtype for piece in pieces],
            "shapes": [piece.shape for piece in pieces],
            "group_name": self._group,
            "weight_version": str(policy_version),
            "flush_cache": True,
        }


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """All of it; what fails first is raised, and the others are not waited for."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def check_ranks(url: str, info: dict[str, Any]) -> None:
    """EngineRefused where an engine has more ranks than those of one tensor-parallel group."""
    has_replicas = (info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention")
    if has_replicas or (info.get("pp_size") or 1) > 1:
        raise EngineRefused(f"{url}: of SGLang's replicas and pipelines no group is formed")


async def parted(client: EngineClient, group: str) -> None:
    """What a crossing that failed has begun at an engine is ended there."""
    with contextlib.suppress(EngineError):
        await ended(client, READ_TIMEOUT_S)
    await left(client, group)


async def left(client: EngineClient, group: str) -> None:
    """The engine is in the group no more; one that is gone, or never was, has nothing to leave."""
    with contextlib.suppress(EngineError):
        body = {"group_name": group}
        await client.order("/destroy_weights_update_group", body, READ_TIMEOUT_S)


def buckets(parts: Sequence[Part], max_bytes: int = BUCKET_BYTES) -> Iterator[tuple[Part, ...]]:
    """The pieces in order, cut where they would be too many bytes; without those that have none."""
    for part in parts:
        chosen: list[Piece] = []
        num_bytes = 0
        for piece in part.pieces:
            if chosen and num_bytes + piece.num_bytes > max_bytes:
                yield (Part(part.path, tuple(chosen)),)
                chosen, num_bytes = [], 0
            if piece.num_bytes:
                chosen.append(piece)
                num_bytes += piece.num_bytes
        if chosen:
            yield (Part(part.path, tuple(chosen)),)


def common_address(urls: Sequence[str]) -> str:
    """An address of ours that all these engines can reach: not loopback, if one is elsewhere."""
    found = [facing(urlsplit(url).hostname or "", urlsplit(url).port or 80) for url in urls]
    outward = [address for address in found if not is_loopback(address)]
    return [*outward, *found][0]
