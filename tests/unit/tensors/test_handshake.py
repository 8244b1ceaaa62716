"""The two ends of one mesh authenticate each other; a refused consumer receives the reason."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import AddressError, WireError
from rollmesh.tensors import handshake
from rollmesh.tensors.framed_socket import FramedSocket
from rollmesh.tensors.frames import (
    NONCE_BYTES,
    PROTOCOL,
    Admitted,
    Hello,
    KeyProof,
    Refused,
    Welcome,
    decode_answer,
    frame,
)
from rollmesh.tensors.handshake import greet_owner, memory_id
from rollmesh.wire.keys import KEYS_VARIABLE, Keys, new_keys
from tests.unit.tensors.owners import accept_consumer

OWNER = "tcp://127.0.0.1:7000"
ADMITTED = Admitted("memory", "/dev/shm")
NONCE = b"n" * NONCE_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    """The consumer's end of a connection, and the owner's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    sockets = FramedSocket(near, patience_s=5.0), FramedSocket(far, patience_s=5.0)
    yield sockets
    for framed in sockets:
        framed.close()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys.json")


@pytest.fixture
def other_keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "others.json")


class AcceptingOwner:
    """An owner that admits one consumer, in a thread."""

    def __init__(self, framed: FramedSocket, keys: Keys | None) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._admit, args=(framed, keys))
        self._thread.start()

    def _admit(self, framed: FramedSocket, keys: Keys | None) -> None:
        try:
            accept_consumer(framed, keys, ADMITTED)
        except (WireError, OSError) as error:
            self.error = error
            framed.cut()

    def refusal(self) -> str:
        """Return the reason for which the consumer was refused; '' if it was admitted."""
        self._thread.join()
        return str(self.error or "")


def test_without_keys_a_consumer_is_admitted(ends: tuple[FramedSocket, FramedSocket]) -> None:
    owner = AcceptingOwner(ends[1], None)
    assert greet_owner(ends[0], OWNER, None) == ADMITTED
    assert owner.refusal() == ""


def test_with_the_same_keys_a_consumer_is_admitted(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys
) -> None:
    owner = AcceptingOwner(ends[1], keys)
    assert greet_owner(ends[0], OWNER, keys) == ADMITTED
    assert owner.refusal() == ""


def test_a_consumer_without_keys_gets_an_error_that_asks_for_them(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys
) -> None:
    owner = AcceptingOwner(ends[1], keys)
    with pytest.raises(AddressError, match=f"{OWNER}: it needs the keys.*{KEYS_VARIABLE}"):
        greet_owner(ends[0], OWNER, None)
    assert "needs the keys" in owner.refusal()


@pytest.mark.parametrize("has_keys", [False, True])
def test_an_owner_without_the_keys_is_not_trusted(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys, other_keys: Keys, has_keys: bool
) -> None:
    owner = AcceptingOwner(ends[1], other_keys if has_keys else None)
    with pytest.raises(AddressError, match=f"{OWNER}: it does not have the keys"):
        greet_owner(ends[0], OWNER, keys)
    ends[0].cut()
    assert owner.refusal() == "hung up"


def test_a_consumer_with_other_keys_is_refused(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys, other_keys: Keys
) -> None:
    """The consumer here does not check the owner's identity."""
    owner = AcceptingOwner(ends[1], keys)
    near = ends[0]
    near.send(frame(Hello(PROTOCOL, NONCE)))
    welcome = decode_answer(near.receive())
    assert isinstance(welcome, Welcome)
    near.send(frame(KeyProof(welcome.proof)))  # the owner's own proof, sent back
    answer = decode_answer(near.receive())
    assert isinstance(answer, Refused)
    assert "needs the keys" in owner.refusal()


@pytest.mark.parametrize("keyed", [False, True])
def test_another_protocol_version_is_refused(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys, keyed: bool
) -> None:
    owner = AcceptingOwner(ends[1], keys if keyed else None)
    ends[0].send(frame(Hello(PROTOCOL + 1, NONCE)))
    answer = decode_answer(ends[0].receive())
    assert answer == Refused(f"the consumer speaks protocol {PROTOCOL + 1}, its owner {PROTOCOL}")
    assert owner.refusal() == answer.why


@pytest.mark.parametrize(
    "refusal",
    [
        frame(KeyProof(b"")),
        frame(Hello(PROTOCOL, NONCE)) * 2,
        frame(Refused("no")),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        (handshake.MAX_GREETING_BYTES + 1).to_bytes(4, "little") + b"x" * 2000,
        frame(Hello(PROTOCOL, NONCE))[:-1],
    ],
)
def test_a_malformed_greeting_is_refused(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys, refusal: bytes
) -> None:
    owner = AcceptingOwner(ends[1], keys)
    ends[0].send(refusal)
    ends[0].stop_sending()
    assert owner.refusal() != ""


def test_a_malformed_welcome_is_a_wire_error(ends: tuple[FramedSocket, FramedSocket]) -> None:
    ends[1].send(frame(ADMITTED))
    with pytest.raises(WireError, match="Admitted where Welcome belongs"):
        greet_owner(ends[0], OWNER, None)


@pytest.mark.slow
def test_a_silent_peer_is_given_up(
    ends: tuple[FramedSocket, FramedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.05)
    with pytest.raises(TimeoutError):
        accept_consumer(ends[1], None, ADMITTED)
    with pytest.raises(TimeoutError):
        greet_owner(ends[0], OWNER, None)


def test_every_handshake_has_its_own_nonce_and_proof(
    ends: tuple[FramedSocket, FramedSocket], keys: Keys
) -> None:
    """A recorded proof is not valid in a later handshake."""
    near, far = ends
    welcomes = []
    for _ in range(2):
        near.send(frame(Hello(PROTOCOL, NONCE)) + frame(KeyProof(b"overheard")))
        with pytest.raises(WireError, match="needs the keys"):
            accept_consumer(far, keys, ADMITTED)
        welcomes.append(decode_answer(near.receive()))
        assert isinstance(decode_answer(near.receive()), Refused)
    one, other = welcomes
    assert isinstance(one, Welcome)
    assert isinstance(other, Welcome)
    assert one.nonce != other.nonce
    assert one.proof != other.proof


def test_a_folder_is_the_same_memory_for_all_processes_that_see_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert memory_id(str(one)) == memory_id(str(one)) != ""
    assert memory_id(str(one)) != memory_id(str(other))
    assert memory_id(str(tmp_path / "none")) == ""
    assert memory_id("") == ""
