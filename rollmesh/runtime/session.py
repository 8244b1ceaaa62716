"""A session: the model calls of one rollout, their exact tokens and their replies.

    OPEN --a limit is reached--> SPENT
    OPEN, SPENT --seal--> SEALED --lent to a child task: reopen--> the state before

- Each call is matched against the conversation, adds its new tokens to the token graph, and gets
  one reply per choice: new generations, or the replies of an equal request.
- A SPENT session begins no new call; running calls finish. In a SEALED one, every call and every
  waiting reader gets a SessionError 410, and replies that were not delivered are void.
- A reply is in the graph before its last byte is sent.
"""

import asyncio
import enum
from collections.abc import Callable, Collection

import msgspec

from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.core.heap import note_freed
from rollmesh.core.types import FieldPolicy, ForkRow, NodeRow, SamplingParams
from rollmesh.runtime.chat import ChatMessage, ParsedReply, Turn
from rollmesh.runtime.conversation.conversation import (
    Conversation,
    Prompt,
    as_message,
    find_shown,
    shared_tools,
)
from rollmesh.runtime.conversation.forks import ForkReport
from rollmesh.runtime.conversation.message_trie import NO_NODE, MessageNode
from rollmesh.runtime.conversation.token_graph import Path, branches_of
from rollmesh.runtime.generation.events import GenerationRequest, fall_back
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.runtime.generation.sampling import derive_seed, resolve
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.replies import (
    RETRY_AFTER_S,
    VOID_FINISH,
    AnswerIndex,
    Reply,
    ReplyHead,
    ReplySource,
    ReplyState,
    ReplyTable,
    failure_of,
    no_such,
    sampled_of,
)
from rollmesh.runtime.restore import RestoredState
from rollmesh.runtime.session_deps import SessionDeps, SessionOptions
from rollmesh.runtime.session_log import NO_RECORDER, EventRecorder


class SamplingPlan(msgspec.Struct, frozen=True):
    """The parameters of each choice of a call; choices differ only in their seeds."""

    prefill: tuple[int, ...]
    choices: tuple[SamplingParams, ...]


def prefill_of(turn: Turn, options: SessionOptions, deps: SessionDeps) -> tuple[int, ...]:
    """Tokens after the prompt that are given as context; none for a raw prompt."""
    if turn.is_raw or (turn.sampling.grammar is None and turn.tool_choice.kind == "auto"):
        return ()
    is_free = options.sampling.grammar.policy is not FieldPolicy.FORCE
    grammar = turn.sampling.grammar if is_free else None
    return deps.prompts.prefill(turn.tool_choice, grammar, turn.tools)


def plan_sampling(
    turn: Turn, num_prompt: int, call: int, options: SessionOptions, deps: SessionDeps
) -> SamplingPlan:
    """The parameters for sampling after `num_prompt` tokens, for the session's calls from number
    `call` on.

    SessionError 400 if the context is full, or a token id is outside the vocabulary.
    """
    prompts, max_tokens = deps.prompts, deps.max_context_tokens
    prefill = prefill_of(turn, options, deps)
    num_prompt += len(prefill)
    if num_prompt >= max_tokens:
        raise SessionError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {max_tokens} tokens. "
            f"However, your messages resulted in {num_prompt} tokens.",
        )
    bias = turn.sampling.logit_bias
    if bias and not all(0 <= token_id < prompts.vocab_size for token_id, _ in bias):
        why = f"logit_bias: expected token ids from 0 to {prompts.vocab_size - 1}"
        raise SessionError(400, "invalid_logit_bias", why)
    ends = prompts.stop_token_ids
    if turn.reads_calls and not turn.parallel_calls:
        ends = (*ends, *prompts.call_end_ids)
    choices = [
        resolve(
            options.sampling,
            turn.sampling,
            room_tokens=max_tokens - num_prompt,
            derived_seed=derive_seed(options.seed, options.rollout_id.index, call + choice),
            stop_token_ids=ends,
            choice=choice,
        )
        for choice in range(turn.num_choices)
    ]
    return SamplingPlan(prefill, tuple(choices))


