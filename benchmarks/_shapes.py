"""The shapes of calls that the interception benchmark makes, as talks for _load.py.

Invariant: a history grows by what the server really answered; each text is used once, unless the
shape says otherwise, so that a cache of prompts helps only where siblings share one. Driven by
interception.py.
"""

import msgspec

from benchmarks._arms import Door
from benchmarks._corpus import ANSWER_TOKENS, Texts
from benchmarks._load import Reply, Talk

SYSTEM = (
    "You are a careful engineer. Read the code, say what it does and where it is wrong, and answer "
    "in plain words without decoration."
)
FIRST_CHARS = 640
"""With the system text and JSON's escapes a body of about 1 KB."""
GROWING_CHARS = 960
"""A turn's new text; 40 of them and their answers are 60 KB."""
SHORT_CHARS = 120
"""Of a turn in a session of hundreds."""


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_completions = msgspec.json.Decoder(_Completion)


def chat(door: Door, messages: bytes, flags: bytes = b"") -> bytes:
    """The HTTP request of one call; `flags` are body fields with a comma behind each."""
    body = b'{"model":"policy",%b"max_tokens":%d,"messages":[%b]}'
    return post(door, body % (flags, ANSWER_TOKENS, messages))


def post(door: Door, body: bytes) -> bytes:
    """An HTTP request as agents send them, with the fewest headers."""
    head = (
        b"POST %b HTTP/1.1\r\nHost: bench\r\nAccept: application/json\r\n"
        b"Authorization: Bearer %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return head % (door.path, door.key, len(body)) + body


def message(role: str, content: str) -> bytes:
    """One message as JSON."""
    return msgspec.json.encode({"role": role, "content": content})


def first(texts: Texts, num_chars: int = FIRST_CHARS) -> bytes:
    """A fresh conversation's messages."""
    return message("system", SYSTEM) + b"," + message("user", texts.piece(num_chars))


def repeated(request: bytes, num_calls: int) -> Talk:
    """The very same call again and again."""
    for _ in range(num_calls):
        yield request


def once(request: bytes) -> Talk:
    """One call."""
    yield request


class Conversation:
    """A history that grows; `turns` may be called again and goes on."""

    def __init__(self, door: Door, texts: Texts) -> None:
        self._door = door
        self._texts = texts
        self._messages = message("system", SYSTEM)

    def turns(self, num_turns: int, num_chars: int) -> Talk:
        """So many turns, each with a new text of so many characters."""
        for _ in range(num_turns):
            self._messages += b"," + message("user", self._texts.piece(num_chars))
            reply: Reply = yield chat(self._door, self._messages)
            content = _completions.decode(reply.body).choices[0].message.content
            self._messages += b"," + message("assistant", content)
