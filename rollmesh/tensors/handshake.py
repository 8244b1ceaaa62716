"""Who may come in: both ends prove that they have the mesh's keys, and neither shows them.

    consumer: Hello(its nonce)            owner: Welcome(its nonce, proof over both)
    consumer: Proof(proof over both)      owner: Admitted | Refused

A proof is HMAC-SHA256 (RFC 2104), keyed with the secret of the key file that a trainer and its
ranks share, over the speaker's part and both nonces; so neither end's proof is ever the other's,
nor one of an earlier time.
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
    Ask,
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


class Declined(WireError):
    """A consumer is not admitted; `answer` is the frame that tells it why."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.answer = frame(Refused(why))


class Admission:
    """The owner's half, without I/O: headers of the consumer in, frames for it out."""

    def __init__(self, keys: Keys | None, admitted: Admitted) -> None:
        self._secret = _secret(keys)
        self._admitted = admitted
        self._nonces = b""

    def take(self, header: bytes) -> tuple[bytes, Proof | None]:
        """The frame to send, and with the last one the consumer's proof; Declined, or WireError
        for what is no message."""
        ask = decode_ask(header)
        if not self._nonces:
            return self._welcome(ask), None
        if not isinstance(ask, Proof) or not _is_proven(
            ask.proof, self._secret, _CONSUMER, self._nonces
        ):
            raise Declined(f"it needs the keys of its mesh; set {KEYS_VARIABLE} to their file")
        return frame(self._admitted), ask

    def _welcome(self, hello: Ask) -> bytes:
        if not isinstance(hello, Hello):
            raise Declined("a handshake begins with hello")
        if hello.protocol != PROTOCOL:
            raise Declined(f"the consumer speaks protocol {hello.protocol}, its owner {PROTOCOL}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = hello.nonce + nonce
        return frame(Welcome(PROTOCOL, nonce, _proof(self._secret, _OWNER, self._nonces)))


def admit(line: Line, keys: Keys | None, admitted: Admitted) -> Proof:
    """The owner's half over a line; the consumer's proof. WireError or OSError where the consumer
    is not admitted, and has received the reason."""
    line.allow(HANDSHAKE_S)
    admission, proof = Admission(keys, admitted), None
    while proof is None:
        try:
            answer, proof = admission.take(line.receive(MAX_GREETING_BYTES))
        except Declined as declined:
            line.send(declined.answer)
            raise
        line.send(answer)
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


def _secret(keys: Keys | None) -> bytes:
    """What only who has the key file can know; b'' without keys."""
    if keys is None:
        return b""
    return hmac.digest(keys.secret.encode(), b"rollmesh tensors", "sha256")


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
