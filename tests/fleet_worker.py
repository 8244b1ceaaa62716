"""A worker's part of the fleet: a view that a router feeds, and a sampler.

It sends heartbeats until it is closed, so that the router considers it live. A router notifies its
workers of a change after the process that caused it, so a publisher's change may not be in the view
yet: `watch` waits for it.
"""

import asyncio

from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.wire.fleet import AskTable, EngineFaulted, TableMessage
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import WorkerBeat, WorkerHello
from rollmesh.wire.sockets import Dialer
from tests.watch import Watch

BEAT_S = 0.1


class FleetWorker:
    def __init__(self, router: str, vocab_size: int) -> None:
        self.faults: list[EngineFaulted] = []
        self.view = FleetView()
        self.watch = Watch(self.view)
        self._dialer = Dialer(router, "worker-0")
        self._dialer.attach(asyncio.get_running_loop(), self._on_packet)
        self._dialer.send(Packet(WorkerHello("worker-0", "echo", 8, 1, "here")))
        self._beat()
        parts = SamplerDeps(view=self.view, vocab_size=vocab_size, report=self.faults.append)
        self.sampler = Sampler(parts)

    async def close(self) -> None:
        await self.sampler.close()
        self._timer.cancel()
        self._dialer.close()

    def _on_packet(self, packet: Packet) -> None:
        if isinstance(packet.message, TableMessage) and self.view.update(
            packet.message, packet.router
        ):
            self._dialer.send(Packet(AskTable()))

    def _beat(self) -> None:
        self._dialer.send(Packet(WorkerBeat("worker-0", 0, True, 0, 0.0, 0, 0, 0, 0)))
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
