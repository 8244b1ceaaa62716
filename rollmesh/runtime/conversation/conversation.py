"""The conversation of a session: token graph, message history, raw prompts and forks, in step.

    turn --match--> Position --build--> Prompt --hold--> the context that a generation samples after

- `match` and `build` change nothing, so a long prompt can be built in a thread. `hold` adds the new
  tokens of a prompt once, however often they are requested.
- A raw prompt continues stored tokens only if it repeats them exactly. Sampled tokens are never
  tokenised again.
- The newest long prompt is cached as JSON text, so that an engine request encodes only new ids.
- `find_shown` finds the running turn whose finished parts an agent sends back (Codex after a
  stall).
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec
import orjson

from rollmesh.core.errors import SessionError
from rollmesh.core.memo import Memo
from rollmesh.core.types import ForkRow
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.chat import (
    ChatMessage,
    Function,
    MessageToolCall,
    ParsedReply,
    Rotating,
    Turn,
    read_held,
)
from rollmesh.runtime.conversation.forks import (
    ForkCause,
    ForkLog,
    ForkReport,
    cause_of,
    first_difference,
    newest_node,
    where,
)
from rollmesh.runtime.conversation.history import MessageHistory, tools_key_of
from rollmesh.runtime.conversation.message_trie import (
    NO_NODE,
    Match,
    MessageNode,
    read_chat,
)
from rollmesh.runtime.conversation.shared_prefixes import PrefixMessages, SharedPrefix
from rollmesh.runtime.conversation.token_graph import ROOT, RootKind, TokenGraph
from rollmesh.runtime.replies import Reply, ReplySource, ReplyState
from rollmesh.runtime.tokens.prompts import Chat, Prompts

KEPT_FROM_TOKENS = 1024
_MAX_STEPS = 8
"""Maximum number of nodes between a prompt and the previous one on its branch; usually two or
three."""


class PromptJson:
    """The newest long prompt of a session as JSON text."""

    __slots__ = ("_node", "_text")

    def __init__(self) -> None:
        self._node = ROOT
        self._text: bytes | bytearray = b""

    def begin(self, node: int, text: bytes) -> None:
        """Set the text of all tokens up to the end of `node`."""
        self._node, self._text = node, text

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached text."""
        return len(self._text)

    def of(self, graph: TokenGraph, node: int) -> bytes | memoryview:
        """`1,2,3`: all tokens up to the end of `node`."""
        if node != self._node:
            if graph.depth_of(node) < KEPT_FROM_TOKENS:
                return encode(graph.path_ids(node))
            self._move(graph, node)
        text = self._text
        return text if isinstance(text, bytes) else memoryview(text).toreadonly()

    def _move(self, graph: TokenGraph, node: int) -> None:
        new = self._new_pieces(graph, node)
        if new is None:
            self._text = bytearray(encode(graph.path_ids(node)))
        elif isinstance(self._text, bytes):
            self._text = bytearray(self._text + new)
        else:
            try:
                self._text += new
            except BufferError:  # a running call still sends it
                self._text = self._text + new
        self._node = node

    def _new_pieces(self, graph: TokenGraph, node: int) -> bytes | None:
        """The text after the cached text; None if `node` does not continue it."""
        pieces: list[bytes] = []
        if self._node == ROOT:
            return None
        for _ in range(_MAX_STEPS):
            if node == self._node:
                return b"".join(reversed(pieces))
            if node == ROOT:
                return None
            if graph.nodes[node].num_tokens:
                pieces.append(b"," + encode(graph.ids_of(node)))
            node = graph.nodes[node].parent
        return None


def encode(token_ids: Sequence[int]) -> bytes:
    """Ids as JSON without brackets."""
    return orjson.dumps(list(token_ids))[1:-1]


MAX_ENDS = 32
"""Number of answers that a later raw prompt may continue; the newest are kept."""


class RawPrompt(msgspec.Struct, frozen=True):
    """A raw prompt and its place in the graph."""

    key: int
    """Equal for equal prompts."""
    parent: int
    token_ids: Sequence[int]
    """Tokens after the parent."""
    num_chars: int = 0
    """Length of the text of the parent and all nodes above it."""


