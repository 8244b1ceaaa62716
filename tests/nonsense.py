"""Invalid messages, for every test that sends them to a socket."""

import random
from collections.abc import Iterator

from rollmesh.wire.frames import Packet, encode
from rollmesh.wire.messages import ClientHello


def nonsense(seed: int, number: int) -> Iterator[list[bytes]]:
    """Random frames, and valid ones cut, changed, of another protocol or without their body."""
    rng = random.Random(seed)
    true = [bytes(frame) for frame in encode(Packet(ClientHello("c"), "i1", b"body"))]
    for _ in range(number):
        cut = true[0][: rng.randrange(len(true[0]))]
        bent = bytes([rng.choice(b"\x00\xc1\xff")]) + true[0][1:]
        other = true[0][:1] + bytes([rng.randrange(2, 100)]) + true[0][2:]
        deep = b"\x91" * 5000
        endless = b"\xdd\xff\xff\xff\xff"
        lines = [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(1, 9))]
        yield rng.choice(
            [
                [cut, b""],
                [bent, b""],
                [other, b"", b""],
                [deep, b""],
                [endless, b""],
                true[:1],
                lines,
            ]
        )
