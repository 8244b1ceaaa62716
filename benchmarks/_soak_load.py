"""What the soak's agents send: screenshots, a history that grows, bodies made of pieces.

Owns the shape of the load and what one agent has said and seen. Invariants: every screenshot's
bytes are its own but for its siblings' first, which they share; a body is written piece by piece,
and the pieces of all agents share one pool, so that the load costs little memory and next to no
time; bytes are counted here and nowhere estimated. Driven by _soak_agents.py.
"""

import base64
import random
from typing import Any

import msgspec

POOL = 16
"""Different screenshots, before each gets a head of its own."""
HEAD_CHARS = 32
"""Of a screenshot, that make it another."""
MIN_SHOT_BYTES = 64
OLD_SHOT = b'{"type":"text","text":"[an older screenshot]"}'
WORDS = ("link", "button", "heading", "price", "table", "menu", "search", "result", "form", "image")
NUM_WORDS = 48
SYSTEM = (
    "You use a browser. Look at the screenshot, say in a line what you see, and call one tool. "
    "Stop when the task is done."
)
TOOLS = (
    b'[{"type":"function","function":{"name":"click","description":"Click at a place of the page.",'
    b'"parameters":{"type":"object","properties":{"x":{"type":"integer"},"y":{"type":"integer"}},'
    b'"required":["x","y"]}}}]'
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How rollouts are."""

    num_turns: int = 45
    shot_bytes: int = 500_000
    """Of a screenshot as base64."""
    keep: int = 0
    """So many of the last screenshots stay in the history; 0: all."""
    group_size: int = 4
    slots: int = 4
    """Rollouts of one worker at a time."""
    streams: float = 0.1
    """Share of calls that are streamed."""
    vanish: float = 0.02
    """Share of calls whose client is gone in mid-stream, and asks again."""
    crash: float = 0.02
    """Share of agents that die somewhere in their rollout."""
    seed: int = 0


Pieces = list[bytes | memoryview]


class Shots:
    """Screenshots: (head, rest) of base64 text; any two numbers make different ones."""

    def __init__(self, shape: Shape) -> None:
        chance = random.Random(shape.seed)
        num_bytes = max(shape.shot_bytes, MIN_SHOT_BYTES) // 4 * 3
        made = (base64.b64encode(chance.randbytes(num_bytes)) for _ in range(POOL))
        self._rests = [memoryview(each)[HEAD_CHARS:] for each in made]
        self._salt = chance.randbytes(8)

    def shot(self, number: int) -> Pieces:
        """The same for the same number."""
        raw = b"\x89PNG" + self._salt + number.to_bytes(12, "big")
        return [base64.b64encode(raw), self._rests[number % POOL]]


class Browser:
    """One agent's side of the talk; `body` is what it sends now."""

    def __init__(self, shape: Shape, shots: Shots, task: int, index: int) -> None:
        self.num_unique_bytes = 0
        """Of what it has shown and was told so far: what a recorder must hold of it."""
        self._shape = shape
        self._shots = shots
        self._chance = random.Random(f"{shape.seed}.{task}.{index}")
        self._first_shot = task * 1_000_000
        """Siblings begin with the same page."""
        self._next_shot = self._first_shot + 1 + index * 1_000
        self._messages: list[Pieces] = [[_message("system", SYSTEM)]]
        self._shown: list[tuple[int, Pieces]] = []
        """Place and pieces of messages whose screenshot may still be taken out."""
        words = f"Task {task}. {self._words()}"
        self._show(b'{"role":"user","content":[' + _text(words), self._first_shot)

    def crash_turn(self) -> int:
        """In which turn it dies; never where that is 0."""
        dies = self._chance.random() < self._shape.crash
        return self._chance.randint(1, self._shape.num_turns) if dies else 0

    def does_vanish(self) -> bool:
        """Whether the client of the next call does."""
        return self._chance.random() < self._shape.vanish

    def does_stream(self) -> bool:
        """Whether the next call is streamed."""
        return self._chance.random() < self._shape.streams

    def body(self, is_stream: bool) -> Pieces:
        """The pieces of a request's body."""
        flag = b'"stream":true,' if is_stream else b""
        head = b'{"model":"policy",%b"max_tokens":512,"tools":%b,"messages":[' % (flag, TOOLS)
        pieces: Pieces = [head]
        for at, message in enumerate(self._messages):
            if at:
                pieces.append(b",")
            pieces += message
        pieces.append(b"]}")
        return pieces

    def hear(self, message: bytes, call_ids: list[str]) -> None:
        """What the model said, and what its calls did: a new page."""
        self._messages.append([message])
        self.num_unique_bytes += len(message)
        for call_id in call_ids or [""]:
            role = b'{"role":"tool","tool_call_id":"%b","content":[' % call_id.encode()
            if not call_id:
                role = b'{"role":"user","content":['
            self._show(role + _text(self._words()), self._next_shot)
            self._next_shot += 1

    def _show(self, before: bytes, number: int) -> None:
        """A message with a screenshot; those before the last `keep` are taken out."""
        image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,'
        shot = self._shots.shot(number)
        pieces: Pieces = [before + b"," + image, *shot, b'"}}]}']
        self.num_unique_bytes += num_bytes(pieces)
        self._shown.append((len(self._messages), [before + b",", OLD_SHOT, b"]}"]))
        self._messages.append(pieces)
        if self._shape.keep and len(self._shown) > self._shape.keep:
            place, without = self._shown.pop(0)
            self._messages[place] = without

    def _words(self) -> str:
        chance = self._chance
        return " ".join(f"{chance.choice(WORDS)} {chance.randrange(999)}" for _ in range(NUM_WORDS))


class Said(msgspec.Struct):
    """A model's answer, folded from a plain or a streamed reply."""

    message: bytes
    """As the agent sends it back."""
    call_ids: list[str]


class _Named(msgspec.Struct):
    id: str = ""
    index: int = 0
    function: dict[str, Any] = {}


class _Heard(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Named] | None = None


class _Choice(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw()
    delta: _Heard = msgspec.field(default_factory=_Heard)


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []


_replies = msgspec.json.Decoder(_Reply)
_heard = msgspec.json.Decoder(_Heard)


def read_reply(body: bytes) -> Said:
    """Of a plain answer."""
    raw = bytes(_replies.decode(body).choices[0].message)
    return Said(raw, [call.id for call in _heard.decode(raw).tool_calls or ()])


def read_events(events: list[bytes]) -> Said:
    """Of a stream's `data:` lines, whole."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in _replies.decode(event).choices:
            content.append(choice.delta.content or "")
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": part.id, "type": "function", "name": "", "arguments": ""}
                )
                call["name"] += part.function.get("name") or ""
                call["arguments"] += part.function.get("arguments") or ""
    told = [
        {"id": c["id"], "type": c["type"], "function": {k: c[k] for k in ("name", "arguments")}}
        for c in calls.values()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if told:
        message["tool_calls"] = told
    return Said(msgspec.json.encode(message), [str(call["id"]) for call in told])


def num_bytes(pieces: Pieces) -> int:
    """All of them together."""
    return sum(map(len, pieces))


def _message(role: str, text: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": text})


def _text(text: str) -> bytes:
    return msgspec.json.encode({"type": "text", "text": text})
