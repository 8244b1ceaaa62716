"""A worker keeps nothing of a rollout that was delivered and acked, however the rollout ended.

A whole worker in one process: its sockets, its agent server, its sampler in front of an engine,
groups of every outcome, and a sink that acks. Then every object of the process is checked without
running the collector: its type, and whether it has text of an agent.
"""

import asyncio
import gc
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import load_config
from rollmesh.core.errors import AgentFailed, InfraError
from rollmesh.core.heap import freed_bytes
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import listen
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, SamplingPolicy, Score, Task
from rollmesh.engine.backend import EngineRequest
from rollmesh.envs.calls import EnvCalls
from rollmesh.envs.chat import ChatClient, Message
from rollmesh.envs.env import Endpoint, Env, Sibling, Transcript
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.conversation.conversation import Conversation
from rollmesh.runtime.conversation.history import MessageHistory
from rollmesh.runtime.conversation.message_trie import MessageNode
from rollmesh.runtime.conversation.token_graph import TokenGraph
from rollmesh.runtime.generation.generation import Generation
from rollmesh.runtime.registry import Runtime, new_runtime
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.scopes import Loan, Scope
from rollmesh.runtime.session import Session, SessionRecord
from rollmesh.serve.interception.agent_server import AgentServer, count_agent_server
from rollmesh.serve.interception.exchange import Exchange
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.server.groups import GroupPayload
from rollmesh.serve.server.outbox import PendingResult
from rollmesh.serve.server.rollouts import RolloutResult, WorkerContext
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from rollmesh.wire.frames import Packet, decode_record, encode_ask
from rollmesh.wire.machine import ROUTER
from rollmesh.wire.messages import (
    AnyMessage,
    CancelRun,
    GroupAcked,
    GroupAsk,
    GroupDelivered,
    GroupFinished,
    GroupLost,
    RouterHello,
    RunGroup,
    WorkerHello,
)
from rollmesh.wire.sockets import Hub, wait
from tests.leftovers import all_objects, holders

PATIENCE_S, SOON_S = 100.0, 60.0
SHORT_CHARS = 100
HI: Message = {"role": "user", "content": "hi"}


class Tool:
    """The object that an environment makes for one rollout."""


OF_A_ROLLOUT = (
    *(
        Scope,
        Loan,
        Session,
        Conversation,
        MessageHistory,
        TokenGraph,
        MessageNode,
        Reply,
        Generation,
        Turn,
    ),
    *(Exchange, HttpRequest, Blob, EngineRequest, SessionRecord, RolloutRecord, GroupRecord),
    *(RolloutResult, GroupPayload, PendingResult, Transcript, Sibling, Endpoint, Tool),
)
NEVER_SEEN = {
    Turn,
    SessionRecord,
    GroupRecord,
    EngineRequest,
}  # written and read without an await in between
PASSING = (Generation, HttpRequest)


