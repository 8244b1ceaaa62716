"""Attacks on results: forged, malformed and unrequested ones, and the memory of peers without
proof.
"""

import asyncio
import base64
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from structlog.testing import capture_logs

from rollmesh.core.ids import GroupId, new_ticket
from rollmesh.core.types import GroupRecord, NodeRow, Outcome, RolloutRecord, SamplingPolicy, Task
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.wire.frames import Packet, encode_record
from rollmesh.wire.messages import (
    AnyMessage,
    GroupAcked,
    GroupFinished,
    GroupStarted,
    ResultRefused,
    RunGroup,
    WorkerBeat,
    WorkerHello,
    WorkerLeft,
)
from rollmesh.wire.sockets import Dialer, wait
from tests.flow.worker_mesh import PATIENCE_S, Mesh, look_until, open_mesh, take

NUM_ROLLOUTS = 60
HONEST_REWARD = 0.25
HONEST = f"""
class TheEnv(Plain):
    async def score(self, task, transcript):
        return Score(reward={HONEST_REWARD})
"""
FORGER = Path(__file__).with_name("forger.py")
MB = 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


class ScriptedWorker:
    """A scripted worker: it joins the router and handles its groups as the test specifies."""

    def __init__(self, mesh: Mesh, name: str, env: str) -> None:
        self._name = name
        self._router = Dialer(mesh.router.ready.address, name)
        self._router.send(Packet(WorkerHello(name, env, 4, 0, "elsewhere")))
        self._sinks: list[Dialer] = []

    def next_run(self) -> RunGroup:
        """The next group that the router assigns to it."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            wait([self._router], None, 0.05)
            self._router.send(Packet(WorkerBeat(self._name, 0, True, 0, 0.0, 0, 0, 0, 0)))
            for packet in self._router.receive():
                if isinstance(packet.message, RunGroup):
                    run = packet.message
                    self._router.send(Packet(GroupStarted(run.group_id, run.attempt)))
                    return run
        raise AssertionError("no group came")

    def deliver(self, run: RunGroup, record: bytes, *buffers: bytes) -> AnyMessage:
        """Send `record` as the result of the group; return the sink's answer."""
        finished = GroupFinished(run.group_id, run.attempt, self._name, True, run.ticket)
        return answer_to(run.sink, Packet(finished, "", record, buffers))

    def leave(self) -> None:
        self._router.send(Packet(WorkerLeft(self._name, "it was found out")))
        self._router.close()


def answer_to(sink: str, packet: Packet) -> AnyMessage:
    """The sink's answer to this packet."""
    with closing(Dialer(sink, "peer")) as dialer:
        dialer.send(packet)
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            wait([dialer], None, 0.1)
            for answer in dialer.receive():
                return answer.message
    raise AssertionError("no answer")


def ask(client: RolloutClient, env: str) -> GroupId:
    task = Task(id="t")
    return client.ask(task, env=env, num_samples=1, sampling=SamplingPolicy(), seed=7)


def record_of(index: int = 0, *nodes: NodeRow, messages: bytes = b"[]") -> bytes:
    num_tokens = sum(node.num_tokens for node in nodes)
    rollout = RolloutRecord(
        index=index,
        outcome=Outcome.COMPLETED,
        reward=1.0,
        nodes=list(nodes),
        num_tokens=num_tokens,
    )
    body = encode_record(GroupRecord(task=Task(id="t"), rollouts=[rollout]))
    return body.replace(b'"messages":[]', b'"messages":' + messages)


