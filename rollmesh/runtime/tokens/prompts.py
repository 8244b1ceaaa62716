"""Chats to prompt tokens, and sampled tokens to answers, for one model folder.

- `first` renders a whole chat. `extend` returns only the tokens that follow sampled ones: by known
  frames (Qwen3), by the family's own bridge, or by rendering the new messages after a fixed prefix
  and removing that prefix.
- Sampled tokens are never tokenised again, and no delta is returned unless the prefix is rendered
  unchanged.
"""

import functools
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from rollmesh.core.types import OutputGrammar
from rollmesh.runtime.chat import (
    ROLES,
    ChatMessage,
    DeltaReader,
    ParsedReply,
    ParseOptions,
    ToolChoice,
    read_tools,
)
from rollmesh.runtime.tokens.families import (
    Family,
    Renderer,
    check_placeholders,
    check_sampled,
    with_images,
)
from rollmesh.runtime.tokens.parsers import Parsers, PlainTextParser, TurnFrame
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import sole_function

_MAX_HEAD_CHARS = 64 * 1024
"""A longer system text, with its tools, is rendered each time."""


class Frames:
    """Fast path for texts in Qwen3's fixed frames; one per process."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, opening: Sequence[int]) -> None:
        """`opening` is the generation prompt."""
        self._renderer = renderer
        self._head = functools.lru_cache(maxsize=64)(self._render_head)
        self._encode = tokenizer.encode
        one = {text: tokenizer.convert_tokens_to_ids(text) for text in _MARKS}
        self._start, self._end = one["<|im_start|>"], one["<|im_end|>"]
        self._think, self._end_think = one["<think>"], one["</think>"]
        self._tool_call = one["<tool_call>"]
        self._ends = (self._end, one["<|endoftext|>"])
        self._opening = list(opening)
        newline = tokenizer.encode("\n")
        self._close = [self._end, *newline]
        self._newline = newline
        self._before_results = [self._start, *tokenizer.encode("user")]
        self._before_result = [*newline, one["<tool_response>"]]
        self._behind_result = one["</tool_response>"]
        self._decode = tokenizer.decode

    def first(self, messages: Sequence[ChatMessage], tools: bytes) -> list[int] | None:
        """A whole chat with the generation prompt; None if the library must render it."""
        if not messages or not _are_plain(messages):
            return None
        has_system = ROLES[messages[0].role] == "system"
        if not has_system and not tools:
            return self._around(messages)
        text = messages[0].text() if has_system else None
        is_long = len(text or "") + len(tools) > _MAX_HEAD_CHARS
        head = self._render_head(text, tools) if is_long else self._head(text, tools)
        return [*head, *self._around(messages[has_system:])]

    def extend(
        self, sampled_ids: Sequence[int], messages: Sequence[ChatMessage]
    ) -> list[int] | None:
        """The tokens after `sampled_ids`, with their turn's end if it is missing; None as in
        `first`.

        Without messages, the model is asked for another turn.
        """
        if not _are_plain(messages):
            return None
        ids: list[int] = []
        if not sampled_ids or sampled_ids[-1] not in self._ends:
            if self._is_reasoning(sampled_ids):
                ids.append(self._end_think)
            ids.append(self._end)
        return [*ids, *self._newline, *self._around(messages)]

    def _around(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The messages, the first of which follows a line break, and the generation prompt."""
        ids: list[int] = []
        in_results = False
        for message in messages:
            role = ROLES[message.role]
            if in_results and role != "tool":
                ids += self._close
            if role == "tool":
                if not in_results:
                    ids += self._before_results
                ids += self._before_result
                ids += self._encode(f"\n{message.text()}\n")
                ids.append(self._behind_result)
            else:
                ids.append(self._start)
                ids += self._encode(f"{role}\n{message.text()}")
                ids += self._close
            in_results = role == "tool"
        if in_results:
            ids += self._close
        return ids + self._opening

    def _render_head(self, text: str | None, tools: bytes) -> list[int]:
        """The system text, if there is one, and the tools; cached for siblings."""
        role = "user" if text is None else "system"
        message = {"role": role, "content": text or ""}
        ids = self._renderer.render_ids(
            [message], tools=read_tools(tools) if tools else None, add_generation_prompt=False
        )
        if text is not None:
            return ids
        empty = [self._start, *self._encode("user\n"), *self._close]
        return ids[: len(ids) - len(empty)]

    def _is_reasoning(self, sampled_ids: Sequence[int]) -> bool:
        """Whether a truncated turn ends in its reasoning."""
        if self._think not in sampled_ids:
            return False
        start = sampled_ids.index(self._think)
        if self._decode(sampled_ids[:start]).strip():
            return False
        rest = sampled_ids[start:]
        return self._end_think not in rest and self._tool_call not in rest


_MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "<tool_response>", "</tool_response>"),
)


def _are_plain(messages: Sequence[ChatMessage]) -> bool:
    """Whether messages are framed texts, without turns of the model or images."""
    for message in messages:
        if message.role == "assistant" or (isinstance(message.content, list) and message.images()):
            return False
    return True


