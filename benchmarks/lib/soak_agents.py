"""The soak's agents, in one process: browsers that talk to a model over HTTP.

    python -m benchmarks.lib.soak_agents --socket PATH --shape JSON --log FILE --ready-fd N

A client connects to the socket, sends its agent's endpoint (AgentRequest) and receives the agent's
result (AgentEnd); disconnecting ends the agent. Each TICK_S, a line of the log has the bytes that
each server must hold: unique bytes of running groups, and bytes of bodies in flight.

- Every screenshot's bytes are unique, except that siblings share their first.
- Bodies are written piece by piece from one pool that all agents share, so the load costs little
  memory and time. Bytes are counted here, never estimated.
- Only the HTTP/1.1 that the soak's servers use is supported.
"""

import argparse
import asyncio
import base64
import contextlib
import gc
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import uvloop

from rollmesh.core.process import Ready, announce, die_with_parent

POOL = 16
"""Number of different screenshots, before each gets a unique head."""
HEAD_CHARS = 32
"""Bytes at the head of a screenshot that make it unique."""
MIN_SHOT_BYTES = 64
OLD_SHOT = b'{"type":"text","text":"[an older screenshot]"}'
WORDS = ("link", "button", "heading", "price", "table", "menu", "search", "result", "form", "image")
NUM_WORDS = 48
SYSTEM = (
    "You use a browser. Look at the screenshot, say in a line what you see, and call one tool. "
    "Stop when the task is done."
)
TOOLS = (
    b'[{"type":"function","function":{"name":"click","description":"Click at a place of the page.",'
    b'"parameters":{"type":"object","properties":{"x":{"type":"integer"},"y":{"type":"integer"}},'
    b'"required":["x","y"]}}}]'
)


class RolloutShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the rollouts."""

    num_turns: int = 45
    shot_bytes: int = 500_000
    """Bytes of a screenshot as base64."""
    keep: int = 0
    """Number of latest screenshots that stay in the history; 0: all."""
    group_size: int = 4
    slots: int = 4
    """Concurrent rollouts of one worker."""
    streams: float = 0.1
    """Share of calls that are streamed."""
    vanish: float = 0.02
    """Share of calls whose client disconnects during the stream and asks again."""
    crash: float = 0.02
    """Share of agents that crash during their rollout."""
    seed: int = 0


Pieces = list[bytes | memoryview]


class Shots:
    """Screenshots as (head, rest) of base64 text; different numbers make different ones."""

    def __init__(self, shape: RolloutShape) -> None:
        chance = random.Random(shape.seed)
        num_bytes = max(shape.shot_bytes, MIN_SHOT_BYTES) // 4 * 3
        made = (base64.b64encode(chance.randbytes(num_bytes)) for _ in range(POOL))
        self._rests = [memoryview(each)[HEAD_CHARS:] for each in made]
        self._salt = chance.randbytes(8)

    def shot(self, number: int) -> Pieces:
        """Return the screenshot of this number, always the same text."""
        raw = b"\x89PNG" + self._salt + number.to_bytes(12, "big")
        return [base64.b64encode(raw), self._rests[number % POOL]]


class Browser:
    """One agent's conversation; `body` is its next request."""

    def __init__(self, shape: RolloutShape, shots: Shots, task: int, index: int) -> None:
        self.num_unique_bytes = 0
        """Bytes of messages shown and received so far, which a recorder must hold."""
        self._shape = shape
        self._shots = shots
        self._chance = random.Random(f"{shape.seed}.{task}.{index}")
        self._first_shot = task * 1_000_000
        """Siblings begin with the same page."""
        self._next_shot = self._first_shot + 1 + index * 1_000
        self._messages: list[Pieces] = [[_message("system", SYSTEM)]]
        self._shown: list[tuple[int, Pieces]] = []
        """Index and shortened pieces of messages whose screenshot may still be removed."""
        words = f"Task {task}. {self._words()}"
        self._show(b'{"role":"user","content":[' + _text(words), self._first_shot)

    def crash_turn(self) -> int:
        """Return the turn in which the agent crashes; 0: it does not."""
        dies = self._chance.random() < self._shape.crash
        return self._chance.randint(1, self._shape.num_turns) if dies else 0

    def does_vanish(self) -> bool:
        """Whether the client of the next call disconnects."""
        return self._chance.random() < self._shape.vanish

    def does_stream(self) -> bool:
        """Whether the next call is streamed."""
        return self._chance.random() < self._shape.streams

    def body(self, is_stream: bool) -> Pieces:
        """Return the pieces of a request's body."""
        flag = b'"stream":true,' if is_stream else b""
        head = b'{"model":"policy",%b"max_tokens":512,"tools":%b,"messages":[' % (flag, TOOLS)
        pieces: Pieces = [head]
        for at, message in enumerate(self._messages):
            if at:
                pieces.append(b",")
            pieces += message
        pieces.append(b"]}")
        return pieces

    def add_reply(self, message: bytes, call_ids: list[str]) -> None:
        """Append the model's answer, and the new page that its calls led to."""
        self._messages.append([message])
        self.num_unique_bytes += len(message)
        for call_id in call_ids or [""]:
            role = b'{"role":"tool","tool_call_id":"%b","content":[' % call_id.encode()
            if not call_id:
                role = b'{"role":"user","content":['
            self._show(role + _text(self._words()), self._next_shot)
            self._next_shot += 1

    def _show(self, before: bytes, number: int) -> None:
        """Append a message with a screenshot; remove screenshots before the last `keep`."""
        image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,'
        shot = self._shots.shot(number)
        pieces: Pieces = [before + b"," + image, *shot, b'"}}]}']
        self.num_unique_bytes += num_bytes(pieces)
        self._shown.append((len(self._messages), [before + b",", OLD_SHOT, b"]}"]))
        self._messages.append(pieces)
        if self._shape.keep and len(self._shown) > self._shape.keep:
            place, without = self._shown.pop(0)
            self._messages[place] = without

    def _words(self) -> str:
        chance = self._chance
        return " ".join(f"{chance.choice(WORDS)} {chance.randrange(999)}" for _ in range(NUM_WORDS))