class Endings(Env):
    """An environment whose tasks name the way in which their rollouts end."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.client = ChatClient()
        self.mark = secrets.token_hex(8)
        """In every message of agents, except for the opening, which all groups share."""
        self.on_look: Callable[[], None] = lambda: None
        self.late = asyncio.Event()
        """Releases code that did not end when it was cancelled."""
        self._engine = engine
        self._together = asyncio.Barrier(2)
        """Siblings that have ended before the engine is held."""
        self.begun = asyncio.Event()
        self.runtime: Runtime | None = None
        self._http: aiohttp.ClientSession | None = None
        self._kept = ExitStack()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        raise NotImplementedError

    async def run(self, task: Task, agent: Endpoint) -> Transcript:
        tool, messages = Tool(), [HI]
        for text in (self._look(), HI):
            reply = await self.client.complete(agent, messages, max_tokens=4)
            messages += [reply.message, text]
        await self._end(task.id, agent)
        del tool
        return Transcript(data={"messages": messages[:-1]}, truncated=task.id == "truncated")

    async def _end(self, how: str, agent: Endpoint) -> None:
        match how:
            case "agent error":
                raise AgentFailed("gave up")
            case "crash":
                raise KeyError("bug")
            case "infra error":
                raise InfraError("engine gone")
            case "cancelled" | "deadline" | "overtime":
                await self._together.wait()
                await self._streaming(agent)
                self.begun.set()
                await asyncio.get_running_loop().create_future()
            case "sealed in an answer":
                await self._together.wait()
                await self._streaming(agent)
                self.on_look()
            case "left behind":
                while not self.late.is_set():
                    with suppress(asyncio.CancelledError):
                        await self.late.wait()
            case "client vanished":
                await self._together.wait()
                (await self._streaming(agent)).close()
                await self._engine.release()
                await self.client.complete(agent, [HI, self._look()], max_tokens=4)
            case "over a limit":
                assert self.runtime is not None
                self.runtime.sessions.find(agent.api_key).end_early("too large")
                await self.client.complete(agent, [self._look()], max_tokens=4)

    def score(self, task: Task, transcript: Transcript) -> Score:
        if task.id == "no score":
            raise KeyError("bug")
        return Score(1.0)

    async def score_siblings(self, task: Task, siblings: list[Sibling]) -> list[Score]:
        self.on_look()
        match task.id:
            case "children":
                for sibling in siblings:
                    messages = [*sibling.transcript.data["messages"], self._look()]
                    await self.client.complete(sibling.line, messages, max_tokens=4)
                    reply = await self.client.complete(sibling.model, [HI], max_tokens=4)
                    talk = [HI, reply.message, self._look()]
                    await self.client.complete(sibling.model, talk, max_tokens=4)
            case "a child that stays":
                await self._streaming(siblings[0].line)
            case "leaked loans":
                assert self.runtime is not None
                for sibling in siblings:
                    rollout_id, is_kept = RolloutId(GROUPS[task.id], sibling.index), sibling.index
                    loan = self.runtime.lend(rollout_id, "forgetful", appends=not is_kept)
                    if is_kept:  # until the group was delivered, and dropped then
                        self._kept.callback(id, loan)
        return [sibling.score for sibling in siblings]

    async def close(self) -> None:
        await self.client.close()
        if self._http:
            await self._http.close()

    async def hang_up(self) -> None:
        """Close the clients: an open one holds connections, and so does code that ends late."""
        self.late.set()
        self._kept.close()
        await self._engine.release()

    def _look(self) -> Message:  # long enough for a blob
        return {"role": "user", "content": f"a long look {self.mark}, " * 1500}

    async def _streaming(self, agent: Endpoint) -> aiohttp.ClientResponse:
        """A streamed answer that has begun and does not end, since the engine is held."""
        self._engine.hold()
        ask = {"messages": [HI, self._look()], "stream": True, "max_tokens": 100}
        self._http = self._http or aiohttp.ClientSession()
        call = self._http.post(
            f"{agent.base_url}/chat/completions",
            data=orjson.dumps(ask),
            headers={"x-api-key": agent.api_key},
        )
        begun = asyncio.ensure_future(call)
        while not begun.done():  # a sibling may take the token that was meant for this one
            await self._engine.allow(1)
            await asyncio.wait((begun,), timeout=0.01)
        response = begun.result()
        self._kept.callback(response.close)
        assert await response.content.readuntil(b"\n\n")
        return response


ENDINGS: dict[str, list[Outcome]] = {
    "completed": [Outcome.COMPLETED] * 2,
    "truncated": [Outcome.TRUNCATED] * 2,
    "agent error": [Outcome.AGENT_ERROR] * 2,
    "crash": [Outcome.AGENT_ERROR] * 2,
    "infra error": [Outcome.CANCELLED, Outcome.INFRA_ERROR],
    "no score": [Outcome.CANCELLED, Outcome.INFRA_ERROR],
    "cancelled": [],
    "deadline": [Outcome.CANCELLED] * 2,
    "overtime": [Outcome.TRUNCATED] * 2,
    "left behind": [Outcome.TRUNCATED] * 2,
    "sealed in an answer": [Outcome.COMPLETED] * 2,
    "client vanished": [Outcome.COMPLETED] * 2,
    "over a limit": [Outcome.TRUNCATED] * 2,
    "children": [Outcome.COMPLETED] * 2,
    "a child that stays": [Outcome.COMPLETED] * 2,
    "leaked loans": [Outcome.COMPLETED] * 2,
    "unwanted": [Outcome.COMPLETED] * 2,
    "never acked": [Outcome.COMPLETED] * 2,
}
SETTINGS = {
    "overtime": ["worker.run_timeout_s=1"],
    "left behind": ["worker.run_timeout_s=1"],
    "never acked": ["worker.delivery_timeout_s=0.5"],
}
GROUPS = {ending: GroupId("r", seq) for seq, ending in enumerate(ENDINGS)}


class Peer:
    """The test's end of a worker's connection: its router, or its sink."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0")
        self._route = b""
        self._packets: list[Packet] = []

    async def next(self, kind: type[AnyMessage]) -> Packet:
        """Return the next message of a kind; drop messages before it."""
        while True:
            while self._packets:
                packet = self._packets.pop(0)
                if isinstance(packet.message, kind):
                    return packet
            await asyncio.to_thread(wait, [self.hub], None, 0.1)
            for self._route, packet in self.hub.receive():  # noqa: B020 - there is one peer
                self._packets.append(packet)

    def send(self, message: AnyMessage, body: bytes = b"") -> None:
        assert self.hub.send(self._route, Packet(message, "router", body))


