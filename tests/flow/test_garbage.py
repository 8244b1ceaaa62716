"""Garbage at a client's sink and from a router is ignored, and the work continues."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Finished
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.frames import Packet, encode_ask
from rollmesh.wire.messages import (
    AnyMessage,
    GroupAsk,
    GroupFinished,
    RouterHello,
    RunGroup,
    WorkerBeat,
    WorkerHello,
)
from rollmesh.wire.sockets import Hub, wait
from tests.flow.worker_mesh import ENV_HEAD, PATIENCE_S, Mesh, ask, open_mesh, running, take
from tests.nonsense import nonsense

NUM_MESSAGES = 2000


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


def send_garbage_to(address: str) -> None:
    socket: zmq.Socket[bytes]
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as socket:
        socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        socket.connect(address)
        for frames in nonsense(seed=1, number=NUM_MESSAGES):
            socket.send_multipart(frames)


async def test_garbage_at_a_sink_loses_no_result(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    asked = {ask(client) for _ in range(10)}
    await asyncio.to_thread(send_garbage_to, client.address)
    asked |= {ask(client) for _ in range(10)}
    arrivals = await take(client, len(asked))
    assert {arrival.group_id for arrival in arrivals} == asked
    assert all(isinstance(arrival, Finished) for arrival in arrivals)


class GarbageRouter:
    """A hub that sends garbage to its peers, on both of a worker's sockets."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self.received: dict[bytes, list[AnyMessage]] = {}

    def until(self, *kinds: type) -> None:
        """Receive until a message of each kind has arrived."""
        wanted = set(kinds)
        for _ in range(int(PATIENCE_S / 0.05)):
            wait([self.hub], None, 0.05)
            self.receive()
            if wanted <= {type(message) for each in self.received.values() for message in each}:
                return
        raise AssertionError(f"not all of {wanted} arrived")

    def receive(self) -> None:
        """Receive the messages that have arrived so far."""
        for route, packet in self.hub.receive():
            self.received.setdefault(route, []).append(packet.message)

    def first(self, kind: type[Any]) -> Any:
        """Return the first message of this kind."""
        received = [message for each in self.received.values() for message in each]
        return next(message for message in received if isinstance(message, kind))

    def worker(self) -> bytes:
        """Return the route of the worker's loop."""
        beats = [
            route
            for route, messages in self.received.items()
            if isinstance(messages[0], WorkerBeat)
        ]
        return beats[0].removesuffix(b".beat")

    def send_garbage(self) -> None:
        self.hub.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        for route in (self.worker(), self.worker() + b".beat"):
            for frames in nonsense(seed=2, number=NUM_MESSAGES):
                self._send(route, frames)

    def _send(self, route: bytes, frames: list[bytes]) -> None:
        # The loop's socket connects a moment after the heartbeats'.
        for _ in range(int(PATIENCE_S / 0.05)):
            try:
                self.hub.socket.send_multipart([route, *frames])
                return
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
            wait([self.hub], None, 0.05)
            self.receive()
        raise AssertionError(f"{route!r} did not reconnect")

    def close(self) -> None:
        self.hub.close()


def test_garbage_from_a_router_does_not_stop_a_worker(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(f"{ENV_HEAD}\nTheEnv = Plain\n")
    write_model_folder(tmp_path / "model")
    model = {"path": str(tmp_path / "model")}
    settings = {"env": "plain:TheEnv", "run": {"folder": "."}, "model": model}
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(settings))
    body = encode_ask(GroupAsk(task=Task(id="t"), sampling=SamplingPolicy(), seed=0))
    with closing(GarbageRouter()) as router:
        args = ["worker", "--config", "mesh.json", "--router", router.hub.address]
        with running(tmp_path, *args, "--worker-id", "w0"):
            router.until(WorkerHello, WorkerBeat)
            router.send_garbage()
            router.hub.send(router.worker(), Packet(RouterHello(0.1), "i1"))
            run = RunGroup(GroupId("r1", 1), 1, 2, router.hub.address)
            router.hub.send(router.worker(), Packet(run, "i1", body))
            router.until(WorkerBeat, GroupFinished)
            finished = router.first(GroupFinished)
            assert (finished.group_id, finished.complete) == (GroupId("r1", 1), True)