class ModelReply(msgspec.Struct):
    """A model's answer, folded from a plain or a streamed reply."""

    message: bytes
    """The message in the form in which the agent sends it back."""
    call_ids: list[str]


class _Named(msgspec.Struct):
    id: str = ""
    index: int = 0
    function: dict[str, Any] = {}


class _ReplyMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Named] | None = None


class _Choice(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw()
    delta: _ReplyMessage = msgspec.field(default_factory=_ReplyMessage)


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []


_replies = msgspec.json.Decoder(_Reply)
_messages = msgspec.json.Decoder(_ReplyMessage)


def read_reply(body: bytes) -> ModelReply:
    """Parse a plain answer."""
    raw = bytes(_replies.decode(body).choices[0].message)
    return ModelReply(raw, [call.id for call in _messages.decode(raw).tool_calls or ()])


def read_events(events: list[bytes]) -> ModelReply:
    """Merge a stream's `data:` lines."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in _replies.decode(event).choices:
            content.append(choice.delta.content or "")
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": part.id, "type": "function", "name": "", "arguments": ""}
                )
                call["name"] += part.function.get("name") or ""
                call["arguments"] += part.function.get("arguments") or ""
    tool_calls = [
        {"id": c["id"], "type": c["type"], "function": {k: c[k] for k in ("name", "arguments")}}
        for c in calls.values()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return ModelReply(msgspec.json.encode(message), [str(call["id"]) for call in tool_calls])


def num_bytes(pieces: Pieces) -> int:
    """Return the total size of the pieces."""
    return sum(map(len, pieces))


def _message(role: str, text: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": text})


def _text(text: str) -> bytes:
    return msgspec.json.encode({"type": "text", "text": text})


EVENT = b"data: "
DONE = b"[DONE]"
MAX_LINE_BYTES = 2**20
PATIENCE_S = 120.0


class CallError(Exception):
    """An unexpected answer."""


class Line:
    """A kept connection; opened when first used."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key.encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, path: str, pieces: Pieces, *, is_retry: bool, is_cut: bool = False) -> None:
        """Send a request, or the first half of its body; return when it is written or buffered."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=MAX_LINE_BYTES
            )
        retry = b"x-stainless-retry-count: 1\r\n" if is_retry else b""
        head = (
            b"POST %b HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer %b\r\n%b"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ) % (path.encode(), self._key, retry, num_bytes(pieces))
        self._writer.writelines([head, *(pieces[: len(pieces) // 2] if is_cut else pieces)])
        await self._writer.drain()

    async def plain(self) -> bytes:
        """Return the answer's body."""
        async with asyncio.timeout(PATIENCE_S):
            length = await self._head()
            if length < 0:
                raise CallError("a stream, where a plain answer was asked for")
            assert self._reader
            return await self._reader.readexactly(length)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event of a stream, except its end."""
        async with asyncio.timeout(PATIENCE_S):
            if await self._head() >= 0:
                raise CallError("a plain answer, where a stream was asked for")
            rest = b""
            async for chunk in self._chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(EVENT) and not line.startswith(EVENT + DONE):
                        yield line[len(EVENT) :]

    def close(self) -> None:
        """Close at once, whatever is in progress; the next `ask` opens a new connection."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _head(self) -> int:
        """Return the length of the body, -1 if it is chunked. CallError if the status is not
        200.
        """
        assert self._reader
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        mark, _, rest = head.partition(b"content-length:")
        length = int(rest.partition(b"\r\n")[0]) if rest else -1
        if not mark.startswith(b"http/1.1 200"):
            why = await self._reader.readexactly(length) if length > 0 else b""
            raise CallError(f"{head[:40]!r}: {why[:300].decode(errors='replace')}")
        return length

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._reader
        while length := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(length + 2))[:-2]
        await self._reader.readexactly(2)