class _End(msgspec.Struct, frozen=True):
    """An answered raw prompt."""

    node: int
    num_chars: int
    """Length of prompt and answer as text; 0 if the prompt was sent as tokens."""
    text_hash: int


class RawPrompts:
    """The raw prompts of a session."""

    __slots__ = ("_ends", "_message_nodes", "_prompts")

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._message_nodes: dict[int, MessageNode] = {}
        self._ends: list[_End] = []

    def plan(self, turn: Turn, graph: TokenGraph) -> RawPrompt:
        """The place of a turn's prompt; SessionError 400 for ids outside the vocabulary."""
        if turn.prompt_ids is not None:
            return self._plan_ids(turn.prompt_ids, graph)
        text = turn.prompt_text or ""
        for end in sorted(self._ends, key=lambda end: end.num_chars, reverse=True):
            if 0 < end.num_chars <= len(text) and hash(text[: end.num_chars]) == end.text_hash:
                rest = self._prompts.raw(text[end.num_chars :])
                return RawPrompt(hash(text), end.node, rest, end.num_chars)
        ids = self._prompts.raw(text)
        if not ids:
            raise SessionError(400, "invalid_prompt", "prompt: expected a non-empty text")
        return RawPrompt(hash(text), ROOT, ids)

    def message_node(self, prompt: RawPrompt) -> MessageNode | None:
        """The node of an equal earlier prompt; None if there is none."""
        return self._message_nodes.get(prompt.key)

    def hold(self, prompt: RawPrompt, node: int) -> MessageNode:
        """Store the prompt whose tokens end with `node`."""
        message_node = self._message_nodes[prompt.key] = MessageNode(None, b"")
        message_node.node = node
        return message_node

    def add_answer(self, turn_text: str | None, node: int, token_ids: Sequence[int]) -> None:
        """Let later prompts continue the answer that ends with `node`."""
        text = "" if turn_text is None else turn_text + self._prompts.text(token_ids)
        self._ends = [*self._ends[1 - MAX_ENDS :], _End(node, len(text), hash(text))]

    def _plan_ids(self, token_ids: tuple[int, ...], graph: TokenGraph) -> RawPrompt:
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._prompts.vocab_size:
            why = f"prompt: expected token ids from 0 to {self._prompts.vocab_size - 1}"
            raise SessionError(400, "invalid_prompt", why)
        ids = array("i", token_ids)
        for end in sorted(self._ends, key=lambda end: graph.depth_of(end.node), reverse=True):
            depth = graph.depth_of(end.node)
            if depth <= len(ids) and ids[:depth] == graph.path_ids(end.node):
                return RawPrompt(hash(token_ids), end.node, ids[depth:])
        return RawPrompt(hash(token_ids), ROOT, ids)


class Position(msgspec.Struct, frozen=True):
    """The place of a request in the history."""

    turn: Turn
    match: Match
    start: MessageNode | None = None
    """The answer that it continues by id."""

    @property
    def identity(self) -> tuple[int, bool]:
        """Equal for positions at which the same tokens are new."""
        return self.match.message_node.node, self.match.is_held

    @property
    def chat(self) -> Chat:
        """The messages to render after the match."""
        return Chat(self.match.raws, self.match.new, self.turn.tools)


class Prompt(msgspec.Struct, frozen=True):
    """New prompt tokens and the graph node that they follow."""

    match: Match | None
    """None for a raw prompt."""
    parent: int
    token_ids: Sequence[int]
    cause: ForkCause | None = None
    """The cause of a fork that is known without comparing the history."""
    raw: RawPrompt | None = None
    context: MessageNode | None = None
    """The stored context of an equal earlier request; None if there is none."""
    line: PrefixMessages | None = None
    """The messages of the shared prefix that it is."""


