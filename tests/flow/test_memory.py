"""The bytes that processes report as held, compared with resident memory, and the effect of
budgets.
"""

import asyncio
import base64
import io
import random
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.core.ids import GroupId
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.core.types import Outcome
from rollmesh.serve.client.client import Finished
from rollmesh.testing.upstreams import ProviderResponse, ScriptedProvider
from tests.flow.gateway_process import Gateway, serving
from tests.flow.worker_mesh import (
    PATIENCE_S,
    Mesh,
    Process,
    SlowSink,
    ask,
    look_until,
    open_mesh,
    running,
    take,
)

pytestmark = pytest.mark.slow

MIB = 2**20
FIGURE = re.compile(
    r'^rollmesh_(held_bytes|entries)\{(?:what|table)="(\w+)"\} (\S+)$', re.MULTILINE
)
LINGERS = """
class TheEnv(Plain):
    def __init__(self):
        self.chat = ChatClient()

    async def run(self, task, agent):
        text = task.id + "x" * 3000
        await self.chat.complete(agent, [{"role": "user", "content": text}], max_tokens=4)
        gate = Path(task.data["gate"])
        while not gate.exists():
            await asyncio.sleep(0.02)
        return Transcript()

    async def close(self):
        await self.chat.close()
"""


GROWS = """
class TheEnv(Plain):
    def __init__(self):
        self.chat = ChatClient()

    async def run(self, task, agent):
        messages = []
        while True:
            messages.append({"role": "user", "content": "x" * 500})
            reply = await self.chat.complete(agent, messages, max_tokens=4)
            messages.append({"role": "assistant", "content": reply.text})

    async def close(self):
        await self.chat.close()
"""


