"""One rollout's view of the model: its calls, its exact tokens, its replies.

Owns the rollout's token graph, message history and reply table. Each call is matched against
the history, extends the graph by its new tokens and gets a reply: a new generation, or the one
that the same request already has. OPEN --seal--> SEALED, after which every call and every waiting
reader gets a SessionError 410. Invariant: a reply is in the graph before its last byte leaves; what
was not delivered when the session is sealed is void. Driven by the HTTP edge and the worker.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import (
    EngineError,
    EngineOverloaded,
    EngineRefused,
    EngineUnavailable,
    SessionError,
)
from rollmesh.core.ids import RolloutId
from rollmesh.core.types import SamplingPolicy, VersionRun
from rollmesh.runtime.deltas import Answer, DeltaReader
from rollmesh.runtime.generation import GenerationState
from rollmesh.runtime.generation_events import GenerationRequest
from rollmesh.runtime.graph import ROOT, Sampled, TokenGraph
from rollmesh.runtime.history import NO_NODE, ForkCause, History, Match, Spot
from rollmesh.runtime.prompts import Chat, Prompts
from rollmesh.runtime.record import RootKind, SessionRecord, as_message, branches_of
from rollmesh.runtime.reply import LiveGeneration, Reply, ReplyHead, ReplyState
from rollmesh.runtime.sampling import derive_seed, resolve
from rollmesh.runtime.turns import Turn

OFF_LOOP_BYTES = 32 * 1024
"""Longer new text is tokenised in a thread, so that other calls go on."""
VOID_FINISH = "void"
RETRY_AFTER_S = 1.0


class AnySampler(Protocol):
    """What starts generations; legs.Sampler is the real one."""

    def start(self, request: GenerationRequest) -> LiveGeneration: ...


class SessionKit(msgspec.Struct, frozen=True):
    """What all sessions of a worker share."""

    sampler: AnySampler
    prompts: Prompts
    clock: Clock
    max_context_tokens: int
    totals: "Totals"


class Totals(msgspec.Struct):
    """Plain integers, counted on the hot path and read by a collector."""

    num_calls: int = 0
    num_tokens: int = 0
    """Sampled."""


class SessionAsk(msgspec.Struct, frozen=True):
    """What a session is opened with."""

    session_id: str
    rollout_id: RolloutId
    sampling: SamplingPolicy
    seed: int


class SessionState(enum.Enum):
    """OPEN -> SEALED"""

    OPEN = "open"
    SEALED = "sealed"


class _Prompt(msgspec.Struct, frozen=True):
    """New prompt tokens and the graph node that they follow."""

    match: Match
    parent: int
    token_ids: Sequence[int]


class Session:
    """See the module."""

    def __init__(self, ask: SessionAsk, kit: SessionKit) -> None:
        self.session_id = ask.session_id
        self.rollout_id = ask.rollout_id
        self.state = SessionState.OPEN
        self.num_calls = 0
        self.forks: Counter[ForkCause] = Counter()
        self.engine_fault = ""
        """Why the newest ended call got no answer; '' if it got one. Not the agent's fault."""
        self._ask = ask
        self._kit = kit
        self._graph = TokenGraph()
        self._history = History()
        self._replies: dict[int, Reply] = {}
        """The newest reply to each distinct request, by its digest."""
        self._sampling: list[Reply] = []
        self._root_kinds: dict[int, RootKind] = {}
        self._sealed_because = ""
        self._min_policy_version = -1

    async def attach(self, turn: Turn) -> tuple[Reply, ...]:
        """The replies to `turn`, one per choice: those it already has, or new ones.

        SessionError: 400 unreadable messages or context overflow, 410 sealed.
        """
        return (await self._attach(turn),)

    async def _attach(self, turn: Turn) -> Reply:
        reply = self._known(turn)
        if reply is not None:
            return reply
        match = self._history.match(turn)
        chat = _new_part(match, turn)
        if chat.num_bytes <= OFF_LOOP_BYTES:
            return self._start(turn, self._build(match, turn))
        prompt = await asyncio.to_thread(self._build, match, turn)
        # Other calls went on meanwhile; what they changed decides.
        reply = self._known(turn)
        if reply is not None:
            return reply
        again = self._history.match(turn)
        if again.spot is not match.spot or again.is_held != match.is_held:
            prompt = self._build(again, turn)
        return self._start(turn, prompt)

    def finish(self, reply: Reply) -> Answer:
        """What an ended reply says; commits it first. SessionError where it has no good end."""
        if reply.state is ReplyState.SAMPLING:
            self._commit(reply)
        if reply.state is ReplyState.VOID:
            raise reply.failure or self._gone()
        if reply.answer is None:
            reply.answer = self._parse(reply, None)
        return reply.answer

    def delivered(self, reply: Reply) -> None:
        """The last byte of `reply` was handed over."""
        if reply.state is ReplyState.COMMITTED:
            reply.state = ReplyState.DELIVERED
        reply.answer = None

    def token_ids(self, reply: Reply, start: int = 0) -> Sequence[int]:
        """The tokens of a reply so far, from `start` on."""
        if reply.generation is not None:
            return reply.generation.token_ids[start:]
        if reply.node == NO_NODE:
            return ()
        return self._graph.ids_of(reply.node)[start:]

    def logprobs(self, reply: Reply) -> Sequence[float]:
        """The log-probs of a reply's tokens so far."""
        if reply.generation is not None:
            return reply.generation.logprobs
        return self._graph.logprobs_of(reply.node)

    def prompt_ids(self, reply: Reply) -> Sequence[int]:
        """All tokens that a reply was sampled after."""
        return self._graph.path_ids(reply.context.node)

    def finish_reason(self, reply: Reply) -> str:
        """Of a committed reply: `stop`, `length` or `tool_calls`."""
        return self._graph.nodes[reply.node].finish_reason

    def reader(self, reply: Reply) -> DeltaReader:
        """Cuts the reply's tokens into deltas."""
        head = reply.head
        prefix = f"call_{head.id.replace('-', '_')}"
        return self._kit.prompts.reader(head.params.stop, head.reads_calls, prefix)

    def token_text(self, token_id: int) -> str:
        """One token's text."""
        return self._kit.prompts.token_text(token_id)

    def seal(self, reason: str) -> None:
        """End the session; whoever still waits is woken and gets an error. Idempotent."""
        if self.state is SessionState.SEALED:
            return
        self.state = SessionState.SEALED
        self._sealed_because = reason
        for reply in list(self._sampling):
            assert reply.generation is not None
            reply.generation.seal(reason)
            self._void(reply)
        for reply in self._replies.values():
            if reply.state is ReplyState.COMMITTED:
                reply.state = ReplyState.VOID
                self._graph.nodes[reply.node].finish_reason = VOID_FINISH

    def record(self) -> SessionRecord:
        """What the rollout leaves behind; the session must be sealed."""
        assert self.state is SessionState.SEALED
        branches = branches_of(self._graph, self._root_kinds)
        last = max(
            (r for r in self._replies.values() if r.state is ReplyState.DELIVERED),
            key=lambda r: (branches[self._graph.root_of(r.node)] == "main", r.node),
            default=None,
        )
        messages: list[bytes] = []
        if last is not None:
            raw, _ = as_message(self._parse(last, None))
            messages = [*last.context.messages(), raw]
        return SessionRecord(
            nodes=self._graph.rows(branches),
            token_ids=memoryview(self._graph.token_ids).cast("B"),
            logprobs=memoryview(self._graph.logprobs).cast("B"),
            messages=msgspec.Raw(b"[" + b",".join(messages) + b"]"),
            num_calls=self.num_calls,
            num_forks=sum(self.forks.values()),
        )

    @property
    def held_bytes(self) -> int:
        """Of tokens, log-probs and messages."""
        num_items = len(self._graph.token_ids) + len(self._graph.logprobs)
        return 4 * num_items + self._history.num_bytes

    # a call

    def _known(self, turn: Turn) -> Reply | None:
        """The reply that `turn` is to be answered with, if it already has one."""
        if self.state is SessionState.SEALED:
            raise self._gone()
        for lost in [r for r in self._sampling if not r.is_running]:
            self._void(lost)
        reply = self._replies.get(turn.digest)
        if reply is None or reply.state is ReplyState.VOID:
            return None
        if reply.state is not ReplyState.DELIVERED or turn.is_retry:
            return reply
        # Asked anew after delivery: a sibling. If nothing follows the old one, it was a retry.
        self._graph.nodes[reply.node].superseded = True
        return None

    def _build(self, match: Match, turn: Turn) -> _Prompt:
        """The new prompt tokens of a request; falls back to the whole chat, and says so."""
        if match.is_held:
            return _Prompt(match, match.spot.node, ())
        prompts = self._kit.prompts
        if match.spot.node != NO_NODE:
            sampled = self._graph.ids_of(match.spot.node)
            ids = prompts.extend(sampled, _new_part(match, turn))
            if ids is not None:
                return _Prompt(match, match.spot.node, ids)
            match = self._history.from_root(match, turn, ForkCause.TEMPLATE)
        return _Prompt(match, ROOT, prompts.first(_new_part(match, turn)))

    def _start(self, turn: Turn, prompt: _Prompt) -> Reply:
        num_prompt = self._graph.depth_of(prompt.parent) + len(prompt.token_ids)
        room_tokens = self._kit.max_context_tokens - num_prompt
        if room_tokens < 1:
            raise SessionError(
                400,
                "context_length_exceeded",
                f"This model's maximum context length is {self._kit.max_context_tokens} tokens. "
                f"However, your messages resulted in {num_prompt} tokens.",
            )
        context = self._hold(turn, prompt)
        number = self.num_calls
        params = resolve(
            self._ask.sampling,
            turn.ask,
            room_tokens=room_tokens,
            derived_seed=derive_seed(self._ask.seed, self.rollout_id.index, number),
            stop_token_ids=self._kit.prompts.stop_token_ids,
        )
        generation = self._kit.sampler.start(
            GenerationRequest(
                generation_id=f"{self.session_id}-{number}",
                session_key=self.session_id,
                prompt_ids=self._graph.path_ids(context.node),
                params=params,
                min_policy_version=self._min_policy_version,
                stream=turn.stream,
            )
        )
        self.num_calls += 1
        self._kit.totals.num_calls += 1
        head = ReplyHead(
            id=f"{self.session_id}-{number}",
            created_s=int(self._kit.clock.unix_s()),
            num_prompt_tokens=num_prompt,
            reads_calls=turn.reads_calls,
            params=params,
        )
        reply = Reply(head, context, generation)
        self._replies[turn.digest] = reply
        self._sampling.append(reply)
        return reply

    def _hold(self, turn: Turn, prompt: _Prompt) -> Spot:
        """Put the prompt's new tokens and messages into graph and history."""
        match = prompt.match
        if match.is_held:
            return match.spot
        if match.cause is not None:
            self.forks[match.cause] += 1
        node = self._graph.add_context(prompt.parent, prompt.token_ids)
        if prompt.parent == ROOT:
            first = match.new[0]
            system = first.text() if first.role in ("system", "developer") else ""
            self._root_kinds[node] = RootKind(match.tools_key, hash(system))
        return self._history.add_context(match, turn.messages, node)

    # a reply's end

    def _commit(self, reply: Reply) -> None:
        generation = reply.generation
        assert generation is not None
        if generation.state is not GenerationState.COMMITTED:
            self._void(reply)
            return
        answer = self._parse(reply, generation)
        finish = "tool_calls" if answer.tool_calls else generation.finish_reason
        self._enter(reply, generation, finish)
        reply.state = ReplyState.COMMITTED
        reply.answer = answer
        self.engine_fault = ""
        raw, message = as_message(answer)
        self._history.add_sampled(reply.context, raw, message, reply.node)

    def _void(self, reply: Reply) -> None:
        """No good end: what was sampled is kept as a void node, for the books."""
        generation = reply.generation
        assert generation is not None
        if self.state is SessionState.OPEN:
            reply.failure = self._failure(generation.error)
        if len(generation.token_ids):
            self._enter(reply, generation, VOID_FINISH)
        else:
            self._sampling.remove(reply)
            reply.generation = None
        reply.state = ReplyState.VOID

    def _enter(self, reply: Reply, generation: LiveGeneration, finish_reason: str) -> None:
        versions: tuple[VersionRun, ...] = tuple(generation.policy_versions)
        sampled = Sampled(
            generation.token_ids, generation.logprobs, versions, reply.head.params, finish_reason
        )
        reply.node = self._graph.add_sampled(reply.context.node, sampled)
        reply.generation = None
        self._sampling.remove(reply)
        self._kit.totals.num_tokens += len(sampled.token_ids)
        newest = max((run.policy_version for run in versions), default=-1)
        self._min_policy_version = max(self._min_policy_version, newest)

    def _parse(self, reply: Reply, generation: LiveGeneration | None) -> Answer:
        head = reply.head
        answer = self._kit.prompts.parse(
            generation.token_ids if generation else self._graph.ids_of(reply.node),
            head.reads_calls,
            f"call_{head.id.replace('-', '_')}",
        )
        # Ours to cut: a stop string may stand in either, and its tokens stay what they are.
        content, reasoning = (
            _before(head.params.stop, text) for text in (answer.content, answer.reasoning)
        )
        return Answer(content, reasoning, answer.tool_calls)

    def _failure(self, error: EngineError | None) -> SessionError:
        if isinstance(error, EngineRefused):
            return SessionError(400, "engine_refused", f"the engine refused the request: {error}")
        why = str(error or "the generation ended without a result")
        if isinstance(error, EngineUnavailable):
            self.engine_fault = why
        if isinstance(error, EngineOverloaded):
            return SessionError(429, "engine_overloaded", why, RETRY_AFTER_S)
        return SessionError(503, "engine_unavailable", why, RETRY_AFTER_S)

    def _gone(self) -> SessionError:
        why = f"this rollout's session is over: {self._sealed_because}"
        return SessionError(410, "session_sealed", why)


def _new_part(match: Match, turn: Turn) -> Chat:
    return Chat(turn.messages[match.num_held :], match.new, turn.tools)


def _before(stops: tuple[str, ...], text: str) -> str:
    """`text` up to the first stop string in it."""
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)].rstrip() if cuts else text