def run_forger(args: list[str]) -> None:
    argv = [sys.executable, str(FORGER), *args]
    done = subprocess.run(argv, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()


async def test_a_process_that_was_given_no_group_sets_no_reward(mesh: Mesh) -> None:
    """The process joins under its own name, knows every id, and sends reward 1.0 for each."""
    env = mesh.write_env("honest", HONEST)
    client = mesh.client()
    requested = [ask(client, env) for _ in range(NUM_ROLLOUTS)]
    args = [mesh.router.ready.address, client.address, requested[0].run_id, str(NUM_ROLLOUTS)]
    await asyncio.to_thread(run_forger, args)
    assert client.take(timeout_s=0) == []
    await asyncio.to_thread(mesh.worker, "w0", env)
    arrivals = await take(client, NUM_ROLLOUTS)
    assert {each.group_id for each in arrivals} == set(requested)
    for each in arrivals:
        assert isinstance(each, Finished)
        assert each.worker_id == "w0"
        assert [rollout.reward for rollout in each.record.rollouts] == [HONEST_REWARD]
    # An accepted result is acknowledged as a duplicate, so that an honest worker can free it.
    first = requested[0]
    late = Packet(GroupFinished(first, 2, "w1", True), "", record_of(), (b"", b""))
    assert await asyncio.to_thread(answer_to, client.address, late) == GroupAcked(first, 2, True)


MALFORMED: dict[str, tuple[bytes, bytes, bytes]] = {
    "not JSON": (b"\x00junk", b"", b""),
    "no rollouts": (encode_record(GroupRecord(task=Task(id="t"))), b"", b""),
    "another index": (record_of(1), b"", b""),
    "more tokens than it has": (record_of(0, NodeRow(-1, 3, False)), b"", b""),
    "a negative token id": (record_of(0, NodeRow(-1, 1, False)), b"\xff" * 4, b""),
    "half a number": (record_of(), b"abc", b""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MALFORMED)
async def test_a_malformed_result_is_a_failed_attempt_and_the_next_is_taken(
    mesh: Mesh, fault: str
) -> None:
    env = mesh.write_env("honest", HONEST)
    client = mesh.client()
    skewed = ScriptedWorker(mesh, "skewed", env)
    with capture_logs() as logged:
        group_id = ask(client, env)
        run = await asyncio.to_thread(skewed.next_run)
        refused = await asyncio.to_thread(skewed.deliver, run, *MALFORMED[fault])
    assert isinstance(refused, ResultRefused)
    assert client.take(timeout_s=0) == []
    [line] = [each for each in logged if each["event"] == "result.malformed"]
    assert (line["worker_id"], line["group_id"]) == ("skewed", str(group_id))
    assert line["reason"].startswith("malformed result: ")
    skewed.leave()
    await asyncio.to_thread(mesh.worker, "w0", env)
    [arrival] = await take(client)
    assert isinstance(arrival, Finished)
    assert (arrival.group_id, arrival.worker_id) == (group_id, "w0")
    assert arrival.attempt > run.attempt
    assert_nowhere_readable(run.ticket, mesh)


def assert_nowhere_readable(ticket: bytes, mesh: Mesh) -> None:
    """Check that the ticket is in no file that other users may read, and not in the status."""
    assert len(ticket) == 16
    forms = (ticket, ticket.hex().encode(), base64.b64encode(ticket), repr(ticket).encode()[2:-1])
    status = repr(mesh.status()).encode()
    assert not any(form in status for form in forms)
    files = [each for each in mesh.folder.rglob("*") if each.is_file()]
    assert files
    for file in files:
        is_private = not stat.S_IMODE(file.stat().st_mode) & 0o077
        if file.suffix == ".journal" and is_private:
            continue
        content = file.read_bytes()
        assert not any(form in content for form in forms), file


async def test_ids_that_were_never_requested_are_refused(mesh: Mesh) -> None:
    client = mesh.client()
    group_id = ask(client, "echo")
    for unasked in (GroupId(group_id.run_id, 2**62), GroupId("another-run", 0)):
        forged = GroupFinished(unasked, 1, "mallory", True, new_ticket())
        packet = Packet(forged, "", record_of(), (b"", b""))
        answer = await asyncio.to_thread(answer_to, client.address, packet)
        assert isinstance(answer, ResultRefused)
        assert "not an open ask" in answer.reason
    assert client.take(timeout_s=0) == []


async def test_a_result_of_64_mib_and_a_long_transcript_arrive_whole(mesh: Mesh) -> None:
    client = mesh.client()
    worker = ScriptedWorker(mesh, "w0", "echo")
    ask(client, "echo")
    run = await asyncio.to_thread(worker.next_run)
    token_ids = np.arange(16 * MB, dtype=np.int32)
    transcript = b'[{"role":"user","content":"' + b"long " * (4 * MB) + b'"}]'
    record = record_of(0, NodeRow(-1, len(token_ids), False), messages=transcript)
    answer = await asyncio.to_thread(worker.deliver, run, record, token_ids.tobytes(), b"")
    assert answer == GroupAcked(run.group_id, run.attempt, duplicate=False)
    [arrival] = await take(client)
    assert isinstance(arrival, Finished)
    assert np.array_equal(arrival.token_ids, token_ids)
    assert bytes(arrival.record.rollouts[0].messages) == transcript
    worker.leave()


@contextmanager
def stranger(address: str) -> Iterator[socket.socket]:
    """A connection that has exchanged greetings and proved nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with closing(socket.create_connection((host, int(port)), PATIENCE_S)) as connection:
        connection.sendall(GREETING)
        while len(connection.recv(64, socket.MSG_PEEK)) < 64:
            pass
        connection.recv(64)
        yield connection


def is_cut(connection: socket.socket) -> bool:
    """Whether the peer closes the connection within PATIENCE_S."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("num_bytes", [9 * MB, 64 * MB, 2**30], ids=["9M", "64M", "1G"])
async def test_no_hub_admits_a_long_frame_of_a_stranger(mesh: Mesh, num_bytes: int) -> None:
    client = mesh.client()
    for address in (mesh.router.ready.address, client.address):
        with stranger(address) as connection:
            connection.settimeout(5.0)  # shorter than the limit of a silent stranger
            connection.sendall(b"\x06" + struct.pack(">Q", num_bytes) + bytes(1000))
            assert await asyncio.to_thread(is_cut, connection)


SINK = """
import sys
from pathlib import Path
from rollmesh.core.config import JournalConfig
from rollmesh.serve.client.client import RolloutClient
client = RolloutClient(sys.argv[1], JournalConfig(), Path(sys.argv[2]))
client.start()
print(client.address, flush=True)
sys.stdin.read()
client.close()
"""


def memory_is_freed(address: str, pid: int) -> bool:
    """Whether the memory of a message without an end is freed after its sender has gone."""
    process = psutil.Process(pid)
    before = process.memory_info().rss
    with stranger(address) as connection:
        connection.sendall(b"\x04" + bytes([len(READY)]) + READY)
        frames = (b"\x03" + struct.pack(">Q", 2**16) + bytes([1]) * 2**16) * 16
        for _ in range(200):
            connection.sendall(frames)
        look_until(lambda: process.memory_info().rss > before + 150 * MB)
    look_until(lambda: process.memory_info().rss < before + 40 * MB)
    return True


async def test_memory_of_a_router_returns_after_a_hostile_peer_has_gone(mesh: Mesh) -> None:
    ready = mesh.router.ready
    assert await asyncio.to_thread(memory_is_freed, ready.address, ready.pid)


def test_memory_of_a_client_returns_after_a_hostile_peer_has_gone(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SINK, "tcp://127.0.0.1:1", str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout
        address = popen.stdout.readline().decode().strip()
        assert memory_is_freed(address, popen.pid)
        assert popen.stdin
        popen.stdin.close()
        assert popen.wait(PATIENCE_S) == 0
