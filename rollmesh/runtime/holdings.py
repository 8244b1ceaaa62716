"""All that a session holds of its talks: tokens, messages, images, and how they came to fork.

    turn --match--> Place --build--> Prompt --hold--> the context that a generation samples after

Owns the token graph, the message history, raw prompts and the fork log, and keeps them in step.
Invariants: `match` and `build` change nothing, so that a long text can be built in a thread while
other calls go on; `hold` enters a prompt's new tokens once, however often they are asked for.
Driven by session.py.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.memo import Memo
from rollmesh.core.types import ForkRow
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.branches import RootKind
from rollmesh.runtime.chat import Call, ChatMessage, Function, Rotating, read_held
from rollmesh.runtime.deltas import Answer
from rollmesh.runtime.forks import (
    ForkCause,
    ForkLog,
    ForkReport,
    cause_of,
    first_difference,
    newest_node,
    where,
)
from rollmesh.runtime.graph import ROOT, TokenGraph
from rollmesh.runtime.history import History, tools_key_of
from rollmesh.runtime.match import Match, read_chat
from rollmesh.runtime.openings import Line, Opening
from rollmesh.runtime.prompt_json import PromptJson, encode
from rollmesh.runtime.prompts import Chat, Prompts
from rollmesh.runtime.raw_prompts import RawPrompt, RawPrompts
from rollmesh.runtime.reply import ReplySource
from rollmesh.runtime.spot import NO_NODE, Spot
from rollmesh.runtime.turns import Turn


class Place(msgspec.Struct, frozen=True):
    """Where a request stands in the history."""

    turn: Turn
    match: Match
    start: Spot | None = None
    """The answer that it goes on from by name."""

    @property
    def stand(self) -> tuple[int, bool]:
        """Equal where the same tokens are new."""
        return self.match.spot.node, self.match.is_held

    @property
    def chat(self) -> Chat:
        """What is to be rendered behind the match."""
        return Chat(self.match.raws, self.match.new, self.turn.tools)


class Prompt(msgspec.Struct, frozen=True):
    """New prompt tokens and the graph node that they follow."""

    match: Match | None
    """None for a raw prompt."""
    parent: int
    token_ids: Sequence[int]
    cause: ForkCause | None = None
    """Where it is known before the history is asked."""
    raw: RawPrompt | None = None
    context: Spot | None = None
    """Where it is held already: the very same request was asked before."""
    line: Line | None = None
    """Of the opening that it is."""


class Holdings:
    """One per session."""

    __slots__ = (
        "_json", "_leads", "_prompts", "_raw_prompts", "fork_log", "graph", "history", "root_kinds",
    )  # fmt: skip

    def __init__(self, prompts: Prompts, rotating: Rotating) -> None:
        self.graph = TokenGraph()
        self.history = History(rotating)
        self.root_kinds: dict[int, RootKind] = {}
        self._prompts = prompts
        self._json = PromptJson()
        self._leads: dict[tuple[int, tuple[int, ...]], int] = {}
        # Most sessions never have these, and there are many sessions.
        self._raw_prompts: RawPrompts | None = None
        self.fork_log: ForkLog | None = None

    def match(self, turn: Turn, start: Spot | None) -> Place:
        """Find what is held of a chat; it goes on from the answer `start`, where there is one."""
        if start is None:
            return Place(turn, self.history.match(turn))
        turn = self._without_own_system(turn, start)
        root = start
        while root.parent is not None:
            root = root.parent
        known = self.history.roots.get(tools_key_of(turn.tools)) is root
        if known and not turn.begins_anew:
            return Place(turn, self.history.match(turn, start), start)
        whole = self._spell_out(turn, start)
        return Place(whole, self.history.match(whole))

    def begin(self, opening: Opening) -> Prompt:
        """Hold, before anything else, what another session held after the same request."""
        node = self.graph.add_context(ROOT, opening.token_ids, opening.image_digests)
        self.root_kinds[node] = opening.kind
        self._json.begin(node, opening.prompt_json)
        context = self.history.begin(opening.line, node)
        return Prompt(None, node, (), context=context, line=opening.line)

    def opening(self, prompt: Prompt, context: Spot) -> Opening | None:
        """What is held after the first `prompt`, for others that begin so; None if it is raw."""
        match, node = prompt.match, context.node
        if match is None or len(self.graph.nodes) > 1:
            return None
        token_ids = self.graph.ids_of(node)
        self._json.begin(node, text := encode(token_ids))
        return Opening(
            line=self.history.line(match, context),
            kind=self.root_kinds[node],
            token_ids=token_ids,
            prompt_json=text,
            image_digests=self.graph.nodes[node].images,
        )

    def again(self, context: Spot) -> Prompt:
        """The prompt that `context` ends, for one more answer to the same request."""
        return Prompt(None, context.node, (), context=context)

    def build(self, place: Place) -> Prompt:
        """The new prompt tokens of a chat; falls back to the whole of it, and says so."""
        match = place.match
        if match.is_held:
            return Prompt(match, match.spot.node, ())
        if match.spot.node == NO_NODE:
            return Prompt(match, ROOT, self._prompts.first(place.chat))
        ids = self._prompts.extend(self._turn_ids(match.spot.node), place.chat)
        if ids is not None:
            return Prompt(match, match.spot.node, ids)
        turn = self._spell_out(place.turn, place.start) if place.start else place.turn
        again = self.history.from_root(match, turn)
        chat = Chat(again.raws, again.new, turn.tools)
        return Prompt(again, ROOT, self._prompts.first(chat), ForkCause.TEMPLATE)

    def build_raw(self, turn: Turn) -> Prompt:
        """The new tokens of a raw prompt; SessionError 400 for ids that no model has."""
        raw = self._raw().plan(turn, self.graph)
        held = self._raw().spot(raw)
        if held is not None:
            return Prompt(None, held.node, (), raw=raw)
        return Prompt(None, raw.parent, raw.token_ids, raw=raw)

    def num_tokens(self, prompt: Prompt) -> int:
        """Of a prompt with all that it follows."""
        return self.graph.depth_of(prompt.parent) + len(prompt.token_ids)

    def hold(self, prompt: Prompt, call: int) -> Spot:
        """Enter a prompt's new tokens and messages, for the call with this number."""
        if prompt.context is not None:
            return prompt.context
        if prompt.match is None:
            return self._hold_raw(prompt)
        self.history.catch_up()
        match = prompt.match
        if match.walk.aliases:
            self._fork_log().add_healed(self.history, match)
        if match.is_held:
            return self.history.hold(match, match.spot.node)
        fork = self._fork_row(prompt, match, call)
        if fork is not None:
            self._fork_log().rows.append(fork)
        images = tuple([image.digest for message in match.new for image in message.images()])
        node = self.graph.add_context(prompt.parent, prompt.token_ids, images)
        if prompt.parent == ROOT:
            self.root_kinds[node] = self._kind(match)
        return self.history.hold(match, node)

    def hold_answer(self, source: ReplySource, answer: Answer, node: int, is_void: bool) -> None:
        """Enter what was sampled as `node` as the next message behind what it answers."""
        if source.is_raw:
            if not is_void:
                self._raw().add_answer(source.prompt_text, node, self.graph.ids_of(node))
        elif not is_void or answer.content or answer.tool_calls:
            self.history.add_sampled(source.context, as_message(answer), node, is_void)

    def lead_to(self, node: int, lead: tuple[int, ...]) -> int:
        """The node of a lead behind the context `node`; it is made once."""
        if not lead:
            return node
        found = self._leads.get((node, lead))
        if found is None:
            found = self._leads[node, lead] = self.graph.add_context(node, lead)
        return found

    def prompt_json(self, node: int) -> bytes | memoryview:
        """All tokens down to and with `node`, as JSON without brackets."""
        return self._json.of(self.graph, node)

    def images(self, node: int) -> tuple[str | Blob, ...]:
        """Addresses of the images that have a placeholder down to and with `node`, in order."""
        held = self.history.images
        return (
            tuple([held[digest].address for digest in self.graph.images_of(node)]) if held else ()
        )

    def held(self) -> dict[str, int]:
        """Bytes by what they are: `graph`, `history` and `blobs`, which others may hold, too."""
        return {
            "graph": self.graph.num_bytes + self._json.num_bytes,
            "history": self.history.num_bytes,
            "blobs": self.history.blob_bytes,
        }

    def fork_report(self) -> ForkReport:
        """Where the histories did not extend what was sampled, and what was healed instead."""
        return self.fork_log.report() if self.fork_log else ForkReport([], {})

    def _fork_log(self) -> ForkLog:
        self.fork_log = self.fork_log or ForkLog()
        return self.fork_log

    def _raw(self) -> RawPrompts:
        if self._raw_prompts is None:
            self._raw_prompts = RawPrompts(self._prompts)
        return self._raw_prompts

    def _turn_ids(self, node: int) -> Sequence[int]:
        """What stands behind the generation prompt: a lead, and what was sampled as `node`."""
        ids, above = self.graph.ids_of(node), self.graph.nodes[node].parent
        return self.graph.ids_of(above) + ids if self._is_lead(above) else ids

    def _is_lead(self, node: int) -> bool:
        """Nothing else is context behind context."""
        nodes = self.graph.nodes
        row = nodes[node]
        return not row.sampled and row.parent != ROOT and not nodes[row.parent].sampled

    def _fork_row(self, prompt: Prompt, match: Match, call: int) -> ForkRow | None:
        """What is to be said of a prompt that is about to be held; None if it forks nothing."""
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
        """The kind of the chat whose first messages are `match.new`."""
        rotating, first = self.history.rotating, match.new[0]
        if first.role not in ("system", "developer"):
            return RootKind(match.tools_key, 0, first.meanings(rotating)[0])
        opening = match.new[1].meanings(rotating)[0] if len(match.new) > 1 else 0
        return RootKind(match.tools_key, first.meanings(rotating)[0], opening)

    def _hold_raw(self, prompt: Prompt) -> Spot:
        assert prompt.raw is not None
        held = self._raw().spot(prompt.raw)
        if held is not None:
            return held
        node = self.graph.add_context(prompt.parent, prompt.token_ids)
        if prompt.parent == ROOT:
            self.root_kinds[node] = RootKind(0, 0)
        return self._raw().hold(prompt.raw, node)

    def _without_own_system(self, turn: Turn, start: Spot) -> Turn:
        """The turn less a system text that its line begins with anyhow."""
        if not turn.begins_anew:
            return turn
        (system, *_) = (turn.read or read_chat)(turn.messages[0], 0)
        first = start.line()[0]
        keys = system.meanings(self.history.rotating)
        if set(keys) & set(self.history.read(first).meanings(self.history.rotating)):
            return msgspec.structs.replace(turn, messages=turn.messages[1:], begins_anew=False)
        return turn

    def _spell_out(self, turn: Turn, start: Spot) -> Turn:
        """The whole chat that `turn` goes on with, in the common shape."""
        line = start.line()
        new: list[ChatMessage] = []
        for position, unit in enumerate(turn.messages):
            new += (turn.read or read_chat)(unit, position)
        if turn.begins_anew:
            is_system = self.history.read(line[0]).role in ("system", "developer")
            line = line[1:] if is_system else line
        images = {image.digest: image for message in new for image in message.images()}
        images |= self.history.images
        raws = [message.as_json() for message in new]
        num_system = int(turn.begins_anew)
        held = [spot.raw for spot in line]
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


def as_message(answer: Answer) -> ChatMessage:
    """A reply as the assistant message that a history holds."""
    if not answer.tool_calls:
        return ChatMessage("assistant", answer.content, answer.reasoning or None)
    calls = [Call(Function(call.name, call.arguments), call.id) for call in answer.tool_calls]
    return ChatMessage("assistant", answer.content, answer.reasoning or None, calls)
