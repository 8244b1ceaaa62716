"""Secrets that stand in files, most of them one line, readable by their owner alone.

Invariants: a file that others can read is refused; one that we make is 0600 from its first byte,
and is there whole or not at all, whoever else makes it at that moment or ends while making it.
Driven by the gateway's command, by wire/keys.py, and by whoever asks for the admin token of the
environment.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from rollmesh.core.errors import ConfigError
from rollmesh.core.redaction import register_content, register_secret

SECRET_BYTES = 32
MAX_BYTES = 2**20
ROOT = 0
ADMIN_TOKEN_VARIABLE = "ROLLMESH_ADMIN_TOKEN"
ADMIN_TOKEN_FILE_VARIABLE = "ROLLMESH_ADMIN_TOKEN_FILE"
ENGINE_KEY_VARIABLE = "ROLLMESH_ENGINE_KEY"
ENGINE_KEY_FILE_VARIABLE = "ROLLMESH_ENGINE_KEY_FILE"


def admin_token(environment: Mapping[str, str] = os.environ) -> str:
    """ROLLMESH_ADMIN_TOKEN, or what the file holds that ROLLMESH_ADMIN_TOKEN_FILE names; else ''.

    ConfigError if there is no such file, or others can read it.
    """
    told = environment.get(ADMIN_TOKEN_VARIABLE, "")
    register_secret(told)
    file = environment.get(ADMIN_TOKEN_FILE_VARIABLE)
    return told or (read_secret(Path(file)) if file else "")


def engine_key(environment: Mapping[str, str] = os.environ) -> str:
    """ROLLMESH_ENGINE_KEY, or the secret in the file that ROLLMESH_ENGINE_KEY_FILE names; else ''.

    Engines that were started with `--api-key` want it. ConfigError if there is no such file, or
    others can read it, or the key cannot be part of a header.
    """
    key = environment.get(ENGINE_KEY_VARIABLE, "")
    file = environment.get(ENGINE_KEY_FILE_VARIABLE)
    if not key and file:
        return read_secret(Path(file))
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{ENGINE_KEY_VARIABLE}: it should be letters and digits in one line")
    return key


def read_secret(path: Path) -> str:
    """The secret; ConfigError in one line where there is none that only its owner can read."""
    try:
        text = read_private(path).decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; it should hold one line") from None
    except OSError as error:
        raise ConfigError(f"{path}: {str(error.strerror).lower()}; name another file") from None
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ConfigError(f"{path}: it should hold one line of letters and digits, the secret")
    return text


def read_private(path: Path) -> bytes:
    """The file's content, at most MAX_BYTES; ConfigError if another user owns it, others can read
    it, or it is no regular file, OSError if it cannot be read.

    It is opened once and the open file is checked, so it cannot be exchanged in between.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: not a regular file; name another")
        if found.st_uid not in (os.geteuid(), ROOT):
            raise ConfigError(
                f"{path}: it belongs to uid {found.st_uid}, and this process runs as uid "
                f"{os.geteuid()}; name a file of your own"
            )
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{path}: others can read it; chmod 600 {path}")
        raw = file.read(MAX_BYTES)
    register_content(raw.decode("utf-8", "replace"))
    return raw


def read_or_make_secret(path: Path) -> str:
    """The secret in `path`, which is made, random and 0600, if there is no such file."""
    secret = secrets.token_urlsafe(SECRET_BYTES)
    try:
        make_secret_file(path, f"{secret}\n".encode())
    except FileExistsError:
        return read_secret(path)
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(f"{path}: cannot make it: {why}; name another file") from None
    register_secret(secret)
    return secret


def hash_token(token: str) -> str:
    """SHA-256 in hex, which may be kept where the random token may not; '' for ''."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def make_secret_file(path: Path, raw: bytes) -> None:
    """Make `path`; FileExistsError if it is there already, OSError if it cannot be made."""
    if path.exists():  # also where nothing can be written
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename, it never replaces what is there
    finally:
        part.unlink(missing_ok=True)