NUM_HEAVY_CALLS, NUM_HEAVY_GROUPS = 7, 8
HEAVY_TOKENS = 10**6
HEAVY = f"""
import aiohttp

class TheEnv(Plain):
    async def run(self, task, agent):
        async with aiohttp.ClientSession() as client:
            for call in range({NUM_HEAVY_CALLS}):
                ask = {{"prompt": [call, *[7] * {HEAVY_TOKENS}], "max_tokens": 1}}
                auth = {{"Authorization": "Bearer " + agent.api_key}}
                url = agent.base_url + "/completions"
                async with client.post(url, json=ask, headers=auth) as answer:
                    assert answer.status == 200, await answer.text()
        return Transcript()
"""
"""Each call has its own prompt, so that a group has some 28 MB of token ids."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


def counts(metrics: str) -> dict[tuple[str, str], float]:
    """Held bytes and entries, by kind and name."""
    return {(kind, name): float(value) for kind, name, value in FIGURE.findall(metrics)}


def metrics_of(worker: Process, headers: Mapping[str, str] | None = None) -> str:
    request = urllib.request.Request(f"{worker.ready.address}/metrics", headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return str(reply.read().decode())


async def test_a_worker_reports_its_tables_and_they_are_empty_at_rest(mesh: Mesh) -> None:
    worker = await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    for _ in range(4):
        ask(client)
    assert {type(each) for each in await take(client, 4)} == {Finished}
    await mesh.until(lambda: not any(counts(metrics_of(worker)).values()))
    metrics = metrics_of(worker)
    assert {"graph", "history", "blobs", "outbox", "bodies"} <= {
        name for kind, name in counts(metrics) if kind == "held_bytes"
    }
    assert 'rollmesh_cache_entries{cache="delivered_groups"} 4.0' in metrics
    assert 'rollmesh_process_rss_bytes{role="worker"}' in metrics
    await mesh.until(lambda: not any(counts(metrics_of_router(mesh)).values()))


def metrics_of_router(mesh: Mesh) -> str:
    with urllib.request.urlopen(f"{mesh.router.ready.http_address}/metrics") as reply:
        return str(reply.read().decode())


async def test_a_workers_metrics_require_the_admin_token_if_there_is_one(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "open-sesame")
    worker = await asyncio.to_thread(mesh.worker, "worker-0")

    def status(headers: Mapping[str, str]) -> int:
        try:
            return 200 if metrics_of(worker, headers) else 0
        except urllib.error.HTTPError as error:
            return error.code

    assert status({}) == status({"Authorization": "Bearer wrong"}) == 401
    assert status({"Authorization": "Bearer open-sesame"}) == 200


async def test_groups_wait_with_the_reason_while_a_worker_is_over_its_budget(mesh: Mesh) -> None:
    env = mesh.write_env("lingers", LINGERS)
    await asyncio.to_thread(mesh.worker, "worker-0", env, max_held_bytes=10_000)
    client = mesh.client()
    gates = [mesh.folder / f"gate-{number}" for number in range(2)]
    ask(client, num_samples=1, env=env, gate=str(gates[0]))
    await mesh.until(lambda: mesh.worker_status("worker-0").get("waits_for"))
    row = mesh.worker_status("worker-0")
    assert row["waits_for"].startswith("held_bytes: ")
    assert row["waits_for"].endswith(" held, worker.max_held_bytes = 10000")
    assert row["held_bytes"] >= 10_000
    ask(client, num_samples=1, env=env, gate=str(gates[1]))
    await mesh.until(lambda: mesh.status()["causes"])
    [cause] = mesh.status()["causes"]
    assert cause.startswith("over_budget: ")
    assert "worker-0 waits for held_bytes" in cause
    assert mesh.status()["queue"]["queued"] == 1
    for gate in gates:
        gate.touch()
    arrivals = await take(client, 2)
    assert [each.attempt for each in arrivals if isinstance(each, Finished)] == [1, 1]
    await mesh.until(lambda: not mesh.worker_status("worker-0")["waits_for"])


async def test_a_session_over_its_budget_ends_as_truncated_with_its_reason(mesh: Mesh) -> None:
    env = mesh.write_env("grows", GROWS)
    args = mesh.worker_args("worker-0", env)
    limit = ["--set", "interception.max_session_bytes=40000"]
    with running(mesh.folder, *args, *limit):
        ask(client := mesh.client(), num_samples=1, env=env)
        [finished] = await take(client)
    assert isinstance(finished, Finished)
    [rollout] = finished.record.rollouts
    assert rollout.outcome == Outcome.TRUNCATED
    assert "interception.max_session_bytes = 40000" in rollout.error
    assert rollout.num_calls < 20, "the agent does not stop by itself"


async def test_a_worker_counts_finished_groups_within_a_quarter_of_resident_memory(
    tmp_path: Path,
) -> None:
    async with open_mesh(tmp_path, next_token=lambda *_: 7) as mesh:
        env = mesh.write_env("heavy", HEAVY)
        args = mesh.worker_args("worker-0", env, max_unacked_bytes=2**30, max_rollouts=1)
        room = ["--set", f"model.max_context_tokens={2 * HEAVY_TOKENS}"]
        with running(mesh.folder, *args, *room) as worker:
            await outbox_is_counted(mesh, worker, env)


async def outbox_is_counted(mesh: Mesh, worker: Process, env: str) -> None:
    def outbox() -> float:
        return counts(metrics_of(worker))["held_bytes", "outbox"]

    resident = psutil.Process(worker.popen.pid).memory_info
    idle_bytes = resident().rss
    sink = SlowSink(mesh.router.ready.address)
    for number in range(NUM_HEAVY_GROUPS):
        group_id = GroupId("r1", number)
        sink.ask(group_id, env=env)
        await asyncio.to_thread(sink.until, partial(sink.has, group_id))
        mesh.engine.seen.clear()
    held_bytes = outbox()
    assert held_bytes >= 200 * MIB
    # Freed memory is returned by a trim, some time after the last call.
    await mesh.until(lambda: resident().rss - idle_bytes < 1.25 * held_bytes)
    assert resident().rss - idle_bytes > held_bytes / 1.25
    for arrival in sink.finished:
        sink.ack(*arrival)
    await mesh.until(lambda: outbox() == 0)
    await mesh.until(lambda: resident().rss < 1.4 * idle_bytes)
    sink.close()


# a gateway that holds much

NUM_SESSIONS, NUM_SHOTS = 8, 40
SHOT_BYTES = MIB // 2
TEXT_BYTES = 5 * MIB
BODY_BYTES = 24 * MIB


def shown(rng: random.Random) -> bytes:
    """A call with NUM_SHOTS screenshots of its own and a long text."""
    shots = [
        base64.b64encode(rng.randbytes(SHOT_BYTES * 3 // 4)).decode() for _ in range(NUM_SHOTS)
    ]
    images = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}}
        for each in shots
    ]
    text = rng.randbytes(TEXT_BYTES // 2).hex()
    content = [{"type": "text", "text": text}, *images]
    return msgspec.json.encode({"messages": [{"role": "user", "content": content}]})


async def post(gateway: Gateway, opened: Mapping[str, str], body: bytes) -> int:
    auth = {"Authorization": f"Bearer {opened['api_key']}"}
    url = f"{opened['base_url']}/chat/completions"
    async with gateway.client.post(url, data=io.BytesIO(body), headers=auth) as response:
        await response.read()
        return response.status


@asynccontextmanager
async def half_sent(gateway: Gateway, opened: Mapping[str, str]) -> AsyncIterator[None]:
    """Hold a call open whose last byte is not sent."""
    host, _, port = gateway.address.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        await send_most(writer, opened)
        yield
    finally:
        writer.transport.abort()


async def send_most(writer: asyncio.StreamWriter, opened: Mapping[str, str]) -> None:
    """Send all of a call except its last byte."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Length: {}\r\nx-api-key: {}\r\n\r\n"
    )
    writer.write(head.format(BODY_BYTES + 1, opened["api_key"]).encode())
    writer.write(b'{"messages":[{"role":"user","content":"' + b"y" * (BODY_BYTES - 39))
    await writer.drain()


