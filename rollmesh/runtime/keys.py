"""Numbers that identify bytes, equal in every process.

- Python's own hash is salted in each process, so what outlives a process is identified by these:
  requests by `key_of`, units of a history by `unit_key`.
- `key_of` is the CRC-32 of all bytes and 32 bits of SHA-256 of how each part ends. It is quick for
  long requests, and may be equal for two requests of one session that were made for it.
- `unit_key` is BLAKE2b of all bytes: an agent cannot make two units of one key.
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
    """63 bits of the BLAKE2b digest of a unit."""
    return int.from_bytes(hashlib.blake2b(unit, digest_size=8).digest(), "little") >> 1
