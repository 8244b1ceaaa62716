"""Numbers that stand for bytes, equal in every process.

Python's own hash is salted anew in each, so what outlives a process is known by these: requests by
`key_of`, units of a history by `unit_key`. Both begin with the CRC-32 of all bytes (RFC 1952),
which is as quick as Python's hash. Of a request SHA-256 of how it ends is the other half: two of a
session's requests that are equally long and end alike are still told apart but for one time in
2**32. Of a unit it is the length, for it is looked up among the few that follow one spot.
Invariant: equal parts give equal keys, wherever and whenever. Pure; driven by the dialects, by
deeds.py and by walk.py.
"""

import hashlib
import zlib

TAIL_BYTES = 2048


def key_of(*parts: bytes) -> int:
    """64 bits of the parts, in their order."""
    checksum, tails = 0, []
    for part in parts:
        checksum = zlib.crc32(part, checksum)
        tails += [b"%d:" % len(part), part[-TAIL_BYTES:]]
    digest = hashlib.sha256(b"".join(tails)).digest()
    return int.from_bytes(digest[:4] + checksum.to_bytes(4, "little"), "little", signed=True)


def unit_key(unit: bytes) -> int:
    """63 bits of a unit, which has less than 2 GiB."""
    return len(unit) << 32 | zlib.crc32(unit)
