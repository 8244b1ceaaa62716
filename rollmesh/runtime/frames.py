"""Qwen3's chats without its template: fixed frames, and of each message only the text is encoded.

Owns what stands around a message's text, encoded once. Invariant: the ids are those that the
library's Qwen3Renderer renders and bridges (tests hold it to both). Whatever is more than a frame
around a text is left to it: turns of the model, and the head with the tools, once per set of them.
The cost is that of encoding the new text; the library's bookkeeping (masks, attributions) takes as
long again. Driven by prompts.py.
"""

import functools
from collections.abc import Sequence

from rollmesh.runtime.chat import ROLES, ChatMessage, read_tools
from rollmesh.runtime.families import Renderer
from rollmesh.runtime.tokenizer import Tokenizer

_MAX_HEAD_CHARS = 64 * 1024
"""A longer system text, with its tools, is rendered each time."""


class Frames:
    """Satisfies what prompts.py wants of a fast path; one per process."""

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
        """A whole chat with the generation prompt; None where the library has to render it."""
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
        """What follows `sampled_ids`, with their turn's end if it is missing; None as above.

        No messages are no exception: then the model is asked for another turn of its own.
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
        """The system text, if there is one, and the tools; siblings share it."""
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
        """Whether a turn that was cut short is cut in its reasoning."""
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
    """Whether they are framed texts, without turns of the model or images."""
    for message in messages:
        if message.role == "assistant" or (isinstance(message.content, list) and message.images()):
            return False
    return True
