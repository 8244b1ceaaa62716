"""Shapes of calls, and rounds of them through several servers, one after the other.

- A history grows by the server's actual answers. Each text is used once, unless the shape says
  otherwise, so that a prompt cache helps only where siblings share a prompt.
- Sessions are opened and closed outside of the measured time. A ratio is between neighbours in
  time, a figure the median over the rounds; the first round warms up and is not counted.
"""

import gc
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.lib.canned_engine import Pace
from benchmarks.lib.corpus import ANSWER_TOKENS, Texts, model_folder
from benchmarks.lib.http_load import HttpAnswer, Talk, Timings, carry
from benchmarks.lib.servers import (
    NUM_CONNECTIONS,
    ChatServer,
    ServerProcess,
    SessionEndpoint,
    start_bare,
    start_engine,
    start_gateway,
    start_peers,
)

SYSTEM = (
    "You are a careful engineer. Read the code, say what it does and where it is wrong, and answer "
    "in plain words without decoration."
)
FIRST_CHARS = 640
"""With the system text and JSON's escapes, a body of about 1 KB."""
GROWING_CHARS = 960
"""Characters of new text per turn; 40 turns and their answers are 60 KB."""
SHORT_CHARS = 120
"""Characters of new text per turn in sessions of hundreds of turns."""


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_completions = msgspec.json.Decoder(_Completion)


def chat(endpoint: SessionEndpoint, messages: bytes, flags: bytes = b"") -> bytes:
    """The HTTP request of one call; `flags` are body fields, each followed by a comma."""
    body = b'{"model":"policy",%b"max_tokens":%d,"messages":[%b]}'
    return post(endpoint, body % (flags, ANSWER_TOKENS, messages))


def post(endpoint: SessionEndpoint, body: bytes) -> bytes:
    """Return an HTTP request as agents send them, with the fewest headers."""
    head = (
        b"POST %b HTTP/1.1\r\nHost: bench\r\nAccept: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % (endpoint.path, endpoint.key, len(body)) + body


def message(role: str, content: str) -> bytes:
    """Return one message as JSON."""
    return msgspec.json.encode({"role": role, "content": content})


def first(texts: Texts, num_chars: int = FIRST_CHARS) -> bytes:
    """Return the messages of a new conversation."""
    return message("system", SYSTEM) + b"," + message("user", texts.piece(num_chars))


def repeated(request: bytes, num_calls: int) -> Talk:
    """Repeat the same call."""
    for _ in range(num_calls):
        yield request


def once(request: bytes) -> Talk:
    """Make one call."""
    yield request


class GrowingChat:
    """A growing history; further calls of `turns` continue it."""

    def __init__(self, endpoint: SessionEndpoint, texts: Texts) -> None:
        self._door = endpoint
        self._texts = texts
        self._messages = message("system", SYSTEM)

    def turns(self, num_turns: int, num_chars: int) -> Talk:
        """Run `num_turns` turns, each with `num_chars` characters of new text."""
        for _ in range(num_turns):
            self._messages += b"," + message("user", self._texts.piece(num_chars))
            reply: HttpAnswer = yield chat(self._door, self._messages)
            content = _completions.decode(reply.body).choices[0].message.content
            self._messages += b"," + message("assistant", content)


Talks = Callable[[list[SessionEndpoint]], Iterable[Talk]]


class Run(msgspec.Struct, frozen=True):
    """One server's figures in one round."""

    timings: Timings
    cpu_s: float

    @property
    def calls_per_s(self) -> float:
        return len(self.timings.calls_s) / self.timings.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU per call."""
        return 1e6 * self.cpu_s / len(self.timings.calls_s)


class ServerBench:
    """The servers of a run, and the figures so far."""

    def __init__(self, options: Namespace, stack: ExitStack) -> None:
        self.is_quick: bool = options.quick
        self.figures: dict[str, float] = {}
        self.model = model_folder()
        self.texts = Texts(seed=1)
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.engine = self._kept(start_engine(self.model))
        self.direct = ChatServer("direct", self.engine)
        self.bare = start_bare(self.engine)
        self._kept(self.bare.child)
        self.tokens = self.new_gateway("tokens")
        self.relay = self.new_gateway("relay")

    def new_gateway(self, capture: str, *, journal: str = "") -> ChatServer:
        """Start a gateway; with `journal`, its sessions outlive it."""
        folder = self.journal(journal) if journal else None
        arm = start_gateway(capture, self.engine, self.model, self._folder, folder)
        self._kept(arm.child)
        return arm

    def journal(self, name: str) -> Path:
        """Path of the journal `name`."""
        return self._folder / f"{name}.journal"

    def new_peers(self) -> list[ChatServer]:
        """Start the peers that are installed."""
        peers = []
        for peer in start_peers(self.engine, self._folder):
            self._kept(peer.child)
            peers.append(peer)
        return peers

    def sized(self, number: int) -> int:
        """Scale `number` down in a quick run."""
        return number // 4 if self.is_quick else number

    async def pace(self, pace: Pace) -> None:
        """Set the pace of the engine's streams."""
        request = post(SessionEndpoint(b"/canned", b"none"), msgspec.json.encode(pace))
        await carry(self.engine.port, [once(request)], 1)

    async def rounds(
        self, arms: Sequence[ChatServer], num_sessions: int, talks: Talks
    ) -> list[list[Run]]:
        """Run all rounds; return the runs of each server."""
        runs: list[list[Run]] = [[] for _ in arms]
        for _ in range(1 + (3 if self.is_quick else 7)):
            for arm, done in zip(arms, runs, strict=True):
                done.append(await run(arm, num_sessions, talks))
        return [done[1:] for done in runs]

    async def compare(
        self, case: str, arms: Sequence[ChatServer], num_sessions: int, talks: Talks
    ) -> dict[str, list[Run]]:
        """Run rounds of plain calls; note rates, CPU, tails and the ratios to bare."""
        done = await self.rounds(arms, num_sessions, talks)
        runs = {arm.name: each for arm, each in zip(arms, done, strict=True)}
        for name, mine in runs.items():
            self.note(f"{case}.{name}", {
                "calls_per_s": median(each.calls_per_s for each in mine),
                "cpu_us": median(each.cpu_us for each in mine),
                "p50_ms": median(each.timings.percentile_ms(50) for each in mine),
                "p99_ms": median(each.timings.percentile_ms(99) for each in mine),
            })  # fmt: skip
        for name in runs.keys() - {"direct", "bare"}:
            pairs = list(zip(runs[name], runs["bare"], strict=True))
            self.note(f"{case}.{name}_vs_bare", {
                "": median(a.calls_per_s / b.calls_per_s for a, b in pairs),
                "by_cpu": median(b.cpu_us / a.cpu_us for a, b in pairs),
            })  # fmt: skip
        return runs

    def note(self, what: str, figures: dict[str, float]) -> None:
        """Record figures under a prefix; the name '' is the prefix itself."""
        for name, value in figures.items():
            self.figures[f"{what}.{name}" if name else what] = value

    def _kept(self, child: ServerProcess) -> ServerProcess:
        self._stack.callback(child.end)
        return child


async def run(arm: ChatServer, num_sessions: int, talks: Talks, stagger_s: float = 0.0) -> Run:
    """Run one round of one server."""
    endpoints = await arm.open(num_sessions)
    made = list(talks(endpoints))
    gc.collect()
    cpu_s = arm.child.cpu_s()
    timings = await carry(arm.port, made, NUM_CONNECTIONS, stagger_s)
    cpu_s = arm.child.cpu_s() - cpu_s
    await arm.close(endpoints)
    return Run(timings, cpu_s)
