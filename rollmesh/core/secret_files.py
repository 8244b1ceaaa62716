"""Secrets in files, and secrets that a process receives from its parent by a descriptor.

- A file that others can read is refused; one that we create is 0600 from its first byte, and
  complete or absent.
- The parent writes one JSON object (variable name to text) into a pipe and names the reading end in
  ROLLMESH_SECRETS_FD, so that neither argv nor the environment holds secrets; files are passed by
  content.
- The child reads the descriptor once, closes it and removes the variable.
- A process started by hand with secrets in its environment executes itself again without them,
  because /proc/PID/environ shows the initial environment.
"""

import ctypes
import errno
import functools
import hashlib
import os
import resource
import secrets
import stat
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import msgspec

from rollmesh.core.errors import ConfigError
from rollmesh.core.redaction import register_content, register_secret

SECRET_BYTES = 32
MAX_SECRET_BYTES = 2**20
ROOT = 0
ADMIN_TOKEN_VARIABLE = "ROLLMESH_ADMIN_TOKEN"
ADMIN_TOKEN_FILE_VARIABLE = "ROLLMESH_ADMIN_TOKEN_FILE"
ENGINE_KEY_VARIABLE = "ROLLMESH_ENGINE_KEY"
ENGINE_KEY_FILE_VARIABLE = "ROLLMESH_ENGINE_KEY_FILE"


def admin_token(environment: Mapping[str, str] = os.environ) -> str:
    """Return ROLLMESH_ADMIN_TOKEN, or the content of ROLLMESH_ADMIN_TOKEN_FILE; else ''.

    ConfigError if the file is missing, or others can read it.
    """
    token = environment.get(ADMIN_TOKEN_VARIABLE, "")
    register_secret(token)
    file = environment.get(ADMIN_TOKEN_FILE_VARIABLE)
    return token or (read_secret(Path(file)) if file else "")


def engine_key(environment: Mapping[str, str] = os.environ) -> str:
    """Return ROLLMESH_ENGINE_KEY, or the content of ROLLMESH_ENGINE_KEY_FILE; else ''.

    Engines started with `--api-key` require it. ConfigError if the file is missing or others can
    read it, or if the key cannot be part of a header.
    """
    key = environment.get(ENGINE_KEY_VARIABLE, "")
    file = environment.get(ENGINE_KEY_FILE_VARIABLE)
    if not key and file:
        return read_secret(Path(file))
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{ENGINE_KEY_VARIABLE}: it should be letters and digits in one line")
    return key


def read_secret(path: Path) -> str:
    """Return the secret in a file; ConfigError in one line if it is missing or not private."""
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
    """Return the file's content, at most MAX_SECRET_BYTES.

    ConfigError if another user owns it, others can read it, or it is not a regular file; OSError if
    it cannot be read. The open file is checked, so that it cannot be exchanged in between.
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
        raw = file.read(MAX_SECRET_BYTES)
    register_content(raw.decode("utf-8", "replace"))
    return raw


def read_or_make_secret(path: Path) -> str:
    """Return the secret in `path`; create it with random content and mode 0600 if it is missing."""
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
    """Return the SHA-256 in hex, which may be stored where the token may not; '' for ''."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def make_secret_file(path: Path, raw: bytes) -> None:
    """Create `path`; FileExistsError if it exists, OSError if it cannot be created."""
    if path.exists():  # also where nothing can be written
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # unlike a rename, a link never replaces an existing file
    finally:
        part.unlink(missing_ok=True)


SECRETS_VARIABLE = "ROLLMESH_SECRETS_FD"
"""Environment: the descriptor to read secrets from."""
KEYS_VARIABLE = "ROLLMESH_KEYS"
_WORKER_FILE = "worker.json"
"""The workers' file in a key folder (wire/keys.py)."""
SECRET_VARIABLES = (
    KEYS_VARIABLE,
    ADMIN_TOKEN_VARIABLE,
    ADMIN_TOKEN_FILE_VARIABLE,
    ENGINE_KEY_VARIABLE,
    ENGINE_KEY_FILE_VARIABLE,
)
MAX_HANDED_BYTES = 2**16
"""The capacity of a Linux pipe; a parent that writes less never waits for its child."""