class SessionRecord(msgspec.Struct, frozen=True):
    """The rows and arrays of a sealed session's graph, and the messages of its main branch."""

    nodes: list[NodeRow]
    token_ids: memoryview
    """Bytes of int32: all nodes' tokens in row order."""
    logprobs: memoryview
    """Bytes of float32: the sampled nodes' log-probs in row order."""
    engines: list[str]
    """Engines that sampled the nodes; see RolloutRecord."""
    messages: msgspec.Raw
    """The main branch's messages, a JSON array, for people."""
    num_calls: int
    forks: list[ForkRow]
    images: dict[str, ImageRef]
    """Images of the nodes by digest; not loaded."""
    healed: dict[str, int]
    """Healed differences by kind."""

    @property
    def num_forks(self) -> int:
        return len(self.forks)


def record_of(
    held: Conversation,
    delivered: Collection[Reply],
    num_calls: int,
    parse: Callable[[Reply], ParsedReply],
) -> SessionRecord:
    """The record of a session with these delivered replies; `parse` reads one of them."""
    branches, nodes = branches_of(held.graph, held.root_kinds), held.graph.nodes
    last = max(
        delivered,
        key=lambda reply: (branches[nodes[reply.node].root] == "main", reply.node),
        default=None,
    )
    messages: list[bytes] = []
    if last is not None:
        line = held.history.raws_to(last.source.context)
        messages = [*line, as_message(parse(last)).as_json()]
    report = held.fork_report()
    return SessionRecord(
        nodes=held.graph.rows(branches),
        token_ids=memoryview(held.graph.token_ids).cast("B"),
        logprobs=memoryview(held.graph.logprobs).cast("B"),
        engines=held.graph.engines,
        messages=msgspec.Raw(b"[" + b",".join(messages) + b"]"),
        num_calls=num_calls,
        forks=report.forks,
        images=dict(held.history.images),
        healed=report.healed,
    )


OFF_LOOP_BYTES = 32 * 1024
"""Longer new text is tokenised in a thread, so that other calls continue."""
OVER_LIMIT = "session_over_limit"
"""The code of calls that a SPENT session refuses."""


class SessionState(enum.Enum):
    """State of a session."""

    OPEN = "open"
    SPENT = "spent"
    SEALED = "sealed"