class Conversation:
    """The conversation of one session."""

    __slots__ = (
        "_json", "_prefills", "_prompts", "_raw_prompts", "fork_log", "graph", "history",
        "root_kinds",
    )  # fmt: skip

    def __init__(self, prompts: Prompts, rotating: Rotating) -> None:
        self.graph = TokenGraph()
        self.history = MessageHistory(rotating)
        self.root_kinds: dict[int, RootKind] = {}
        self._prompts = prompts
        self._json = PromptJson()
        self._prefills: dict[tuple[int, tuple[int, ...]], int] = {}
        # Created on use: most sessions need none of these, and there are many sessions.
        self._raw_prompts: RawPrompts | None = None
        self.fork_log: ForkLog | None = None

    def match(self, turn: Turn, start: MessageNode | None) -> Position:
        """Find the stored part of a chat, which continues the answer `start` if given."""
        if start is None:
            return Position(turn, self.history.match(turn))
        turn = self._without_own_system(turn, start)
        root = start
        while root.parent is not None:
            root = root.parent
        known = self.history.roots.get(tools_key_of(turn.tools)) is root
        if known and not turn.replaces_system:
            return Position(turn, self.history.match(turn, start), start)
        whole = self._resolve_references(turn, start)
        return Position(whole, self.history.match(whole))

    def begin(self, shared_prefix: SharedPrefix) -> Prompt:
        """Store, before anything else, what another session stored after the same request."""
        node = self.graph.add_context(ROOT, shared_prefix.token_ids, shared_prefix.image_digests)
        self.root_kinds[node] = shared_prefix.kind
        self._json.begin(node, shared_prefix.prompt_json)
        context = self.history.begin(shared_prefix.line, node)
        return Prompt(None, node, (), context=context, line=shared_prefix.line)

    def shared_prefix(self, prompt: Prompt, context: MessageNode) -> SharedPrefix | None:
        """The state after the first `prompt`, for sessions that begin alike; None for a raw
        prompt."""
        match, node = prompt.match, context.node
        if match is None or len(self.graph.nodes) > 1:
            return None
        token_ids = self.graph.ids_of(node)
        self._json.begin(node, text := encode(token_ids))
        return SharedPrefix(
            line=self.history.line(match, context),
            kind=self.root_kinds[node],
            token_ids=token_ids,
            prompt_json=text,
            image_digests=self.graph.nodes[node].images,
        )

    def again(self, context: MessageNode) -> Prompt:
        """The prompt that ends with `context`, for another answer to the same request."""
        return Prompt(None, context.node, (), context=context)

    def build(self, place: Position) -> Prompt:
        """The new prompt tokens of a chat; if they cannot be appended, the whole chat, marked as a
        fork."""
        match = place.match
        if match.is_held:
            return Prompt(match, match.message_node.node, ())
        if match.message_node.node == NO_NODE:
            return Prompt(match, ROOT, self._prompts.first(place.chat))
        ids = self._prompts.extend(self._turn_ids(match.message_node.node), place.chat)
        if ids is not None:
            return Prompt(match, match.message_node.node, ids)
        turn = self._resolve_references(place.turn, place.start) if place.start else place.turn
        again = self.history.from_root(match, turn)
        chat = Chat(again.raws, again.new, turn.tools)
        return Prompt(again, ROOT, self._prompts.first(chat), ForkCause.TEMPLATE)

    def build_raw(self, turn: Turn) -> Prompt:
        """The new tokens of a raw prompt; SessionError 400 for ids outside the vocabulary."""
        raw = self._raw().plan(turn, self.graph)
        held = self._raw().message_node(raw)
        if held is not None:
            return Prompt(None, held.node, (), raw=raw)
        return Prompt(None, raw.parent, raw.token_ids, raw=raw)

    def num_tokens(self, prompt: Prompt) -> int:
        """Length of a prompt, including all tokens that it follows."""
        return self.graph.depth_of(prompt.parent) + len(prompt.token_ids)

    def hold(self, prompt: Prompt, call: int) -> MessageNode:
        """Store a prompt's new tokens and messages for the call with this number."""
        if prompt.context is not None:
            return prompt.context
        if prompt.match is None:
            return self._hold_raw(prompt)
        self.history.catch_up()
        match = prompt.match
        if match.lookup.aliases:
            self._fork_log().add_healed(self.history, match)
        if match.is_held:
            return self.history.hold(match, match.message_node.node)
        fork = self._fork_row(prompt, match, call)
        if fork is not None:
            self._fork_log().rows.append(fork)
        images = tuple([image.digest for message in match.new for image in message.images()])
        node = self.graph.add_context(prompt.parent, prompt.token_ids, images)
        if prompt.parent == ROOT:
            self.root_kinds[node] = self._kind(match)
        return self.history.hold(match, node)

    def hold_answer(
        self, source: ReplySource, answer: ParsedReply, node: int, is_void: bool
    ) -> None:
        """Store the sampled `node` as the next message after the context that it answers."""
        if source.is_raw:
            if not is_void:
                self._raw().add_answer(source.prompt_text, node, self.graph.ids_of(node))
        elif not is_void or answer.content or answer.tool_calls:
            self.history.add_sampled(source.context, as_message(answer), node, is_void)

    def prefill_node(self, node: int, prefill: tuple[int, ...]) -> int:
        """The node of a prefill after the context `node`; created once."""
        if not prefill:
            return node
        found = self._prefills.get((node, prefill))
        if found is None:
            found = self._prefills[node, prefill] = self.graph.add_context(node, prefill)
        return found

    def prompt_json(self, node: int) -> bytes | memoryview:
        """All tokens up to the end of `node`, as JSON without brackets."""
        return self._json.of(self.graph, node)

    def images(self, node: int) -> tuple[str | Blob, ...]:
        """Addresses of the images with a placeholder up to the end of `node`, in order."""
        held = self.history.images
        return (
            tuple([held[digest].address for digest in self.graph.images_of(node)]) if held else ()
        )

    def held(self) -> dict[str, int]:
        """Bytes of `graph`, `history` and `blobs`, which other sessions may share."""
        return {
            "graph": self.graph.num_bytes + self._json.num_bytes,
            "history": self.history.num_bytes,
            "blobs": self.history.blob_bytes,
        }

    def fork_report(self) -> ForkReport:
        """Forks, and the differences that were healed instead."""
        return self.fork_log.report() if self.fork_log else ForkReport([], {})

    def _fork_log(self) -> ForkLog:
        self.fork_log = self.fork_log or ForkLog()
        return self.fork_log

    def _raw(self) -> RawPrompts:
        if self._raw_prompts is None:
            self._raw_prompts = RawPrompts(self._prompts)
        return self._raw_prompts

    def _turn_ids(self, node: int) -> Sequence[int]:
        """Tokens after the generation prompt: a prefill, and what was sampled as `node`."""
        ids, above = self.graph.ids_of(node), self.graph.nodes[node].parent
        return self.graph.ids_of(above) + ids if self._is_prefill(above) else ids

    def _is_prefill(self, node: int) -> bool:
        """Whether `node` is a prefill: only a prefill is a context after a context."""
        nodes = self.graph.nodes
        row = nodes[node]
        return not row.sampled and row.parent != ROOT and not nodes[row.parent].sampled

    def _fork_row(self, prompt: Prompt, match: Match, call: int) -> ForkRow | None:
        """The fork row of a prompt that is about to be stored; None if it is no fork."""
        cause = prompt.cause or cause_of(self.history, match)
        if cause is None:
            return None
        at, held, got = where(self.history, match)
        token, left = -1, newest_node(self.history, match)
        if left != NO_NODE:
            asked = self.graph.path_ids(prompt.parent)
            asked.extend(prompt.token_ids)
            token = first_difference(self.graph.path_ids(left), asked)
        num = len(prompt.token_ids)
        return ForkRow(call, len(self.graph.nodes), cause, at, held, got, token, num)

    def _kind(self, match: Match) -> RootKind:
        """The kind of the chat that begins with `match.new`."""
        rotating, first = self.history.rotating, match.new[0]
        if first.role not in ("system", "developer"):
            return RootKind(match.tools_key, 0, first.meanings(rotating)[0])
        opening = match.new[1].meanings(rotating)[0] if len(match.new) > 1 else 0
        return RootKind(match.tools_key, first.meanings(rotating)[0], opening)

    def _hold_raw(self, prompt: Prompt) -> MessageNode:
        assert prompt.raw is not None
        held = self._raw().message_node(prompt.raw)
        if held is not None:
            return held
        node = self.graph.add_context(prompt.parent, prompt.token_ids)
        if prompt.parent == ROOT:
            self.root_kinds[node] = RootKind(0, 0)
        return self._raw().hold(prompt.raw, node)

    def _without_own_system(self, turn: Turn, start: MessageNode) -> Turn:
        """The turn without a system text that its branch begins with already."""
        if not turn.replaces_system:
            return turn
        (system, *_) = (turn.read or read_chat)(turn.messages[0], 0)
        first = start.line()[0]
        keys = system.meanings(self.history.rotating)
        if set(keys) & set(self.history.read(first).meanings(self.history.rotating)):
            return msgspec.structs.replace(turn, messages=turn.messages[1:], replaces_system=False)
        return turn

    def _resolve_references(self, turn: Turn, start: MessageNode) -> Turn:
        """The whole chat that `turn` continues, in the common shape."""
        line = start.line()
        new: list[ChatMessage] = []
        for position, unit in enumerate(turn.messages):
            new += (turn.read or read_chat)(unit, position)
        if turn.replaces_system:
            is_system = self.history.read(line[0]).role in ("system", "developer")
            line = line[1:] if is_system else line
        images = {image.digest: image for message in new for image in message.images()}
        images |= self.history.images
        raws = [message.as_json() for message in new]
        num_system = int(turn.replaces_system)
        held = [message_node.raw for message_node in line]
        return msgspec.structs.replace(
            turn,
            messages=[*raws[:num_system], *held, *raws[num_system:]],
            messages_raw=b"",
            read=lambda raw, _: [read_held(raw, images)],
        )