class Mesh:
    """A worker; the test acts as its router and its sink."""

    def __init__(self, env: Endings, runtime: Runtime, worker: Worker, router: Peer) -> None:
        self.env, self.runtime, self.worker = env, runtime, worker
        self.router, self.sink = router, Peer()

    async def play(self, ending: str) -> GroupRecord | None:
        """Run a group until it is delivered and acked; return the sink's messages."""
        self.env.begun.clear()
        group_id = GROUPS[ending]
        ask = encode_ask(GroupAsk(task=Task(id=ending), sampling=SamplingPolicy(), seed=5))
        deadline_s = 2.0 if ending == "deadline" else 0.0
        self.router.send(RunGroup(group_id, 1, 2, self.sink.hub.address, deadline_s), ask)
        if ending == "cancelled":
            await self.env.begun.wait()
            self.router.send(CancelRun(group_id, "it is no longer wanted"))
            while self.runtime.entries()["scopes"]:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            await self.env.hang_up()
            return None
        finished = await self.sink.next(GroupFinished)
        self.env.on_look()
        record = decode_record(finished.body)
        match ending:
            case "unwanted":
                self.router.send(CancelRun(group_id, "it is no longer wanted"))
                while self.worker.report_status().unacked_bytes:  # noqa: ASYNC110 - no event announces it
                    await asyncio.sleep(0)
            case "never acked":
                await self.router.next(GroupLost)
            case _:
                num_before = freed_bytes()
                self.sink.send(GroupAcked(group_id, 1, False))
                await self.router.next(GroupDelivered)
                assert freed_bytes() - num_before >= len(finished.body)
        await self.env.hang_up()
        return record


