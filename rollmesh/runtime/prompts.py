"""Chats to prompt tokens and sampled tokens to answers, for one model folder.

Owns the choice between the ways to build a prompt: `first` renders a whole chat; `extend` gives
only the tokens that follow what was sampled, by known frames (frames.py), the family's own bridge
or, where it has none, by rendering the new messages behind a fixed prefix and cutting that prefix
off. Invariant: what was sampled is never tokenised again, and no delta is given unless the prefix
came out as a prefix.
Driven by session.py.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from rollmesh.core.types import Grammar
from rollmesh.runtime.calls import sole_function
from rollmesh.runtime.chat import ChatMessage, read_tools
from rollmesh.runtime.deltas import Answer, DeltaReader, Reading
from rollmesh.runtime.families import Family
from rollmesh.runtime.frames import Frames
from rollmesh.runtime.plain import PlainReader
from rollmesh.runtime.readers import Readers, TurnFrame
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.runtime.turns import ToolChoice
from rollmesh.runtime.vision import check_placeholders, check_sampled, with_images

_FIXED_PREFIX = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class Chat(msgspec.Struct, frozen=True):
    """Messages to render, as JSON and as read, with the tools on offer."""

    raws: Sequence[bytes]
    messages: Sequence[ChatMessage]
    tools: bytes = b""
    """A JSON array; empty for none."""

    @property
    def num_bytes(self) -> int:
        return len(self.tools) + sum(map(len, self.raws))


class Prompts:
    """One per process; stateless but for the newest fixed prefix."""

    def __init__(self, family: Family, tokenizer: Tokenizer) -> None:
        self._renderer = family.renderer
        self._tokenizer = tokenizer
        self._prefixes: dict[bytes, list[int]] = {}
        self.stop_token_ids: tuple[int, ...] = tuple(family.renderer.get_stop_token_ids())
        self._image_id = family.image_id
        self._opening = self._find_opening()
        self._frames = (
            Frames(family.renderer, tokenizer, self._opening) if family.is_framed else None
        )
        self._readers = Readers(family, tokenizer, TurnFrame(self._opening, self.stop_token_ids))

    def first(self, chat: Chat) -> "array[int]":
        """Token ids of a whole chat with the generation prompt; SessionError 400 if it has none."""
        framed = self._frames.first(chat.messages, chat.tools) if self._frames else None
        if framed is not None:
            return array("i", framed)
        rendered = self._render(self._for_template(chat), chat.tools, generate=True)
        return self._checked(array("i", rendered), chat)

    def extend(self, sampled_ids: Sequence[int], chat: Chat) -> "array[int] | None":
        """The ids that follow a turn of `sampled_ids` when `chat`'s messages come after them.

        These begin with the turn's lead, if it had one. With the turn's missing close, if it was
        cut short, and the generation prompt. None where this model's format cannot be extended so;
        then the whole chat has to be rendered. SessionError 400 where nothing may follow.
        """
        if self._image_id is not None:
            check_sampled(sampled_ids, self._image_id)
        if self._frames:
            framed = self._frames.extend(sampled_ids, chat.messages)
            if framed is not None:
                return array("i", framed)
        messages = self._for_template(chat)
        ids = None
        if messages and not any(m["role"] == "assistant" for m in messages):
            ids = self._bridge(list(sampled_ids), messages, chat.tools)
        if ids is None:
            ids = self._extend_behind_prefix(sampled_ids, messages, chat.tools)
        return None if ids is None else self._checked(ids, chat)

    def reader(self, reading: Reading) -> DeltaReader:
        """Cuts one generation's tokens into deltas as they come."""
        return self._readers.new(reading)

    def answer(self, reading: Reading, token_ids: Sequence[int]) -> Answer:
        """What a finished reply says: the fold of what its reader would tell."""
        return self._readers.answer(reading, token_ids)

    def lead(
        self, tool_choice: ToolChoice, grammar: Grammar | None, tools: bytes
    ) -> tuple[int, ...]:
        """Tokens to put behind the generation prompt as context, before anything is sampled.

        A required call is begun, and a reasoning that the prompt has opened is closed before a
        call or a grammar. Nothing where the family's frames are not known: the model stays free.
        """
        is_forced = tool_choice.kind in ("required", "named") and bool(tools)
        if not (is_forced or grammar):
            return ()
        name = tool_choice.name or sole_function(tools)
        return tuple(self._readers.lead(name if is_forced else None))

    @property
    def call_end_ids(self) -> tuple[int, ...]:
        """Further ends of a turn that may hold one call only."""
        return self._readers.call_end_ids

    def raw(self, text: str) -> "array[int]":
        """Token ids of a prompt that is no chat."""
        return array("i", self._tokenizer.encode(text))

    def raw_reader(self, stop: tuple[str, ...]) -> DeltaReader:
        """Cuts the answer to such a prompt: all of it is text."""
        return PlainReader(self._tokenizer, self.stop_token_ids, stop)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._tokenizer.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, for log-prob listings."""
        return self._tokenizer.token_bytes(token_id)

    def _for_template(self, chat: Chat) -> list[dict[str, Any]]:
        """The messages as the renderer takes them; SessionError 400 on images it cannot show."""
        if self._image_id is None:
            return [message.for_template() for message in chat.messages]
        return [with_images(message) for message in chat.messages]

    def _checked(self, ids: "array[int]", chat: Chat) -> "array[int]":
        if self._image_id is not None:
            check_placeholders(ids, chat.messages, self._image_id)
        return ids

    def _render(self, messages: list[dict[str, Any]], tools: bytes, generate: bool) -> list[int]:
        return self._renderer.render_ids(
            messages, tools=_tools(tools), add_generation_prompt=generate
        )

    def _bridge(
        self, sampled_ids: list[int], messages: list[dict[str, Any]], tools: bytes
    ) -> "array[int] | None":
        # The bridge only looks at the turn before, so the generation prompt stands for the history.
        rendered = self._renderer.bridge_to_next_turn(
            self._opening, sampled_ids, messages, tools=_tools(tools)
        )
        if rendered is None:
            return None
        before = self._opening + sampled_ids
        if rendered.token_ids[: len(before)] != before:
            return None
        return array("i", rendered.token_ids[len(before) :])

    def _extend_behind_prefix(
        self, sampled_ids: Sequence[int], messages: list[dict[str, Any]], tools: bytes
    ) -> "array[int] | None":
        prefix = self._prefixes.get(tools)
        if prefix is None:
            # Long texts come here in threads: whoever is last is remembered.
            prefix = self._fixed_prefix(tools)
            self._prefixes = {tools: prefix}
        whole = self._render([*_FIXED_PREFIX, *messages], tools, generate=True)
        if not prefix or whole[: len(prefix)] != prefix:
            return None
        # A turn may also end with a stop that is none of the format's, such as the end of text.
        closed = bool(sampled_ids) and sampled_ids[-1] == prefix[-1]
        return array("i", whole[len(prefix) if closed else len(prefix) - 1 :])

    def _fixed_prefix(self, tools: bytes) -> list[int]:
        """A rendered chat up to the token that closes its assistant turn; empty if none does.

        A user message follows it in the making: templates render a last assistant turn differently.
        """
        stops = set(self.stop_token_ids)
        before = self._render([_FIXED_PREFIX[0]], tools, generate=False)
        ids = self._render([*_FIXED_PREFIX, _FIXED_PREFIX[0]], tools, generate=False)
        closes = (n for n in range(len(before), len(ids)) if ids[n] in stops)
        return ids[: next(closes, -1) + 1] if ids[: len(before)] == before else []

    def _find_opening(self) -> list[int]:
        """The generation prompt: what every sampled turn follows."""
        chat = [_FIXED_PREFIX[0]]
        closed = self._render(chat, b"", generate=False)
        opened = self._render(chat, b"", generate=True)
        return opened[len(closed) :] if opened[: len(closed)] == closed else opened


def _tools(raw: bytes) -> list[Any] | None:
    return read_tools(raw) if raw else None