@Memo
def shared_tools(raw: bytes) -> bytes:
    """One copy of the tools that many sessions offer."""
    return raw


def as_message(answer: ParsedReply) -> ChatMessage:
    """A reply as the assistant message in a history."""
    if not answer.tool_calls:
        return ChatMessage("assistant", answer.content, answer.reasoning or None)
    calls = [
        MessageToolCall(Function(call.name, call.arguments), call.id) for call in answer.tool_calls
    ]
    return ChatMessage("assistant", answer.content, answer.reasoning or None, calls)


def find_shown(
    turn: Turn,
    prompt: Prompt,
    asked: Iterable[tuple[Reply, ...]],
    parse: Callable[[Reply], ParsedReply],
) -> tuple[Reply, ...] | None:
    """The replies among `asked` whose beginning `turn` resends; `parse` reads a reply so far."""
    match = prompt.match
    if match is None or not match.new or match.new[-1].role != "assistant":
        return None
    if match.message_node.depth + len(match.new) != match.deepest.depth + 1:
        return None
    return next(
        (
            replies
            for replies in asked
            if len(replies) == 1
            and _answers(replies[0], turn, prompt)
            and _is_begin(match.new[-1], parse(replies[0]), replies[0].is_ended)
        ),
        None,
    )


def _answers(reply: Reply, turn: Turn, prompt: Prompt) -> bool:
    """Whether a reply is an open answer to the same history with the same options."""
    assert prompt.match is not None
    is_open = reply.state is ReplyState.COMMITTED or (
        reply.state is ReplyState.SAMPLING and reply.is_running
    )
    return (
        is_open
        and reply.source.context is prompt.match.deepest.asked()
        and reply.head.sampling == turn.sampling
        and reply.head.reads_calls == turn.reads_calls
        and turn.num_choices == 1
    )


def _is_begin(shown: ChatMessage, answer: ParsedReply, is_ended: bool) -> bool:
    """Whether `shown` is the finished part of `answer`, once or repeated."""
    if shown.tool_calls:
        return False
    reasoning, text = str(shown.reasoning_content or "").strip(), shown.text().strip()
    is_text_whole = is_ended or bool(answer.tool_calls)
    return (
        bool(reasoning or text)
        and _repeats(reasoning, answer.reasoning.strip())
        and (not text or (is_text_whole and _repeats(text, answer.content.strip())))
    )


def _repeats(shown: str, once: str) -> bool:
    """Whether the text is one or several repetitions of `once`."""
    while once and shown.startswith(once):
        shown = shown[len(once) :].strip()
    return not shown