class Session:
    """The calls, tokens and replies of one rollout."""

    __slots__ = (
        "__weakref__",
        "_deps",
        "_held",
        "_min_policy_version",
        "_options",
        "_replies",
        "_sealed_because",
        "answers",
        "engine_fault",
        "num_calls",
        "num_fell_back",
        "recorder",
        "rollout_id",
        "sampling",
        "session_id",
        "spent_because",
        "state",
    )  # fmt: skip

    def __init__(
        self, options: SessionOptions, deps: SessionDeps, restored: RestoredState | None = None
    ) -> None:
        """A session with `restored` continues from there."""
        self.session_id = options.session_id
        self.rollout_id = options.rollout_id
        self.state = SessionState.OPEN
        self.num_calls = 0
        self.num_fell_back = 0
        """Moves to older weights than it had seen; none if a publisher is known."""
        self.engine_fault = ""
        """Why the newest ended call has no answer, if that is not the agent's error; '' if it has
        one."""
        self.spent_because = ""
        """The limit that ended it early; '' if none did."""
        self.sampling: list[Reply] = []
        """Replies whose tokens are not in the graph yet."""
        self._options = options
        self._deps = deps
        self.recorder = EventRecorder(options.event_writer) if options.event_writer else NO_RECORDER
        self._held: Conversation | None = None
        """Created by the first call: most sessions of a large run wait for theirs."""
        self._replies = ReplyTable()
        self.answers = AnswerIndex(options.session_id, deps.prompts)
        self._sealed_because = ""
        self._min_policy_version = options.min_policy_version
        if restored is not None:
            self._restore(restored)

    async def attach(self, turn: Turn) -> tuple[Reply, ...]:
        """The replies to `turn`, one per choice: existing or new ones.

        SessionError 400 for unreadable messages, context overflow or an unknown previous reply; 400
        session_over_limit if a limit has ended the session; 410 sealed; 429 too many turns in
        progress; 503 or 507 journal_full.
        """
        if (replies := self._known(turn)) is not None:
            return replies
        self.recorder.check()
        if (siblings := self._replies.newest(turn.digest)) is not None:
            return self._start(turn, self._conversation.again(siblings[0].source.context))
        if (
            self._held is None
            and (shared_prefix := self._deps.shared_prefixes.find(turn)) is not None
        ):
            return self._start(turn, self._conversation.begin(shared_prefix))
        turn = self._with_references(turn)
        prompt = await self._build(turn)
        # Other calls may have continued meanwhile: check again.
        shown = self._replies.all(), self.answers.read
        known = self._known(turn) or find_shown(turn, prompt, *shown)
        return known or self._start(turn, prompt)

    async def count(self, turn: Turn) -> int:
        """Prompt tokens of `turn`; nothing is started or stored.

        SessionError as `attach`, except for an overflow.
        """
        self._check_open()
        held = self._conversation
        prompt = await self._build(self._with_references(turn))
        return held.num_tokens(prompt) + len(prefill_of(turn, self._options, self._deps))

    def finish(self, reply: Reply) -> ParsedReply:
        """The answer of an ended reply, which is committed first. SessionError if its generation
        failed."""
        if reply.state is ReplyState.SAMPLING:
            self._commit(reply)
        if reply.state is ReplyState.VOID:
            raise reply.failure.again() if reply.failure else self._gone()
        if reply.answer is None:
            reply.answer = self.answers.read(reply)
        return reply.answer

    def delivered(self, reply: Reply) -> None:
        """Record that the last byte of `reply` was sent."""
        reply.answer = None
        if reply.state is ReplyState.COMMITTED:
            for node in self._replies.delivered(reply):
                self._conversation.graph.nodes[node].superseded = True
            self.recorder.delivered(reply)

    def left(self, reply: Reply) -> None:
        """Remove a reader of `reply`."""
        reply.leave()
        self.recorder.left(reply)

    def node_of(self, name: int | str) -> int:
        """The node of the answer with this ReplyHead.id, or with this node number.

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
        """End the session; waiting readers are woken and get an error. Idempotent."""
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
        for notify in self._deps.on_sealed:
            notify(self.rollout_id)

    def reopen(self) -> None:
        """Accept calls again, of a child task that continues the transcript; after `seal`."""
        assert self.state is SessionState.SEALED
        self.state = SessionState.SPENT if self.spent_because else SessionState.OPEN
        self._replies.drop_void()

    def end_early(self, reason: str) -> None:
        """End the session because a limit was reached: new calls are refused, and the rollout ends
        as `truncated` for this reason. Idempotent."""
        if self.state is SessionState.OPEN:
            self.state, self.spent_because = SessionState.SPENT, reason
            self.recorder.faults_changed(self.engine_fault, self.spent_because)

    def fork_report(self) -> ForkReport:
        """Forks, and the differences that were healed instead."""
        return self._held.fork_report() if self._held else ForkReport([], {})

    def record(self) -> SessionRecord:
        """The session's record; the session must be sealed."""
        assert self.state is SessionState.SEALED
        delivered = [r for rs in self._replies.all() for r in rs if r.state is ReplyState.DELIVERED]
        return record_of(self._conversation, delivered, self.num_calls, self.answers.read)

    def forget(self) -> None:
        """Drop everything, breaking reference cycles so that no garbage collection is needed; after
        the record."""
        assert self.state is SessionState.SEALED
        note_freed(self.held_bytes)
        if self._held is not None:
            self._held.history.forget()
        self._held, self.recorder, self._replies = None, NO_RECORDER, ReplyTable()
        self.answers.forget()

    def held(self) -> dict[str, int]:
        """Bytes of `graph`, `history` and `blobs`, which other sessions may share."""
        return self._held.held() if self._held else dict.fromkeys(("graph", "history", "blobs"), 0)

    @property
    def held_bytes(self) -> int:
        """Sum of these bytes."""
        return sum(self.held().values())

    # a call

    @property
    def _conversation(self) -> Conversation:
        if self._held is None:
            self._held = Conversation(self._deps.prompts, self._deps.rotating)
        return self._held

    async def _build(self, turn: Turn) -> Prompt:
        """The new tokens of a turn's prompt; a long text is tokenised in a thread."""
        held = self._conversation
        if turn.is_raw:
            if len(turn.prompt_text or "") <= OFF_LOOP_BYTES:
                return held.build_raw(turn)
            return await asyncio.to_thread(held.build_raw, turn)
        start = self._node_named(turn.previous_reply)
        place = held.match(turn, start)
        if place.chat.num_bytes <= OFF_LOOP_BYTES:
            return held.build(place)
        prompt = await asyncio.to_thread(held.build, place)
        self._check_open()
        again = held.match(turn, start)
        return prompt if again.identity == place.identity else held.build(again)

    def _with_references(self, turn: Turn) -> Turn:
        """The turn with the answers that it refers to by id; SessionError 400 for an unknown id."""
        if turn.resolve_references is None:
            return turn
        messages = turn.resolve_references(turn.messages, self._find_answer)
        return msgspec.structs.replace(turn, messages=messages, resolve_references=None)

    def _find_answer(self, reply_id: str) -> ChatMessage | None:
        node = self.answers.node_of(reply_id)
        history = self._conversation.history
        message_node = history.answer_at(node) if node != NO_NODE else None
        return history.read(message_node) if message_node else None

    def _check_open(self) -> None:
        if self.state is SessionState.SEALED:
            raise self._gone()

    def _known(self, turn: Turn) -> tuple[Reply, ...] | None:
        """The replies that answer `turn` again, if there are any."""
        self._check_open()
        if self.sampling:
            for lost in [r for r in self.sampling if not r.is_running]:
                self._void(lost)
        known = self._replies.known(turn)
        if known is None and self.state is SessionState.SPENT:
            raise SessionError(400, OVER_LIMIT, f"this session has ended: {self.spent_because}")
        return known

    def _withdraw(self, replies: tuple[Reply, ...]) -> None:
        """Void the undelivered choices of a call."""
        for reply in replies:
            if reply.state is ReplyState.SAMPLING and reply.generation is not None:
                reply.generation.seal("another choice of its call failed")
                self._void(reply)
            elif reply.state is ReplyState.COMMITTED:
                reply.state = ReplyState.VOID
                self._conversation.graph.nodes[reply.node].finish_reason = VOID_FINISH

    def _start(self, turn: Turn, prompt: Prompt) -> tuple[Reply, ...]:
        self._check_turns(turn.num_choices)
        held = self._conversation
        plan = plan_sampling(
            turn, held.num_tokens(prompt), self.num_calls, self._options, self._deps
        )
        changes = self.recorder.before_prompt(held)
        context = held.hold(prompt, self.num_calls)
        if (
            self.num_calls == 0
            and (shared_prefix := held.shared_prefix(prompt, context)) is not None
        ):
            self._deps.shared_prefixes.keep(turn, shared_prefix)
        source = ReplySource(
            context,
            held.prefill_node(context.node, plan.prefill),
            plan.prefill,
            shared_tools(turn.tools) if turn.tools else b"",
            turn.is_raw,
            turn.prompt_text,
            turn.digest,
        )
        replies = tuple([self._sample(turn, source, p, n) for n, p in enumerate(plan.choices)])
        self._replies.put(turn.digest, replies)
        self.recorder.call_began(turn, prompt, replies, changes)
        if (num_bytes := self.held_bytes) > self._deps.max_session_bytes:
            self.end_early(self._deps.over_limit(num_bytes))
        return replies

    def _check_turns(self, num_choices: int) -> None:
        """SessionError 429 if these turns would be too many; turns that have ended and are not read
        yet do not count."""
        limit = self._deps.max_turns_at_once
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
        held, deps = self._conversation, self._deps
        name = self.answers.begin()
        generation = deps.sampler.start(
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
        deps.totals.num_calls += 1
        head = ReplyHead(
            id=name,
            created_s=int(deps.clock.unix_s()),
            num_prompt_tokens=held.graph.depth_of(source.node),
            reads_calls=turn.reads_calls,
            params=params,
            index=choice,
            sampling=turn.sampling,
            dialect=turn.dialect,
            min_policy_version=self._min_policy_version,
        )
        reply = Reply(head, source, generation, held.graph)
        self.sampling.append(reply)
        return reply

    def _node_named(self, reply_id: str) -> MessageNode | None:
        """The node of the answer with this id; None for no id. SessionError 400 if there is
        none."""
        if not reply_id:
            return None
        message_node = self._conversation.history.answer_at(self.node_of(reply_id))
        if message_node is None:
            raise no_such(reply_id)
        return message_node

    # a reply's end

    def _commit(self, reply: Reply) -> None:
        generation = reply.generation
        assert generation is not None
        if generation.state is not GenerationState.COMMITTED:
            self._void(reply)
            return
        reply.answer = self.answers.read(reply)
        finish = generation.finish_reason
        if reply.answer.tool_calls and finish == "stop":
            finish = "tool_calls"
        self._enter(reply, finish)
        reply.state = ReplyState.COMMITTED
        self.engine_fault = ""
        self._hold_answer(reply, reply.answer)

    def _void(self, reply: Reply) -> None:
        """End a reply without an answer: its tokens are kept as a void node, for the records.

        If an agent sends back the part that it received, that is context.
        """
        generation = reply.generation
        if generation is None:
            return  # another choice has voided it
        reply.state = ReplyState.VOID
        if self.state is not SessionState.SEALED:
            reply.failure = failure_of(generation.error)
            if isinstance(generation.error, EngineUnavailable):
                self.engine_fault = str(generation.error)
                self.recorder.faults_changed(self.engine_fault, self.spent_because)
        if len(generation.token_ids):
            self._enter(reply, VOID_FINISH)
            if self.state is not SessionState.SEALED:
                self._hold_answer(reply, self.answers.read(reply))
        else:
            self.sampling.remove(reply)
            reply.settle(NO_NODE)
            self.recorder.ended(reply, None)
        self._withdraw(self._replies.pop(reply.source.digest))

    def _enter(self, reply: Reply, finish_reason: str) -> None:
        sampled = sampled_of(reply, finish_reason)
        reply.settle(self._conversation.graph.add_sampled(reply.source.node, sampled))
        self.sampling.remove(reply)
        self._deps.totals.num_tokens += len(sampled.token_ids)
        last, num_falls = fall_back(sampled.policy_versions, reply.head.min_policy_version)
        self.num_fell_back += num_falls
        self._min_policy_version = last if num_falls else max(self._min_policy_version, last)
        self.recorder.ended(reply, sampled)

    def _hold_answer(self, reply: Reply, answer: ParsedReply) -> None:
        is_void = reply.state is ReplyState.VOID
        self._conversation.hold_answer(reply.source, answer, reply.node, is_void)
        if not is_void:
            self.answers.put(reply)

    def _restore(self, restored: RestoredState) -> None:
        self._held, self._replies, self.answers = restored.held, restored.replies, restored.answers
        self.num_calls, self._min_policy_version = restored.num_calls, restored.min_policy_version
        self.num_fell_back = restored.num_fell_back
        self.engine_fault, self.spent_because = restored.engine_fault, restored.spent_because
        self.state = SessionState.SPENT if restored.spent_because else SessionState.OPEN

    def _gone(self) -> SessionError:
        why = f"this rollout's session is over: {self._sealed_because}"
        return SessionError(410, "session_sealed", why)
