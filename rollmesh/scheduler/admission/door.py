"""The admission process's unix socket: one question and one answer for each connection.

- The socket is 0600, so that only its user and root can connect, and the kernel tells whose process
  the caller is (SO_PEERCRED, unix(7)).
- A question is bounded in bytes and in time: a caller that is silent keeps others waiting for
  READ_S at most.
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
from rollmesh.scheduler.admission.asking import PATIENCE_S, Answer
from rollmesh.wire.frames import Buffer, Packet, decode, encode
from rollmesh.wire.scheduling import AdmissionMessage, SchedulerAnswered

READ_S = 2.0
AGAIN_S = 0.2
"""Between two tries to connect."""
MAX_BYTES = 2**22
BACKLOG = 64
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class Caller:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, self.uid, _ = _CREDENTIALS.unpack(raw)
        """User id of the process that connected."""
        self._connection = connection

    def question(self) -> Packet:
        """Read it; WireError where it is none, or does not come in time."""
        return _receive(self._connection, time.monotonic() + READ_S)

    def answer(self, packet: Packet) -> None:
        """Send it, if the caller is still there."""
        self._connection.settimeout(READ_S)
        with contextlib.suppress(OSError):
            self._connection.sendall(_packed(packet))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Door:
    """The listening socket."""

    def __init__(self, path: Path) -> None:
        """Make it, and its folder where that is missing; AddressError if another process has it."""
        self.path = path.absolute()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket = _bound(path)
        except OSError as error:
            reason = str(error.strerror or error).lower()
            raise AddressError(f"{path}: cannot listen there: {reason}; name another") from None

    def fileno(self) -> int:
        """Its descriptor, readable where a caller waits."""
        return self._socket.fileno()

    def callers(self) -> Iterator[Caller]:
        """Those that wait now; each is closed after its turn."""
        for _ in range(BACKLOG):
            try:
                connection, _ = self._socket.accept()
            except OSError:  # no one waits, or no descriptor is left: the next turn tries again
                return
            with connection:
                yield Caller(connection)

    def close(self) -> None:
        """Stop, and remove the socket."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


def ask_admission(
    path: Path, question: AdmissionMessage, body: Buffer = b"", patience_s: float = PATIENCE_S
) -> Answer:
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
            time.sleep(min(AGAIN_S, max(0.0, until_s - time.monotonic())))
            continue
        if isinstance(packet.message, SchedulerAnswered) and packet.message.key == question.key:
            return Answer(packet.message.ok, packet.message.error, packet.body)
        why = "it answered something else"
        time.sleep(AGAIN_S)
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
    """A listening socket that is 0600 from its first moment."""
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
    """Remove the socket of a process that was killed; OSError where one listens, or it is none."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(None, "there is a file that is no socket")
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
    """A name of the socket that fits into sun_path (108 bytes), however deep its folder is."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _packed(packet: Packet) -> bytes:
    raw = msgspec.msgpack.encode([bytes(frame) for frame in encode(packet)])
    return _LENGTH.pack(len(raw)) + raw


def _receive(connection: socket.socket, until_s: float) -> Packet:
    """One packet; WireError where it is none, too long, cut off or late."""
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