TICK_S = 0.1
NICENESS = 5
"""Niceness of the load: on real machines, agents and engines have their own cores."""
BACKLOG = 128
PATH = "/v1/chat/completions"


class AgentRequest(msgspec.Struct, frozen=True):
    """A request to start an agent."""

    base_url: str
    """A URL that ends in /v1."""
    api_key: str
    task: int
    num_turns: int


class AgentEnd(msgspec.Struct, frozen=True):
    """The result of an agent."""

    outcome: str
    """done, crashed, or broken: it got an unexpected answer."""
    error: str = ""


class Load(msgspec.Struct):
    """Bytes that one server must hold now."""

    live_bytes: int = 0
    body_bytes: int = 0


class LoadSample(msgspec.Struct, frozen=True):
    """A line of the log."""

    at_s: float
    """time.monotonic, which all processes share."""
    held: dict[str, Load]
    """Load by the server's port."""
    counts: dict[str, int]
    """Totals since the start of turns, rollouts, done, crashed, broken, vanished."""
    turns_s: list[float]
    """Seconds of each turn since the last line."""


class SiblingGroup:
    """Siblings; their bytes count as held until the last has ended, as a group's scope holds
    them.
    """

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0
        self.num_bytes = 0


class Agents:
    """All running agents."""

    def __init__(self, shape: RolloutShape) -> None:
        self.shape = shape
        self.held: dict[str, Load] = {}
        self.counts: Counter[str] = Counter()
        self.turns_s: list[float] = []
        self._shots = Shots(shape)
        self._groups: dict[tuple[str, int], SiblingGroup] = {}

    async def play(self, request: AgentRequest) -> AgentEnd:
        """Run one rollout."""
        port = request.base_url.partition("//")[2].partition("/")[0].rpartition(":")[2]
        key = (port, request.task)
        group = self._groups.setdefault(key, SiblingGroup())
        held = self.held.setdefault(port, Load())
        browser = Browser(self.shape, self._shots, request.task, group.num_begun)
        group.num_begun += 1
        agent = _Agent(self, held, group, browser, Line(int(port), request.api_key))
        try:
            outcome = await agent.run(request.num_turns)
            result = AgentEnd(outcome)
        except (CallError, OSError, EOFError, TimeoutError) as error:
            result = AgentEnd("broken", f"{type(error).__name__}: {error}")
        finally:
            agent.line.close()
            group.num_ended += 1
            if group.num_ended >= self.shape.group_size:
                held.live_bytes -= group.num_bytes
                del self._groups[key]
        self.counts["rollouts"] += 1
        self.counts[result.outcome] += 1
        return result