_PR_SET_DUMPABLE = 4
_handed: dict[str, str] = {}


def handed(variable: str) -> str | None:
    """Return the text received for `variable`, or None."""
    return _handed.get(variable)


@functools.cache
def process_engine_key() -> str:
    """Return the key that this process sends to engines, received or from its environment."""
    return handed(ENGINE_KEY_VARIABLE) or engine_key()


def secrets_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that `environment` holds or names files of; ConfigError for an unreadable
    or unprotected file.
    """
    found = {}
    if keys := environment.get(KEYS_VARIABLE):
        found[KEYS_VARIABLE] = _text_of_keys(keys)
    token_file = environment.get(ADMIN_TOKEN_FILE_VARIABLE)
    token = environment.get(ADMIN_TOKEN_VARIABLE)
    if token or token_file:
        found[ADMIN_TOKEN_VARIABLE] = token or read_secret(Path(token_file or ""))
    if key := engine_key(environment):
        found[ENGINE_KEY_VARIABLE] = key
    return found


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that hold secrets or name their files."""
    return {name: text for name, text in environment.items() if name not in SECRET_VARIABLES}


def open_secrets_pipe(secrets: Mapping[str, str]) -> int:
    """Return a descriptor from which a child reads `secrets`; the caller closes it."""
    raw = msgspec.json.encode(secrets)
    if len(raw) > MAX_HANDED_BYTES:
        raise ConfigError(
            f"{' and '.join(secrets)} are longer than {MAX_HANDED_BYTES} bytes in all"
        )
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(raw)
    return reading


def receive(environment: MutableMapping[str, str] = os.environ) -> None:
    """Read the descriptor that the parent named, if any; `handed` then finds the secrets."""
    number = environment.pop(SECRETS_VARIABLE, "")
    if number.isdecimal():
        with os.fdopen(int(number), "rb") as pipe:
            _handed.update(msgspec.json.decode(pipe.read(), type=dict[str, str]))
    for text in _handed.values():
        register_content(text)


def read_root_files(environment: MutableMapping[str, str] = os.environ) -> None:
    """Read secrets from files of root, in a process that will become another user.

    `handed` then finds them, and their variables are removed. ConfigError as in secrets_in.
    """
    files = {
        name: environment[name]
        for name in (KEYS_VARIABLE, ADMIN_TOKEN_FILE_VARIABLE, ENGINE_KEY_FILE_VARIABLE)
        if _is_of_root(environment.get(name, ""))
    }
    _handed.update(secrets_in(files))
    for name in files:
        del environment[name]


def _is_of_root(path: str) -> bool:
    try:
        return bool(path) and os.stat(path).st_uid == 0
    except OSError:
        return False


def begin_without_secrets(environment: Mapping[str, str] = os.environ) -> None:
    """Receive secrets; if the environment holds some, execute this process again without them.

    ConfigError in one line for an unusable key file.
    """
    receive()
    secrets = secrets_in(environment)
    if not secrets and not any(name in environment for name in SECRET_VARIABLES):
        return
    reading = open_secrets_pipe({**_handed, **secrets})
    os.set_inheritable(reading, True)
    cleared = {**without_secrets(environment), SECRETS_VARIABLE: str(reading)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], cleared)


def protect_memory() -> None:
    """Prevent other processes of our user from reading our memory and environment, and core dumps.

    See PR_SET_DUMPABLE in prctl(2). Processes with CAP_SYS_PTRACE, such as root's, can still read.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _text_of_keys(name: str) -> str:
    """Return the text of a key file, or of the worker's file in a key folder; ConfigError if it
    cannot be read or is not private.
    """
    path = Path(name)
    try:
        raw = read_private(path / _WORKER_FILE if path.is_dir() else path)
        return raw.decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{KEYS_VARIABLE}={name}: {str(error.strerror).lower()}") from None
    except ConfigError as error:
        raise ConfigError(f"{KEYS_VARIABLE}={error}") from None