@asynccontextmanager
async def meshed(folder: Path, *settings: str) -> AsyncIterator[Mesh]:
    model = write_model_folder(folder / "model")
    settings_args = [f"model.path={model}", f"run.folder={folder}", "worker.num_infra_retries=1"]
    config = load_config(None, [*settings_args, "model.max_context_tokens=200000", *settings])
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine(next_token))
        router = Peer()
        worker = Worker(WorkerSettings("w0", router.hub.address, config, None))
        runtime, sampler = new_runtime(config, worker.view, worker.report)
        stack.push_async_callback(sampler.close)
        server = AgentServer(runtime, config.interception, "policy")
        address = await server.start(listen("127.0.0.1:0"))
        stack.push_async_callback(server.stop)
        count_agent_server(worker.inventory, runtime, sampler, server)
        env = Endings(engine)
        env.runtime = runtime
        stack.push_async_callback(env.close)
        mesh = Mesh(env, runtime, worker, router)
        calls = EnvCalls(grace_s=0.1)
        context = WorkerContext(
            env, runtime, f"{address}/v1", "policy", config.worker, SystemClock(), calls
        )
        worker.begin(context)
        stop = asyncio.Event()
        serving = asyncio.create_task(worker.serve(stop))
        await router.next(WorkerHello)
        router.send(RouterHello(1.0))
        row = EngineRow(engine.url, "i0", EnginePhase.READY, 0)
        worker.receive(ROUTER, Packet(FleetChanged(1, (row,)), "router"))
        try:
            yield mesh
        finally:
            stop.set()
            await serving
            for peer in (mesh.router, mesh.sink):
                peer.hub.close()


def next_token(policy_version: int, context: Sequence[int]) -> int:
    """Never end a turn, and answer at once."""
    return 1 + len(context) % 200


def in_use(mesh: Mesh) -> list[Any]:
    """Non-empty tables and held bytes, except for entries that expire soon."""
    figures = mesh.worker.inventory.figures()
    passing = [each for each in gc.get_objects() if isinstance(each, PASSING)]
    return [each for each in figures if each.value and each.name != "cache_entries"] + passing


def left_of_rollouts(mark: str) -> list[Any]:
    """Objects of rollouts, found without the collector: an object that waits for it is not
    freed.
    """

    def is_of_one(each: Any) -> bool:
        if isinstance(each, str | bytes | bytearray):
            wanted: Any = mark if isinstance(each, str) else mark.encode()
            return len(each) > SHORT_CHARS and wanted in each
        return isinstance(each, OF_A_ROLLOUT)

    return all_objects(is_of_one)


@pytest.mark.slow
@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("ending", ENDINGS)
async def test_nothing_of_a_rollout_is_reachable_once_it_was_delivered(
    tmp_path: Path, ending: str
) -> None:
    async with asyncio.timeout(PATIENCE_S), meshed(tmp_path, *SETTINGS.get(ending, [])) as mesh:
        gc.disable()
        try:
            record = await mesh.play(ending)
            outcomes = sorted([rollout.outcome for rollout in record.rollouts] if record else [])
            assert outcomes == ENDINGS[ending], record and [r.error for r in record.rollouts]
            del record
            # Aborts are repeated for a moment, only the server notices lost clients, and a thread
            # of zmq's releases sent messages.
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    while in_use(mesh):  # noqa: ASYNC110 - no event announces it
                        await asyncio.sleep(0)
                    while left_of_rollouts(mesh.env.mark):  # noqa: ASYNC110 - no event announces it
                        await asyncio.sleep(0)
            left = in_use(mesh) + left_of_rollouts(mesh.env.mark)
            chains = map(holders, left[:12])
            assert left == [], "\n".join([str(Counter(map(type, left))), *chains])
        finally:
            gc.enable()


@pytest.mark.usefixtures("young_heap")
async def test_every_part_of_a_running_rollout_is_found(tmp_path: Path) -> None:
    """Otherwise the test above would find nothing in any case."""
    seen: set[type] = set()
    async with asyncio.timeout(PATIENCE_S), meshed(tmp_path) as mesh:
        mesh.env.on_look = lambda: seen.update(map(type, left_of_rollouts(mesh.env.mark)))
        await mesh.play("sealed in an answer")
    assert seen >= {*OF_A_ROLLOUT, str, bytes} - NEVER_SEEN