class _Agent:
    """One rollout in progress."""

    def __init__(
        self, agents: Agents, held: Load, group: SiblingGroup, browser: Browser, line: Line
    ) -> None:
        self.line = line
        self._agents = agents
        self._held = held
        self._group = group
        self._browser = browser
        self._num_counted = 0
        self._count()

    async def run(self, num_turns: int) -> str:
        """Run the turns; return "done" or "crashed"."""
        crash_turn = self._browser.crash_turn()
        for turn in range(1, num_turns + 1):
            is_stream = self._browser.does_stream()
            vanishes = self._browser.does_vanish()
            if turn == crash_turn:
                await self._crash()
                return "crashed"
            if vanishes:
                await self._vanish(self._browser.body(True))
            began_s = time.perf_counter()
            pieces = self._browser.body(is_stream or vanishes)
            await self._call(pieces, is_stream or vanishes, vanishes)
            self._agents.turns_s.append(time.perf_counter() - began_s)
            self._agents.counts["turns"] += 1
            self._count()
        return "done"

    async def _call(self, pieces: Pieces, is_stream: bool, is_retry: bool) -> None:
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=is_retry)
            if is_stream:
                reply = read_events([event async for event in self.line.events()])
            else:
                reply = read_reply(await self.line.plain())
        self._browser.add_reply(reply.message, reply.call_ids)

    async def _vanish(self, pieces: Pieces) -> None:
        """Ask for a stream and disconnect at its first event."""
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=False)
            async with contextlib.aclosing(self.line.events()) as events:
                await anext(events)
        self.line.close()
        self._agents.counts["vanished"] += 1

    async def _crash(self) -> None:
        """Disconnect in the middle of a body or of an answer."""
        pieces = self._browser.body(True)
        if self._browser.does_stream():
            await self._vanish(pieces)
            return
        with self._in_flight(pieces):
            await self.line.ask(PATH, pieces, is_retry=False, is_cut=True)
        self.line.close()

    @contextlib.contextmanager
    def _in_flight(self, pieces: Pieces) -> Iterator[None]:
        size = num_bytes(pieces)
        self._held.body_bytes += size
        try:
            yield
        finally:
            self._held.body_bytes -= size

    def _count(self) -> None:
        """Count the bytes shown since the last call as held."""
        new = self._browser.num_unique_bytes - self._num_counted
        self._num_counted += new
        self._group.num_bytes += new
        self._held.live_bytes += new


async def _serve_agent(
    agents: Agents, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one connection: its agent runs until it is done or the client disconnects."""
    line = await reader.readline()
    if not line:
        writer.close()
        return
    playing = asyncio.ensure_future(agents.play(msgspec.json.decode(line, type=AgentRequest)))
    gone = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait([playing, gone], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            writer.write(msgspec.json.encode(playing.result()) + b"\n")
    finally:
        for task in (playing, gone):
            task.cancel()
        writer.close()


async def _write_log(agents: Agents, log: IO[bytes]) -> None:
    while True:
        turns_s, agents.turns_s = agents.turns_s, []
        sample = LoadSample(time.monotonic(), agents.held, dict(agents.counts), turns_s)
        log.write(msgspec.json.encode(sample) + b"\n")
        log.flush()
        await asyncio.sleep(TICK_S)


async def _serve(options: argparse.Namespace, log: IO[bytes]) -> None:
    agents = Agents(msgspec.json.decode(options.shape, type=RolloutShape))
    server = await asyncio.start_unix_server(
        lambda reader, writer: _serve_agent(agents, reader, writer), options.socket, backlog=BACKLOG
    )
    gc.freeze()
    announce(options.ready_fd, Ready("agents", os.getpid(), ""))
    async with server:
        await _write_log(agents, log)


def main() -> None:
    """Serve until killed."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.soak_agents")
    arguments.add_argument("--socket", required=True)
    arguments.add_argument("--shape", required=True)
    arguments.add_argument("--log", required=True)
    arguments.add_argument("--ready-fd", type=int)
    options = arguments.parse_args()
    die_with_parent()
    os.nice(NICENESS)
    with Path(options.log).open("wb") as log:
        uvloop.run(_serve(options, log))


if __name__ == "__main__":
    main()
