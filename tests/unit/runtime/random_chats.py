"""Agents that send random chats to one session, and the expected text of each engine prompt.

Histories are extended, rewound, edited and truncated; messages repeat, are empty, reuse call ids,
and are strings or parts; replies are delivered, abandoned, truncated, refused, or never fetched.
"""

import random
import re

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import ParsedReply, Turn, read_message
from rollmesh.runtime.conversation.shared_prefixes import SharedPrefixes
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.session_log import EventWriter
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.sampler import ScriptedGeneration, ScriptedSampler
from tests.unit.runtime.session_calls import Message, open_session

WORDS = ["a", "b", "", "ab", "a b"]
ROLES = ["user"] * 5 + ["system", "developer", "tool", "assistant", "caller"]
ONE, OTHER = (b'{"type":"function","function":{"name":"%b"}}' % name for name in (b"f", b"g"))
TOOLS = [b"", b"[%b]" % ONE, b"[%b,%b]" % (ONE, OTHER), b"[%b,%b]" % (OTHER, ONE)]
MARKUP = '\n<tool_call>\n{"name": "%s", "arguments": {"x":  %d}}\n</tool_call>'
WINDOW_S = 30.0

RequestHistory = tuple[list[Message], bytes]


class RandomAgent:
    """An agent with one session; `step` makes one call."""

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        seed: int,
        shared_prefixes: SharedPrefixes | None = None,
        event_writer: EventWriter | None = None,
    ) -> None:
        self.clock = FakeClock()
        settings = GenerationSettings(retry_window_s=WINDOW_S, max_fruitless_attempts=0)
        self.sampler = ScriptedSampler(None, settings, self.clock)
        self.session = open_session(
            self.sampler, prompts, shared_prefixes=shared_prefixes, event_writer=event_writer
        )
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._chance = random.Random(seed)
        self._chats: list[RequestHistory] = [([], tools) for tools in TOOLS]

    async def step(self) -> None:
        """Send a request, and sample an answer for it or none."""
        messages, tools = self._next_chat()
        num_before = len(self.sampler.requests)
        replies = await self.session.attach(self._turn(messages, tools))
        for request in self.sampler.requests[num_before:]:
            asked = self._tokenizer.decode(list(request.prompt_ids))
            assert flat(asked) == flat(self._fresh(messages, tools))
        for reply in replies:
            reply.join()
            if isinstance(reply.generation, ScriptedGeneration) and not reply.is_ended:
                self._move(reply.generation, bool(tools))
        if all(reply.is_ended for reply in replies):
            await self._end(replies, messages, tools)
        for reply in replies:
            self.session.left(reply)
        if self._chance.random() < 0.1:
            self.clock.advance(WINDOW_S + 1)
            self.sampler.tick()

    def _next_chat(self) -> RequestHistory:
        chance = self._chance
        known, tools = chance.choice(self._chats[-6:])
        messages, kind = list(known), chance.random()
        if kind < 0.1:
            del messages[chance.randrange(len(messages) + 1) :]
        elif kind < 0.15 and messages:
            messages[chance.randrange(len(messages))] = self._message()
        if chance.random() < 0.9 or not messages:
            messages.append(self._message())
        return messages, chance.choice(TOOLS) if chance.random() < 0.05 else tools

    def _message(self) -> Message:
        chance = self._chance
        role, text = chance.choice(ROLES), chance.choice(WORDS)
        content: object = text
        if chance.random() < 0.2:
            marks: Message = {"cache_control": {}} if chance.random() < 0.5 else {}
            content = [{"type": "text", "text": text, **marks}]
        if role == "tool":
            call_id = chance.choice(["c0", "c1"])
            return {"role": role, "content": content, "tool_call_id": call_id}
        if role == "caller":
            arguments = chance.choice(["{}", '{"y":1}', '{ "y" : 1 }'])
            call = _call(chance.choice(["c0", "c1"]), chance.choice("fg"), arguments)
            return {"role": "assistant", "content": content, "tool_calls": [call]}
        return {"role": role, "content": content}

    def _turn(self, messages: list[Message], tools: bytes) -> Turn:
        raws = [msgspec.json.encode(message) for message in messages]
        num_units = self._chance.choice([0, 0, 1, len(raws)])
        rest = b"[%b]" % b",".join(raws[num_units:]) if num_units < len(raws) else b""
        num_choices = 2 if self._chance.random() < 0.2 else 1
        return Turn(
            messages=raws[:num_units],
            messages_raw=rest,
            tools=tools,
            num_choices=num_choices,
            digest=hash((*raws, tools, num_choices)),
            is_retry=self._chance.random() < 0.1,
        )

    def _fresh(self, messages: list[Message], tools: bytes) -> str:
        """Return the prompt of the messages without a session."""
        raws = [msgspec.json.encode(message) for message in messages]
        chat = Chat(raws, [read_message(raw, 0) for raw in raws], tools)
        return self._tokenizer.decode(list(self._prompts.first(chat)))

    def _move(self, generation: ScriptedGeneration, may_call: bool) -> None:
        chance, kind = self._chance, self._chance.random()
        text = chance.choice(["a", "b", "ab", ""])
        if not generation.token_ids and kind > 0.2 and chance.random() < 0.2:
            text = f"<think>r</think>\n\n{text}"
        if may_call and chance.random() < 0.5:
            text += MARKUP % (chance.choice("fg"), len(self.sampler.generations))
        pieces = re.findall(r"<[^>]*>|.", text, flags=re.DOTALL)
        ids = [token_id for piece in pieces for token_id in self._tokenizer.encode(piece)]
        if kind < 0.2:
            generation.show(*ids[:2])
            if kind < 0.1:
                generation.fail("no", is_refused=True)
        elif kind < 0.25:
            generation.end(*ids, reason="length")
        else:
            generation.end(*ids, *self._tokenizer.encode("<|im_end|>"))

    async def _end(self, replies: tuple[Reply, ...], messages: list[Message], tools: bytes) -> None:
        try:
            answers = [self.session.finish(reply) for reply in replies]
            await self.session.recorder.written()
        except SessionError:
            return
        if self._chance.random() < 0.9:
            for reply in replies:
                self.session.delivered(reply)
        self._chats.append(([*messages, self._echo(self._chance.choice(answers))], tools))

    def _echo(self, answer: ParsedReply) -> Message:
        """Return an answer in one of the forms in which agents send it back."""
        echo: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning and self._chance.random() < 0.5:
            echo["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            space = self._chance.choice(["", " "])
            echo["tool_calls"] = [
                _call(call.id, call.name, call.arguments.replace(" ", space))
                for call in answer.tool_calls
            ]
        return echo


def flat(text: str) -> str:
    """Return a prompt's text without spacing, reasoning and truncation marks."""
    text = re.sub(r"<think>.*?</think>|\s", "", text, flags=re.DOTALL)
    return text.replace("<|im_end|><|im_start|>assistant", "")


def _call(call_id: str, name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
