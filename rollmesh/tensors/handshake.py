"""Who may come in: both ends prove that they have the mesh's keys, and neither shows them.

    consumer: Hello(its nonce)            owner: Welcome(its nonce, proof over both)
    consumer: Proof(proof over both)      owner: Admitted | Refused

A proof is HMAC-SHA256 (RFC 2104), keyed with what both secrets of the key file give, over who
speaks and both nonces; so neither end's proof is ever the other's, nor one of an earlier time.
Invariant: an end that has keys goes on only with one that proved them, within HANDSHAKE_S. What
follows is neither encrypted nor signed: keys keep strangers out, not who can read or change what is
on the wire between machines. Without keys, on loopback, there is nothing to prove. Driven by
guest.py and connection.py.
"""

import hmac
import math
import os
import secrets
from typing import Final, TypeVar

from rollmesh.core.errors import AddressError, WireError
from rollmesh.tensors.frames import (
    NONCE_BYTES,
    PROTOCOL,
    Admitted,
    Hello,
    Proof,
    Refused,
    Welcome,
    decode_answer,
    decode_ask,
    frame,
)
from rollmesh.tensors.line import Line
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.wire.keys import KEYS_VARIABLE, Keys
from rollmesh.wire.sockets import HANDSHAKE_S

MAX_GREETING_BYTES: Final = 1024
"""Of a header of those who have proved nothing yet."""
_OWNER, _CONSUMER = b"owner", b"consumer"
_Greeting = TypeVar("_Greeting", Welcome, Admitted)


def admit(line: Line, keys: Keys | None, admitted: Admitted) -> Proof:
    """The owner's half; what the consumer said. WireError or OSError where that is to be sent away,
    and has then been told."""
    line.allow(HANDSHAKE_S)
    hello = decode_ask(line.receive(MAX_GREETING_BYTES))
    if not isinstance(hello, Hello):
        raise _refusal(line, "a handshake begins with hello")
    if hello.protocol != PROTOCOL:
        what = f"the consumer speaks protocol {hello.protocol}, its owner {PROTOCOL}"
        raise _refusal(line, what)
    secret, nonce = _secret(keys), secrets.token_bytes(NONCE_BYTES)
    nonces = hello.nonce + nonce
    line.send(frame(Welcome(PROTOCOL, nonce, _proof(secret, _OWNER, nonces))))
    proof = decode_ask(line.receive(MAX_GREETING_BYTES))
    if not isinstance(proof, Proof) or not _is_proven(proof.proof, secret, _CONSUMER, nonces):
        raise _refusal(line, f"it needs the keys of its mesh; set {KEYS_VARIABLE} to their file")
    line.send(frame(admitted))
    line.allow(math.inf)
    return proof


def introduce(line: Line, owner: str, keys: Keys | None, relay: str = "") -> Admitted:
    """The consumer's half, who lends at `relay` what he fetches, if anywhere. AddressError where
    the owner is not of our mesh, or does not take us to be; OSError or WireError where it does not
    answer."""
    line.allow(HANDSHAKE_S)
    secret, nonce = _secret(keys), secrets.token_bytes(NONCE_BYTES)
    line.send(frame(Hello(PROTOCOL, nonce)))
    welcome = _answer(line, owner, Welcome)
    nonces = nonce + welcome.nonce
    if not _is_proven(welcome.proof, secret, _OWNER, nonces):
        raise AddressError(f"{owner}: it does not have the keys that {KEYS_VARIABLE} names here")
    memory = memory_at(str(SHARED_MEMORY))
    line.send(frame(Proof(_proof(secret, _CONSUMER, nonces), memory, relay)))
    admitted = _answer(line, owner, Admitted)
    line.allow(math.inf)
    return admitted


def _answer(line: Line, owner: str, kind: type[_Greeting]) -> _Greeting:
    answer = decode_answer(line.receive(MAX_GREETING_BYTES))
    if isinstance(answer, Refused):
        raise AddressError(f"{owner}: {answer.why}")
    if not isinstance(answer, kind):
        raise WireError(f"{type(answer).__name__} where {kind.__name__} belongs")
    return answer


def _refusal(line: Line, why: str) -> WireError:
    line.send(frame(Refused(why)))
    return WireError(why)


def _secret(keys: Keys | None) -> bytes:
    """What only who has the key file can know; b'' without keys."""
    if keys is None:
        return b""
    both = f"{keys.hub_secret}{keys.dialer_secret}".encode()
    return hmac.digest(both, b"rollmesh tensors", "sha256")


def _proof(secret: bytes, speaker: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, speaker + nonces, "sha256") if secret else b""


def _is_proven(proof: bytes, secret: bytes, speaker: bytes, nonces: bytes) -> bool:
    """True also where nothing is to be proved."""
    return not secret or hmac.compare_digest(proof, _proof(secret, speaker, nonces))


def memory_at(folder: str) -> str:
    """Names the memory behind `folder` among all machines; '' where there is none.

    Containers on one machine have one boot id, and mostly a /dev/shm each.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        where = os.stat(folder)
    except OSError:
        return ""
    return f"{boot}/{where.st_dev}/{where.st_ino}"
