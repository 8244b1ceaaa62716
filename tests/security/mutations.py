"""Inputs for fuzzing: valid JSON, MessagePack, HTTP requests and frames, changed at random.

Each change keeps most of the structure, so that inputs pass the first checks and reach the code
behind them.
"""

import copy
import gzip
import json
import random
from typing import Any

import msgspec

from tests.golden.wire import FILE

ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, float("inf"), float("nan")),
    *("", "\x00", "\x1b]0;title\x07", "\u202e", "\ud800", "a" * 70_000, "../../etc/passwd", "{}"),
    *([], {}, [[]], [None], {"": None}, [{}] * 50),
)
MAX_RAW = 200_000


class Mutator:
    """Random changes from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def value(self, value: Any, num_changes: int = 2) -> Any:
        """A copy with some of its parts replaced, removed, repeated or renamed."""
        whole = [copy.deepcopy(value)]
        for _ in range(self.rng.randint(1, num_changes)):
            self._change(whole)
        return whole[0]

    def _change(self, whole: list[Any]) -> None:
        place: Any = whole
        key: Any = 0
        while isinstance(place[key], dict | list) and place[key] and self.rng.random() < 0.8:
            place = place[key]
            key = self.rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        kind = self.rng.randrange(6)
        if kind <= 2:
            place[key] = copy.deepcopy(self.rng.choice(ODD))
        elif kind == 3:
            for _ in range(self.rng.choice([1, 30, 300])):
                place[key] = [place[key]]
        elif kind == 4 and place is not whole:
            del place[key]
        elif isinstance(place, dict):
            place[self.rng.choice(["", "stream", "n", "x" * 300, key + "_"])] = place[key]

    def raw(self, data: bytes, num_changes: int = 4) -> bytes:
        """Bytes flipped, cut, repeated or added."""
        found = bytearray(data)
        for _ in range(self.rng.randint(1, num_changes)):
            at = self.rng.randrange(len(found) + 1)
            kind = self.rng.randrange(5)
            if kind == 0 and found:
                found[at % len(found)] ^= 1 << self.rng.randrange(8)
            elif kind == 1:
                del found[at:]
            elif kind == 2:
                found[at:at] = self.rng.randbytes(self.rng.choice([1, 4, 300]))
            elif kind == 3:
                found[at:at] = found[at : at + 40] * self.rng.choice([1, 20])
            else:
                found[at : at + 3] = self.rng.choice([b"\r\n", b"\xff" * 5, b'"', b"[" * 3000])
        return bytes(found[:MAX_RAW])

    def json(self, value: Any) -> bytes:
        """JSON of a changed value, sometimes with bytes changed too."""
        text = json.dumps(self.value(value)).encode("utf-8", "surrogatepass")
        return self.raw(text) if self.rng.random() < 0.2 else text

    def http(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """A request: mostly with correct framing, sometimes with any byte changed."""
        lines = dict(headers)
        kind = self.rng.random()
        if kind < 0.1:
            body = gzip.compress(body)
            lines["Content-Encoding"] = "gzip"
        if kind > 0.9:
            lines["Transfer-Encoding"] = "chunked"
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + body
        return self.raw(request) if self.rng.random() < 0.3 else request

    def msgpack(self, data: bytes) -> bytes:
        """MessagePack of a changed value, or with bytes changed."""
        if self.rng.random() < 0.8:
            value = self.value(msgspec.msgpack.decode(data))
            try:
                return msgspec.msgpack.encode(value)
            except (OverflowError, UnicodeEncodeError, RecursionError):
                pass  # not everything that JSON holds
        return self.raw(data)

    def frames(self) -> list[bytes]:
        """Frames of a message of the wire, most often with parts of the message replaced."""
        header = self.rng.choice(MESSAGES)
        if self.rng.random() < 0.9:
            header = self.msgpack(header)
        num_frames = self.rng.choice([0, 1, 1, 1, 2, 3])
        return [
            header,
            *(self.rng.randbytes(self.rng.choice([0, 9, 999])) for _ in range(num_frames)),
        ]


MESSAGES = [bytes.fromhex(line.split()[1]) for line in FILE.read_text().splitlines()]
"""One of each kind."""