async def trims(gateway: Gateway) -> float:
    """The number of times that the gateway has returned memory to the system."""
    metrics = (await gateway.admin("GET", "/metrics"))[1]
    return float(metrics.partition("\nrollmesh_trims_total ")[2].split()[0])


async def counted(gateway: Gateway) -> dict[str, float]:
    metrics = counts((await gateway.admin("GET", "/metrics"))[1])
    return {name: value for (kind, name), value in metrics.items() if kind == "held_bytes"}


async def test_a_gateway_counts_held_bytes_within_a_quarter_of_resident_memory(
    tmp_path: Path,
) -> None:
    rng = random.Random(7)
    args = ["--capture", "relay", "--set", "interception.keepalive_s=60"]
    async with (
        ScriptedProvider([ProviderResponse() for _ in range(2 * NUM_SESSIONS + 2)]) as provider,
        serving(tmp_path, *args, "--engine", provider.url) as gateway,
    ):
        resident = psutil.Process(gateway.process.pid).memory_info
        warm = await gateway.open()
        assert await post(gateway, warm, shown(rng)) == 200
        await gateway.admin("DELETE", f"/admin/sessions/{warm['session_id']}")
        await asyncio.to_thread(look_until, lambda: resident().rss < 100 * MIB)
        idle_bytes = resident().rss
        *sessions, last = [await gateway.open() for _ in range(NUM_SESSIONS + 1)]
        for opened in (*sessions, last):
            assert await post(gateway, opened, shown(rng)) == 200
            provider.seen.clear()
        async with half_sent(gateway, sessions[0]):
            num_trims = await trims(gateway)
            await gateway.admin("DELETE", f"/admin/sessions/{last['session_id']}")
            async with asyncio.timeout(PATIENCE_S):
                while await trims(gateway) == num_trims:
                    pass
            held = await counted(gateway)
            assert held["bodies"] >= BODY_BYTES
            held_bytes = sum(held.values())
            assert held_bytes >= 200 * MIB

            def are_alike() -> bool:
                return 0.8 < held_bytes / (resident().rss - idle_bytes) < 1.25

            await asyncio.to_thread(look_until, are_alike)
        for opened in sessions:
            await gateway.admin("DELETE", f"/admin/sessions/{opened['session_id']}")
        await asyncio.to_thread(look_until, lambda: resident().rss < 1.4 * idle_bytes)
        async with asyncio.timeout(PATIENCE_S):
            while any((await counted(gateway)).values()):
                pass
