"""The handshake: both ends prove that they have the mesh's keys without showing them.

    consumer: Hello(its nonce)            owner: Welcome(its nonce, proof over both)
    consumer: KeyProof(proof over both)   owner: Admitted | Refused

- A proof is HMAC-SHA256 (RFC 2104), keyed with the secret of the key file, over the sender's role
  and both nonces; so neither end's proof equals the other's, nor one of another handshake.
- An end that has keys continues only with one that proved them, within HANDSHAKE_S.
- Later traffic is neither encrypted nor signed: keys keep out strangers, but not those who can read
  or change traffic between machines. Without keys, on loopback, there is nothing to prove.
"""

import hmac
import math
import os
import secrets
from typing import Final, TypeVar

from rollmesh.core.errors import AddressError, WireError
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import (
    NONCE_BYTES,
    PROTOCOL,
    Admitted,
    Hello,
    KeyProof,
    Refused,
    Request,
    Welcome,
    decode_answer,
    decode_request,
    frame,
)
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.wire.keys import KEYS_VARIABLE, Keys
from rollmesh.wire.sockets import HANDSHAKE_S

MAX_GREETING_BYTES: Final = 1024
"""Limit of a header before the other end has proved its keys."""
_OWNER, _CONSUMER = b"owner", b"consumer"
_Greeting = TypeVar("_Greeting", Welcome, Admitted)


class HandshakeRefused(WireError):
    """A consumer is not admitted; `answer` is the frame that tells it why."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.answer = frame(Refused(why))


class OwnerHandshake:
    """The owner's half, without I/O: headers of the consumer in, frames for it out."""

    def __init__(self, keys: Keys | None, admitted: Admitted) -> None:
        self._secret = _secret(keys)
        self._admitted = admitted
        self._nonces = b""

    def take(self, header: bytes) -> tuple[bytes, KeyProof | None]:
        """Return the frame to send, and with the last one the consumer's proof.

        Raises HandshakeRefused, or WireError for a malformed message.
        """
        ask = decode_request(header)
        if not self._nonces:
            return self._welcome(ask), None
        if not isinstance(ask, KeyProof) or not _is_proven(
            ask.proof, self._secret, _CONSUMER, self._nonces
        ):
            raise HandshakeRefused(
                f"it needs the keys of its mesh; set {KEYS_VARIABLE} to their file"
            )
        return frame(self._admitted), ask

    def _welcome(self, hello: Request) -> bytes:
        if not isinstance(hello, Hello):
            raise HandshakeRefused("a handshake begins with hello")
        if hello.protocol != PROTOCOL:
            raise HandshakeRefused(
                f"the consumer speaks protocol {hello.protocol}, its owner {PROTOCOL}"
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = hello.nonce + nonce
        return frame(Welcome(PROTOCOL, nonce, _proof(self._secret, _OWNER, self._nonces)))


def greet_owner(framed: FramedSocket, owner: str, keys: Keys | None, relay: str = "") -> Admitted:
    """Run the consumer's half; `relay` is where the consumer lends what it fetches, or ''.

    Raises AddressError if the owner is of another mesh or refuses us, OSError or WireError if it
    does not answer.
    """
    framed.allow(HANDSHAKE_S)
    secret, nonce = _secret(keys), secrets.token_bytes(NONCE_BYTES)
    framed.send(frame(Hello(PROTOCOL, nonce)))
    welcome = _answer(framed, owner, Welcome)
    nonces = nonce + welcome.nonce
    if not _is_proven(welcome.proof, secret, _OWNER, nonces):
        raise AddressError(f"{owner}: it does not have the keys that {KEYS_VARIABLE} names here")
    memory = memory_id(str(SHARED_MEMORY))
    framed.send(frame(KeyProof(_proof(secret, _CONSUMER, nonces), memory, relay)))
    admitted = _answer(framed, owner, Admitted)
    framed.allow(math.inf)
    return admitted


def _answer(framed: FramedSocket, owner: str, kind: type[_Greeting]) -> _Greeting:
    answer = decode_answer(framed.receive(MAX_GREETING_BYTES))
    if isinstance(answer, Refused):
        raise AddressError(f"{owner}: {answer.why}")
    if not isinstance(answer, kind):
        raise WireError(f"{type(answer).__name__} where {kind.__name__} belongs")
    return answer


def _secret(keys: Keys | None) -> bytes:
    """Derive the shared secret from the key file; b'' without keys."""
    if keys is None:
        return b""
    return hmac.digest(keys.secret.encode(), b"rollmesh tensors", "sha256")


def _proof(secret: bytes, speaker: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, speaker + nonces, "sha256") if secret else b""


def _is_proven(proof: bytes, secret: bytes, speaker: bytes, nonces: bytes) -> bool:
    """Return whether the proof is right; True if nothing is to be proved."""
    return not secret or hmac.compare_digest(proof, _proof(secret, speaker, nonces))


def memory_id(folder: str) -> str:
    """Return a name, unique among machines, of the memory behind `folder`; '' if there is none.

    Containers on one machine share the boot id, but mostly have a /dev/shm each.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        where = os.stat(folder)
    except OSError:
        return ""
    return f"{boot}/{where.st_dev}/{where.st_ino}"