_FIXED_PREFIX = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class Chat(msgspec.Struct, frozen=True):
    """Messages to render, as JSON and as parsed, with the offered tools."""

    raws: Sequence[bytes]
    messages: Sequence[ChatMessage]
    tools: bytes = b""
    """A JSON array; empty for none."""

    @property
    def num_bytes(self) -> int:
        return len(self.tools) + sum(map(len, self.raws))


class Prompts:
    """Rendering and parsing for one model; stateless except for the newest fixed prefix."""

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
        self._readers = Parsers(family, tokenizer, TurnFrame(self._opening, self.stop_token_ids))

    def first(self, chat: Chat) -> "array[int]":
        """Token ids of a whole chat with the generation prompt; SessionError 400 if it cannot be
        rendered."""
        framed = self._frames.first(chat.messages, chat.tools) if self._frames else None
        if framed is not None:
            return array("i", framed)
        rendered = self._render(self._for_template(chat), chat.tools, generate=True)
        return self._checked(array("i", rendered), chat)

    def extend(self, sampled_ids: Sequence[int], chat: Chat) -> "array[int] | None":
        """The ids that follow a turn of `sampled_ids` when `chat`'s messages come after it.

        `sampled_ids` begin with the turn's prefill, if it had one. The result has the turn's
        missing end, if it was truncated, and the generation prompt. None if this model's format
        cannot be extended so; the whole chat must be rendered then. SessionError 400 if nothing may
        follow.
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

    def reader(self, options: ParseOptions) -> DeltaReader:
        """An incremental parser of one generation."""
        return self._readers.new(options)

    def answer(self, options: ParseOptions, token_ids: Sequence[int]) -> ParsedReply:
        """The answer of a finished reply: all deltas of its parser combined."""
        return self._readers.answer(options, token_ids)

    def prefill(
        self, tool_choice: ToolChoice, grammar: OutputGrammar | None, tools: bytes
    ) -> tuple[int, ...]:
        """Tokens to put after the generation prompt as context, before anything is sampled.

        They begin a required call, and close a reasoning that the prompt has opened before a call
        or a grammar. Empty if the family's frames are not known.
        """
        is_forced = tool_choice.kind in ("required", "named") and bool(tools)
        if not (is_forced or grammar):
            return ()
        name = tool_choice.name or sole_function(tools)
        return tuple(self._readers.prefill(name if is_forced else None))

    @property
    def call_end_ids(self) -> tuple[int, ...]:
        """Further stop tokens of a turn that may hold only one call."""
        return self._readers.call_end_ids

    def raw(self, text: str) -> "array[int]":
        """Token ids of a raw prompt."""
        return array("i", self._tokenizer.encode(text))

    def raw_reader(self, stop: tuple[str, ...]) -> DeltaReader:
        """A parser of the answer to a raw prompt, which is all text."""
        return PlainTextParser(self._tokenizer, self.stop_token_ids, stop)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, including special ones."""
        return self._tokenizer.decode(token_ids)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._tokenizer.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, for log-prob listings."""
        return self._tokenizer.token_bytes(token_id)

    def _for_template(self, chat: Chat) -> list[dict[str, Any]]:
        """The messages in the renderer's shape; SessionError 400 for images that it cannot show."""
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
        # The bridge reads only the previous turn, so the generation prompt replaces the history.
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
            # Long texts are rendered in threads: the last one's prefix is remembered.
            prefix = self._fixed_prefix(tools)
            self._prefixes = {tools: prefix}
        whole = self._render([*_FIXED_PREFIX, *messages], tools, generate=True)
        if not prefix or whole[: len(prefix)] != prefix:
            return None
        # A turn may also end with a stop token of another kind, such as the end of text.
        closed = bool(sampled_ids) and sampled_ids[-1] == prefix[-1]
        return array("i", whole[len(prefix) if closed else len(prefix) - 1 :])

    def _fixed_prefix(self, tools: bytes) -> list[int]:
        """A rendered chat up to the token that closes its assistant turn; empty if there is none.

        It is rendered with a user message after it, since templates render a last assistant turn
        differently.
        """
        stops = set(self.stop_token_ids)
        before = self._render([_FIXED_PREFIX[0]], tools, generate=False)
        ids = self._render([*_FIXED_PREFIX, _FIXED_PREFIX[0]], tools, generate=False)
        closes = (n for n in range(len(before), len(ids)) if ids[n] in stops)
        return ids[: next(closes, -1) + 1] if ids[: len(before)] == before else []

    def _find_opening(self) -> list[int]:
        """The generation prompt, which every sampled turn follows."""
        chat = [_FIXED_PREFIX[0]]
        closed = self._render(chat, b"", generate=False)
        opened = self._render(chat, b"", generate=True)
        return opened[len(closed) :] if opened[: len(closed)] == closed else opened


def _tools(raw: bytes) -> list[Any] | None:
    return read_tools(raw) if raw else None
