"""Transport of admission: questions to the scheduler, and the admission process's unix socket.

- Every question has a key, so that repeating it is harmless. A missing answer is an AddressError
  with the address.
- The socket is 0600, so that only its user and root can connect; the kernel reports the caller's
  user (SO_PEERCRED, unix(7)).
- A question is bounded in bytes and time: a silent caller blocks others for at most READ_S.
- A frame is a length of four bytes and msgpack of a packet's frames (wire/frames.py).
"""

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, AddressError, WireError
from rollmesh.core.ids import new_id
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.keys import Role, check_dial, read_scheduler_keys
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    DrainNode,
    JoinNode,
    ReadScheduler,
    SchedulerAnswered,
    UndrainNode,
)
from rollmesh.wire.sockets import Dialer, wait

RESEND_S = 0.5
PATIENCE_S = 15.0
"""Longer than the admission process waits for the scheduler."""

SchedulerQuestion = AdmissionMessage | JoinNode | DrainNode | UndrainNode | ReadScheduler


class AdmissionAnswer(msgspec.Struct, frozen=True):
    ok: bool
    error: str = ""
    body: Buffer = b""


def ask_scheduler(
    address: str, question: SchedulerQuestion, body: Buffer = b"", patience_s: float = PATIENCE_S
) -> AdmissionAnswer:
    """Ask the process at `address`, repeating until it answers; AddressError if there is no answer
    in time."""
    keys = read_scheduler_keys(role=Role.OPERATOR)
    check_dial(address, keys)
    dialer = Dialer(address, new_id("ask"), keys)
    try:
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            dialer.send(Packet(question, body=body))
            again_s = min(end_s, time.monotonic() + RESEND_S)
            while (left_s := again_s - time.monotonic()) > 0:
                wait([dialer], None, left_s)
                for packet in dialer.receive():
                    match packet.message:
                        case SchedulerAnswered(key, ok, error) if key == question.key:
                            return AdmissionAnswer(ok, error, packet.body)
    finally:
        dialer.close()
    raise AddressError(
        f"{address}: no answer within {patience_s:g} s; check that it runs, that its disk has "
        "space, and that its address and our keys are right"
    )


READ_S = 2.0
RECONNECT_S = 0.2
"""Between attempts to connect."""
MAX_BYTES = 2**22
BACKLOG = 64
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class AdmissionConnection:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, self.uid, _ = _CREDENTIALS.unpack(raw)
        """User id of the process that connected."""
        self._connection = connection

    def question(self) -> Packet:
        """Read the question; WireError if it is malformed or late."""
        return _receive(self._connection, time.monotonic() + READ_S)

    def answer(self, packet: Packet) -> None:
        """Send the answer, if the caller is still connected."""
        self._connection.settimeout(READ_S)
        with contextlib.suppress(OSError):
            self._connection.sendall(_packed(packet))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class AdmissionSocket:
    """Listening unix socket."""

    def __init__(self, path: Path) -> None:
        """Create the socket and its folder; AddressError if another process listens there."""
        self.path = path.absolute()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket = _bound(path)
        except OSError as error:
            reason = str(error.strerror or error).lower()
            raise AddressError(f"{path}: cannot listen there: {reason}; name another") from None

    def fileno(self) -> int:
        """Descriptor; readable when a caller waits."""
        return self._socket.fileno()

    def callers(self) -> Iterator[AdmissionConnection]:
        """Callers that wait now; each is closed after its turn."""
        for _ in range(BACKLOG):
            try:
                connection, _ = self._socket.accept()
            except OSError:  # no caller, or no descriptor left: the next turn tries again
                return
            with connection:
                yield AdmissionConnection(connection)

    def close(self) -> None:
        """Stop, and remove the socket."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


def ask_admission(
    path: Path, question: AdmissionMessage, body: Buffer = b"", patience_s: float = PATIENCE_S
) -> AdmissionAnswer:
    """Ask the admission process at `path`, again with the same key until it answers.

    AddressError if there is no answer within `patience_s`.
    """
    until_s, why = time.monotonic() + patience_s, ""
    while time.monotonic() < until_s:
        try:
            packet = _answer(path, Packet(question, body=body), until_s)
        except (OSError, WireError) as error:
            why = str(getattr(error, "strerror", None) or error).lower()
            if isinstance(error, PermissionError):
                break
            time.sleep(min(RECONNECT_S, max(0.0, until_s - time.monotonic())))
            continue
        if isinstance(packet.message, SchedulerAnswered) and packet.message.key == question.key:
            return AdmissionAnswer(packet.message.ok, packet.message.error, packet.body)
        why = "unexpected answer"
        time.sleep(RECONNECT_S)
    raise AddressError(
        f"{path}: no answer of an admission process there within {patience_s:g} s ({why}); it "
        "listens on the machine of `rollmesh scheduler up`, for the same user and root"
    )


def _answer(path: Path, packet: Packet, until_s: float) -> Packet:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(max(0.01, until_s - time.monotonic()))
        with _short(path) as name:
            connection.connect(name)
        connection.sendall(_packed(packet))
        return _receive(connection, until_s)


def _bound(path: Path) -> socket.socket:
    """Return a listening socket that is 0600 from its creation."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as name:
            _remove_stale(path, name)
            mask = os.umask(0o177)
            try:
                listening.bind(name)
            finally:
                os.umask(mask)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_stale(path: Path, name: str) -> None:
    """Remove the socket of a process that was killed; OSError if one listens or the file is not a
    socket."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(None, "a file that is not a socket is there")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.settimeout(READ_S)
            probe.connect(name)
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise OSError(None, "another process listens there")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that fits into sun_path (108 bytes), whatever the depth of its
    folder."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _packed(packet: Packet) -> bytes:
    raw = msgspec.msgpack.encode([bytes(frame) for frame in encode(packet)])
    return _LENGTH.pack(len(raw)) + raw


def _receive(connection: socket.socket, until_s: float) -> Packet:
    """One packet; WireError if it is malformed, too long, cut off or late."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until_s))
    if length > MAX_BYTES:
        raise WireError(f"{length} bytes are more than {MAX_BYTES}")
    raw = _read(connection, length, until_s)
    try:
        frames = msgspec.msgpack.decode(raw, type=list[bytes])
    except DECODE_ERRORS as error:
        raise WireError(f"not a packet: {error}") from None
    return decode(frames)


def _read(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    raw = bytearray()
    while len(raw) < num_bytes:
        if (left_s := until_s - time.monotonic()) <= 0:
            raise WireError("nothing more came in time")
        connection.settimeout(left_s)
        try:
            more = connection.recv(min(2**16, num_bytes - len(raw)))
        except OSError as error:
            raise WireError(f"cut off: {error}") from None
        if not more:
            raise WireError("cut off")
        raw += more
    return bytes(raw)
