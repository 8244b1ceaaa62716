"""Read what an agent's program left in its folder, without following links out of it.

- The kernel resolves the path below the folder and follows no symbolic link (openat2(2)); where it
  cannot, the path is opened part by part with O_NOFOLLOW.
- Only regular files are read, of at most `max_bytes`: a FIFO or a device never blocks the reader.
"""

import ctypes
import errno
import os
import stat
import sys
from pathlib import Path

MAX_BYTES = 2**20
"""Read of one file unless the caller asks for another limit: 1 MiB."""

_OPENAT2 = 437
"""The number of the system call, the same on each architecture that Python runs on."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""An older kernel, or a container whose seccomp filter does not know the call."""


class _OpenHow(ctypes.Structure):
    """struct open_how of openat2(2)."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def read_bytes(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of the regular file `name` below `folder`.

    Raise OSError where there is none: FileNotFoundError, or ELOOP or EXDEV for a path that leaves
    the folder or crosses a symbolic link, EINVAL for a FIFO, a device or a folder, EFBIG for a file
    of more than `max_bytes`.
    """
    root = os.open(folder, _FOLDER)
    try:
        descriptor = open_beneath(root, name)
    finally:
        os.close(root)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", name)
    return raw


def read_text(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> str:
    """Read a file as `read_bytes` does, as UTF-8 text; invalid bytes are replaced."""
    return read_bytes(folder, name, max_bytes).decode("utf-8", "replace")


def open_beneath(root: int, name: str) -> int:
    """A descriptor for reading of `name` below the folder `root`, by no symbolic link; OSError."""
    try:
        return _openat2(root, name)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return open_by_parts(root, name)


def open_by_parts(root: int, name: str) -> int:
    """Open a file without following links on a kernel that has no openat2."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise OSError(errno.EXDEV, "not a path below the folder", name)
    folder = os.dup(root)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _openat2(root: int, name: str) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    how = _OpenHow(_FILE, 0, _RESOLVE)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    path = ctypes.c_char_p(os.fsencode(name))
    while True:
        size = ctypes.c_size_t(ctypes.sizeof(how))
        found: int = call(ctypes.c_long(_OPENAT2), root, path, ctypes.byref(how), size)
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # a rename beside it
            raise OSError(number, os.strerror(number), name)
