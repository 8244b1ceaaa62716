"""A scripted agent's model behind SGLang's `/generate`: it reasons, calls tools and concludes.

    agent = ScriptedAgent(load_tokenizer(folder), steps(
        Say("I look.", uses=(Use("bash", '{"command": "ls"}'),)), Say("Done."), aside=Say("Title")))
    async with ScriptedEngine(agent.next_token) as engine: ...

It reads its prompt's tokens as ChatML turns, asks the script what to say there, and says it in
Qwen3's format with the real single tokens of `<think>` and `<tool_call>`. Texts are cut into
tokens as no tokenizer would, so that whoever tokenises again what was sampled is found out.
Invariant: the token after a context is a function of that context alone, so a recorded turn proves
itself, whoever cuts, resumes or repeats it. Driven by tests and benchmarks.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Sequence

import msgspec

from rollmesh.runtime.tokens.tokenizer import Tokenizer

_MAX_PIECE = 5
"""Characters; longer than most tokens, shorter than most words."""
_MAX_KEPT = 512
"""Answers that are remembered: each is asked for once per token."""


class Use(msgspec.Struct, frozen=True):
    """A tool call, as the model writes it."""

    name: str
    arguments: str
    """JSON text; its spacing is the model's own."""


class Say(msgspec.Struct, frozen=True):
    """One turn of the model."""

    text: str = ""
    reasoning: str = ""
    uses: tuple[Use, ...] = ()


class Scene(msgspec.Struct, frozen=True):
    """What the model has before it."""

    turns: tuple[tuple[str, str], ...]
    """Role and text of each; marks are text here."""

    @property
    def num_called(self) -> int:
        """Turns of the model's in which it called tools."""
        return sum(role == "assistant" and "<tool_call>" in text for role, text in self.turns)

    @property
    def offers_tools(self) -> bool:
        """Whether the first turn lists tools, in Qwen3's way or that of a plain template."""
        role, text = self.turns[0] if self.turns else ("", "")
        return role == "tools" or "<tools>" in text


Script = Callable[[Scene], Say]


def steps(*answers: Say, aside: Say | None = None) -> Script:
    """A tool task: one answer after each round of tool results, the last one for ever.

    A scene without tools gets `aside`, where there is one: agents ask for titles on the side.
    """

    def say(scene: Scene) -> Say:
        if aside is not None and not scene.offers_tools:
            return aside
        return answers[min(scene.num_called, len(answers) - 1)]

    return say


class ScriptedAgent:
    """See the module; `next_token` is what a ScriptedEngine samples with."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._start: int = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._opening = [self._start, *tokenizer.encode("assistant\n")]
        self._kept: dict[tuple[int, ...], list[int]] = {}

    def next_token(self, policy_version: int, context: Sequence[int]) -> int:
        """The token after `context`, the same for every policy version; without a chat, an end."""
        del policy_version
        backwards = range(len(context) - 1, -1, -1)
        opened = next((n for n in backwards if context[n] == self._start), None)
        if opened is None:
            return self._end
        answer = self._answer(tuple(context[:opened]))
        said = list(context[opened + len(self._opening) :])
        return answer[_place_behind(said, answer)]

    def _answer(self, before: tuple[int, ...]) -> list[int]:
        """All tokens of the turn after `before`, to its end."""
        answer = self._kept.get(before)
        if answer is None:
            answer = [*self._tokens(self._script(self._scene(before))), self._end]
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[before] = answer
        return answer

    def _scene(self, ids: tuple[int, ...]) -> Scene:
        starts = [n for n, token_id in enumerate(ids) if token_id == self._start]
        turns = []
        for start, stop in itertools.pairwise([*starts, len(ids)]):
            text = self._tokenizer.decode(ids[start + 1 : stop])
            role, _, said = text.partition("\n")
            turns.append((role, said.removesuffix("\n").removesuffix("<|im_end|>")))
        return Scene(tuple(turns))

    def _tokens(self, say: Say) -> list[int]:
        ids: list[int] = []
        if say.reasoning:
            ids += self._framed("think", say.reasoning) + self._cut("\n\n")
        ids += self._cut(say.text)
        for use in say.uses:
            ids += self._cut("\n") if ids else []
            text = f'{{"name": "{use.name}", "arguments": {use.arguments}}}'
            ids += self._framed("tool_call", text)
        return ids

    def _framed(self, mark: str, text: str) -> list[int]:
        opens, closes = self._tokenizer.convert_tokens_to_ids([f"<{mark}>", f"</{mark}>"])
        return [opens, *self._cut(f"\n{text}\n"), closes]

    def _cut(self, text: str) -> list[int]:
        """Tokens of `text` by pieces of chance lengths; the same text is always cut the same."""
        dice = random.Random(zlib.crc32(text.encode()))
        ids: list[int] = []
        at = 0
        while at < len(text):
            size = dice.randint(1, _MAX_PIECE)
            ids += self._tokenizer.encode(text[at : at + size])
            at += size
        return ids


def _place_behind(said: list[int], answer: list[int]) -> int:
    """Where `answer` goes on after `said`.

    A gateway that forces a call puts its opening into the model's mouth: then `said` begins in
    mid-answer. Where it fits nowhere, the model has lost its thread and ends the turn.
    """
    num_said = len(said)
    for at in range(len(answer) - num_said):
        if answer[at : at + num_said] == said:
            return at + num_said
    return len(answer) - 1
