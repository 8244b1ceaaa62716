"""One rollout's view of the model: its calls, its exact tokens, its replies.

    OPEN --a limit of ours ends it--> SPENT
    OPEN, SPENT --seal--> SEALED --lent to a child: reopen--> what it was before

Owns the rollout's holdings (tokens, messages, forks), its answers and its reply table. Each call
is matched against the history, extends the graph by its new tokens and gets one reply per choice:
new generations, or those that the same request already has (reply_table.py; one that is shown back
as far as it was finished is that turn still, echoes.py). SPENT, it begins no new call, and those
under way come to their end; SEALED, every call and every waiting reader gets a SessionError 410.
Invariant: a reply is in the graph before its last byte leaves; what was not delivered when the
session is sealed is void. Driven by the HTTP edge and the worker.
"""

import asyncio
import enum

import msgspec

from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.core.heap import note_freed
from rollmesh.core.types import SamplingParams
from rollmesh.runtime.answers import Answers, no_such
from rollmesh.runtime.chat import ChatMessage
from rollmesh.runtime.deltas import Answer
from rollmesh.runtime.diary import NO_DIARY, Diary
from rollmesh.runtime.echoes import find_shown
from rollmesh.runtime.forks import ForkReport
from rollmesh.runtime.generation import GenerationState
from rollmesh.runtime.generation_events import GenerationRequest
from rollmesh.runtime.graph import Path
from rollmesh.runtime.holdings import Holdings, Prompt, shared_tools
from rollmesh.runtime.kit import SessionAsk, SessionKit
from rollmesh.runtime.plan import lead_of, plan_of
from rollmesh.runtime.record import SessionRecord, record_of
from rollmesh.runtime.redo import Past
from rollmesh.runtime.reply import (
    RETRY_AFTER_S,
    VOID_FINISH,
    Reply,
    ReplyHead,
    ReplySource,
    ReplyState,
    failure_of,
    sampled_of,
)
from rollmesh.runtime.reply_table import ReplyTable
from rollmesh.runtime.sampled import fall_back
from rollmesh.runtime.spot import NO_NODE, Spot
from rollmesh.runtime.turns import Turn

OFF_LOOP_BYTES = 32 * 1024
"""Longer new text is tokenised in a thread, so that other calls go on."""
OVER_LIMIT = "session_over_limit"
"""The code of calls that a SPENT session refuses."""


class SessionState(enum.Enum):
    """See the module's drawing."""

    OPEN = "open"
    SPENT = "spent"
    SEALED = "sealed"


class Session:
    """See the module."""

    __slots__ = (
        "__weakref__", "_ask", "_held", "_kit", "_min_policy_version", "_replies",
        "_sealed_because", "answers", "diary", "engine_fault", "num_calls", "num_fell_back",
        "rollout_id", "sampling", "session_id", "spent_because", "state",
    )  # fmt: skip

    def __init__(self, ask: SessionAsk, kit: SessionKit, past: Past | None = None) -> None:
        """With a `past` it goes on from there."""
        self.session_id = ask.session_id
        self.rollout_id = ask.rollout_id
        self.state = SessionState.OPEN
        self.num_calls = 0
        self.num_fell_back = 0
        """Moves to older weights than it had seen; none where a publisher is known."""
        self.engine_fault = ""
        """Why the newest ended call got no answer; '' if it got one. Not the agent's fault."""
        self.spent_because = ""
        """The limit of ours that ended it early; '' if none did."""
        self.sampling: list[Reply] = []
        """Replies whose tokens are not in the graph yet."""
        self._ask = ask
        self._kit = kit
        self.diary = Diary(ask.scribe) if ask.scribe else NO_DIARY
        self._held: Holdings | None = None
        """Made by the first call: most sessions of a large run wait for theirs."""
        self._replies = ReplyTable()
        self.answers = Answers(ask.session_id, kit.prompts)
        self._sealed_because = ""
        self._min_policy_version = ask.min_policy_version
        if past is not None:
            self._regain(past)

    async def attach(self, turn: Turn) -> tuple[Reply, ...]:
        """The replies to `turn`, one per choice: those it already has, or new ones.

        SessionError: 400 unreadable messages, context overflow or an unknown previous reply; 410
        sealed; 429 too many turns are in progress; 400
        session_over_limit where a limit of ours has ended it; 503 or 507 journal_full.
        """
        if (replies := self._known(turn)) is not None:
            return replies
        self.diary.check()
        if (siblings := self._replies.newest(turn.digest)) is not None:
            return self._start(turn, self._holdings.again(siblings[0].source.context))
        if self._held is None and (opening := self._kit.openings.find(turn)) is not None:
            return self._start(turn, self._holdings.begin(opening))
        turn = self._spelled_out(turn)
        prompt = await self._build(turn)
        # Other calls may have gone on meanwhile; what they changed decides.
        shown = self._replies.all(), self.answers.read
        known = self._known(turn) or find_shown(turn, prompt, *shown)
        return known or self._start(turn, prompt)

    async def count(self, turn: Turn) -> int:
        """Prompt tokens that `turn` would be sampled after; nothing is started or held.

        SessionError as `attach`, but for the overflow.
        """
        self._check_open()
        held = self._holdings
        prompt = await self._build(self._spelled_out(turn))
        return held.num_tokens(prompt) + len(lead_of(turn, self._ask, self._kit))

    def finish(self, reply: Reply) -> Answer:
        """What an ended reply says; commits it first. SessionError where it has no good end."""
        if reply.state is ReplyState.SAMPLING:
            self._commit(reply)
        if reply.state is ReplyState.VOID:
            raise reply.failure.again() if reply.failure else self._gone()
        if reply.answer is None:
            reply.answer = self.answers.read(reply)
        return reply.answer

    def delivered(self, reply: Reply) -> None:
        """The last byte of `reply` was handed over."""
        reply.answer = None
        if reply.state is ReplyState.COMMITTED:
            for node in self._replies.delivered(reply):
                self._holdings.graph.nodes[node].superseded = True
            self.diary.delivered(reply)

    def left(self, reply: Reply) -> None:
        """A connection reads `reply` no more."""
        reply.leave()
        self.diary.left(reply)

    def node_of(self, name: int | str) -> int:
        """The node of the answer with this ReplyHead.id, or with this very number.

        SessionError 400 if the model sampled none such here.
        """
        if isinstance(name, int):
            nodes = self._held.graph.nodes if self._held else []
            if 0 <= name < len(nodes) and nodes[name].sampled:
                return name
            raise no_such(name)
        node = self.answers.node_of(name)
        if node == NO_NODE:
            raise no_such(name)
        return node

    def seal(self, reason: str) -> None:
        """End the session; whoever still waits is woken and gets an error. Idempotent."""
        if self.state is SessionState.SEALED:
            return
        self.state = SessionState.SEALED
        self._sealed_because = reason
        for reply in list(self.sampling):
            if reply.generation is not None:
                reply.generation.seal(reason)
            self._void(reply)
        for replies in self._replies.all():
            self._withdraw(replies)
        for told in self._kit.on_sealed:
            told(self.rollout_id)

    def reopen(self) -> None:
        """Take calls again, of a child that goes on from what is held; after `seal`."""
        assert self.state is SessionState.SEALED
        self.state = SessionState.SPENT if self.spent_because else SessionState.OPEN
        self._replies.drop_void()

    def end_early(self, reason: str) -> None:
        """A limit of ours is reached: calls are refused from now on, and the rollout ends as
        `truncated` for this reason, whatever its agent makes of that. Idempotent."""
        if self.state is SessionState.OPEN:
            self.state, self.spent_because = SessionState.SPENT, reason
            self.diary.noted(self.engine_fault, self.spent_because)

    def fork_report(self) -> ForkReport:
        """Where histories did not extend what was sampled, and what was healed instead."""
        return self._held.fork_report() if self._held else ForkReport([], {})

    def record(self) -> SessionRecord:
        """What the rollout leaves behind; the session must be sealed."""
        assert self.state is SessionState.SEALED
        delivered = [r for rs in self._replies.all() for r in rs if r.state is ReplyState.DELIVERED]
        return record_of(self._holdings, delivered, self.num_calls, self.answers.read)

    def forget(self) -> None:
        """Let go of everything, at once and without the garbage collector; after the record."""
        assert self.state is SessionState.SEALED
        note_freed(self.held_bytes)
        if self._held is not None:
            self._held.history.forget()
        self._held, self.diary, self._replies = None, NO_DIARY, ReplyTable()
        self.answers.forget()

    def held(self) -> dict[str, int]:
        """Bytes by what they are: `graph`, `history` and `blobs`, which others may hold, too."""
        return self._held.held() if self._held else dict.fromkeys(("graph", "history", "blobs"), 0)

    @property
    def held_bytes(self) -> int:
        """Of all that."""
        return sum(self.held().values())

    # a call

    @property
    def _holdings(self) -> Holdings:
        if self._held is None:
            self._held = Holdings(self._kit.prompts, self._kit.rotating)
        return self._held

    async def _build(self, turn: Turn) -> Prompt:
        """The new tokens of a turn's prompt; of a long text in a thread."""
        held = self._holdings
        if turn.is_raw:
            if len(turn.prompt_text or "") <= OFF_LOOP_BYTES:
                return held.build_raw(turn)
            return await asyncio.to_thread(held.build_raw, turn)
        start = self._spot_named(turn.previous_reply)
        place = held.match(turn, start)
        if place.chat.num_bytes <= OFF_LOOP_BYTES:
            return held.build(place)
        prompt = await asyncio.to_thread(held.build, place)
        self._check_open()
        again = held.match(turn, start)
        return prompt if again.stand == place.stand else held.build(again)

    def _spelled_out(self, turn: Turn) -> Turn:
        """The turn with the answers that it names by id; SessionError 400 for an unknown id."""
        if turn.spell_out is None:
            return turn
        messages = turn.spell_out(turn.messages, self._find_answer)
        return msgspec.structs.replace(turn, messages=messages, spell_out=None)

    def _find_answer(self, reply_id: str) -> ChatMessage | None:
        node = self.answers.node_of(reply_id)
        history = self._holdings.history
        spot = history.answer_at(node) if node != NO_NODE else None
        return history.read(spot) if spot else None

    def _check_open(self) -> None:
        if self.state is SessionState.SEALED:
            raise self._gone()

    def _known(self, turn: Turn) -> tuple[Reply, ...] | None:
        """The replies that `turn` is to be answered with, if it already has them."""
        self._check_open()
        if self.sampling:
            for lost in [r for r in self.sampling if not r.is_running]:
                self._void(lost)
        known = self._replies.known(turn)
        if known is None and self.state is SessionState.SPENT:
            raise SessionError(400, OVER_LIMIT, f"this session has ended: {self.spent_because}")
        return known

    def _withdraw(self, replies: tuple[Reply, ...]) -> None:
        """What of these choices was not delivered never will be."""
        for reply in replies:
            if reply.state is ReplyState.SAMPLING and reply.generation is not None:
                reply.generation.seal("another choice of its call failed")
                self._void(reply)
            elif reply.state is ReplyState.COMMITTED:
                reply.state = ReplyState.VOID
                self._holdings.graph.nodes[reply.node].finish_reason = VOID_FINISH

    def _start(self, turn: Turn, prompt: Prompt) -> tuple[Reply, ...]:
        self._check_turns(turn.num_choices)
        held = self._holdings
        plan = plan_of(turn, held.num_tokens(prompt), self.num_calls, self._ask, self._kit)
        told = self.diary.telling(held)
        context = held.hold(prompt, self.num_calls)
        if self.num_calls == 0 and (opening := held.opening(prompt, context)) is not None:
            self._kit.openings.keep(turn, opening)
        source = ReplySource(
            context,
            held.lead_to(context.node, plan.lead),
            plan.lead,
            shared_tools(turn.tools) if turn.tools else b"",
            turn.is_raw,
            turn.prompt_text,
            turn.digest,
        )
        replies = tuple([self._sample(turn, source, p, n) for n, p in enumerate(plan.choices)])
        self._replies.put(turn.digest, replies)
        self.diary.begun(turn, prompt, replies, told)
        if (num_bytes := self.held_bytes) > self._kit.max_session_bytes:
            self.end_early(self._kit.over_limit(num_bytes))
        return replies

    def _check_turns(self, num_choices: int) -> None:
        """SessionError 429 if that many more turns are too many; those that have ended, and are not
        read yet, do not count."""
        limit = self._kit.max_turns_at_once
        if len(self.sampling) + num_choices <= limit:
            return
        num_turns = sum(not reply.is_ended for reply in self.sampling)
        if num_turns + num_choices > limit:
            why = f"this session has {num_turns} turns in progress and asks for {num_choices} more;"
            why = f"{why} at most {limit} (interception.max_turns_at_once)"
            raise SessionError(429, "too_many_turns", why, RETRY_AFTER_S)

    def _sample(
        self, turn: Turn, source: ReplySource, params: SamplingParams, choice: int
    ) -> Reply:
        held, kit = self._holdings, self._kit
        name = self.answers.begin()
        generation = kit.sampler.start(
            GenerationRequest(
                generation_id=name,
                session_key=self.session_id,
                prompt_ids=Path(held.graph, source.node),
                prompt_json=held.prompt_json(source.node),
                params=params,
                min_policy_version=self._min_policy_version,
                stream=turn.stream,
                num_top_logprobs=turn.num_top_logprobs,
                images=held.images(source.node),
            )
        )
        self.num_calls += 1
        kit.totals.num_calls += 1
        head = ReplyHead(
            id=name,
            created_s=int(kit.clock.unix_s()),
            num_prompt_tokens=held.graph.depth_of(source.node),
            reads_calls=turn.reads_calls,
            params=params,
            index=choice,
            ask=turn.ask,
            dialect=turn.dialect,
            min_policy_version=self._min_policy_version,
        )
        reply = Reply(head, source, generation, held.graph)
        self.sampling.append(reply)
        return reply

    def _spot_named(self, reply_id: str) -> Spot | None:
        """The answer with this id; None for no id. SessionError 400 if there is none such."""
        if not reply_id:
            return None
        spot = self._holdings.history.answer_at(self.node_of(reply_id))
        if spot is None:
            raise no_such(reply_id)
        return spot

    # a reply's end

    def _commit(self, reply: Reply) -> None:
        generation = reply.generation
        assert generation is not None
        if generation.state is not GenerationState.COMMITTED:
            self._void(reply)
            return
        reply.answer = self.answers.read(reply)
        finish = generation.finish_reason
        if reply.answer.tool_calls and finish == "stop":  # one cut short is no call to carry out
            finish = "tool_calls"
        self._enter(reply, finish)
        reply.state = ReplyState.COMMITTED
        self.engine_fault = ""
        self._hold_answer(reply, reply.answer)

    def _void(self, reply: Reply) -> None:
        """No good end: what was sampled is kept as a void node, for the books.

        Agents may show it back to us, as much of it as they saw: then it is context.
        """
        generation = reply.generation
        if generation is None:
            return  # another choice took it along
        reply.state = ReplyState.VOID
        if self.state is not SessionState.SEALED:
            reply.failure = failure_of(generation.error)
            if isinstance(generation.error, EngineUnavailable):
                self.engine_fault = str(generation.error)
                self.diary.noted(self.engine_fault, self.spent_because)
        if len(generation.token_ids):
            self._enter(reply, VOID_FINISH)
            if self.state is not SessionState.SEALED:
                self._hold_answer(reply, self.answers.read(reply))
        else:
            self.sampling.remove(reply)
            reply.settle(NO_NODE)
            self.diary.ended(reply, None)
        self._withdraw(self._replies.pop(reply.source.digest))

    def _enter(self, reply: Reply, finish_reason: str) -> None:
        sampled = sampled_of(reply, finish_reason)
        reply.settle(self._holdings.graph.add_sampled(reply.source.node, sampled))
        self.sampling.remove(reply)
        self._kit.totals.num_tokens += len(sampled.token_ids)
        last, num_falls = fall_back(sampled.policy_versions, reply.head.min_policy_version)
        self.num_fell_back += num_falls
        self._min_policy_version = last if num_falls else max(self._min_policy_version, last)
        self.diary.ended(reply, sampled)

    def _hold_answer(self, reply: Reply, answer: Answer) -> None:
        is_void = reply.state is ReplyState.VOID
        self._holdings.hold_answer(reply.source, answer, reply.node, is_void)
        if not is_void:
            self.answers.put(reply)

    def _regain(self, past: Past) -> None:
        self._held, self._replies, self.answers = past.held, past.replies, past.answers
        self.num_calls, self._min_policy_version = past.num_calls, past.min_policy_version
        self.num_fell_back = past.num_fell_back
        self.engine_fault, self.spent_because = past.engine_fault, past.spent_because
        self.state = SessionState.SPENT if past.spent_because else SessionState.OPEN

    def _gone(self) -> SessionError:
        why = f"this rollout's session is over: {self._sealed_because}"
        return SessionError(410, "session_sealed", why)
