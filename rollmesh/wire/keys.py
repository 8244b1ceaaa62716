"""Key pairs of a mesh: one for its hub and one for each member, with a role; and finding them.

    FOLDER/hub.json       the hub's pair; only the router's host has it
    FOLDER/NAME.json      a member's pair, its role and the hub's public key; this file is copied
    FOLDER/members.json   names, roles and public keys of the members that hubs admit

- Files are 0600 and the folder is 0700; other modes and owners are refused.
- Order of search: DIR/keys of --run DIR; ROLLMESH_KEYS (a folder, of which a process uses the file
  of its role, or a file) or keys inherited by this process; runs/NAME/keys of the newest run whose
  router has that address.
- There is no default secret; an address that other machines can reach is refused without keys. The
  transport is CurveZMQ (rfc.zeromq.org/spec/26).
"""

import enum
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rollmesh.core.addresses import is_loopback
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.secret_files import KEYS_VARIABLE as KEYS_VARIABLE
from rollmesh.core.secret_files import handed, make_secret_file, read_private
from rollmesh.core.share import fleet_keys

SCHEDULER_KEYS_VARIABLE = "ROLLMESH_SCHEDULER_KEYS"
"""Keys of a fleet's scheduler if they differ from those of the mesh; empty: none."""
MEMBERS = "members.json"
HUB = "hub"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Role(enum.StrEnum):
    """Role of a key's holder; members.py lists the messages of each role."""

    HUB = "hub"
    """The router or the scheduler; its key may send anything."""
    WORKER = "worker"
    CLIENT = "client"
    PUBLISHER = "publisher"
    """A client that also changes engines: a trainer, a coordinator."""
    OPERATOR = "operator"
    """CLI verbs, and launch."""
    NODE = "node"
    """The agent of a node of a scheduler's fleet."""


MAKEABLE = tuple(role for role in Role if role is not Role.HUB)
ONE_OF_EACH = tuple([(role.value, role) for role in MAKEABLE])
_ALSO_GOOD = {Role.CLIENT: (Role.PUBLISHER,)}
"""Other roles whose keys are accepted for a role, besides the hub's."""


class Member(msgspec.Struct, frozen=True):
    """The public part of a key file."""

    name: str
    role: Role
    public: str
    """Z85 text."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """A key file."""

    name: str
    role: Role
    public: str
    secret: str
    hub_public: str
    folder: str = ""
    """Folder of members.json; '' for a file that was copied without it. Not stored in the file."""

    @property
    def member(self) -> Member:
        """The public part."""
        return Member(self.name, self.role, self.public)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make `socket` a CURVE server with this pair."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    def sign(self, socket: "zmq.Socket[bytes]", server: str = "") -> None:
        """Make `socket` a CURVE client of the server with that public key (default: the hub)."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server or self.hub_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)


def new_keys(folder: Path, members: Iterable[tuple[str, Role]] = ONE_OF_EACH) -> Keys:
    """Create a key folder with these members and return the hub's keys.

    FileExistsError if a file or folder of that name exists; OSError if it cannot be created.
    """
    if folder.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    part.mkdir(mode=0o700)
    try:
        public, secret = _pair()
        hub = Keys(name=HUB, role=Role.HUB, public=public, secret=secret, hub_public=public)
        made = [hub, *(_member_keys(hub, name, role) for name, role in members)]
        for each in made:
            _write(part / f"{each.name}.json", encode_keys(each))
        _write(part / MEMBERS, msgspec.json.encode([each.member for each in made[1:]]))
        try:
            part.rename(folder)  # never replaces a folder that holds files
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "file exists", str(folder)) from None
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return msgspec.structs.replace(hub, folder=str(folder))


def add_member(folder: Path, role: Role, name: str) -> Path:
    """Create a member's pair and return the path of its key file; ConfigError if the name is
    taken."""
    if not _NAME.fullmatch(name) or name == "members":
        raise ConfigError(f"--name {name}: use letters, digits, '.', '_' and '-'")
    hub, path = read_key_file(folder / f"{HUB}.json"), folder / f"{name}.json"
    members = read_members(folder)
    if path.exists() or any(each.name == name for each in members):
        raise ConfigError(f"{path}: there is a key of that name; choose another by --name")
    keys = _member_keys(hub, name, role)
    make_secret_file(path, encode_keys(keys))
    _write_members(folder, [*members, keys.member])
    return path


def remove_member(folder: Path, name: str) -> None:
    """Revoke a member's key, so that hubs refuse it; ConfigError if there is none."""
    members = read_members(folder)
    if all(each.name != name for each in members):
        known = ", ".join(each.name for each in members) or "none"
        raise ConfigError(f"{folder}: no key is named {name!r}; there are: {known}")
    _write_members(folder, [each for each in members if each.name != name])
    (folder / f"{name}.json").unlink(missing_ok=True)


def read_members(folder: Path) -> list[Member]:
    """Return the members of a key folder; ConfigError if it is not one."""
    path = folder / MEMBERS
    try:
        return msgspec.json.decode(read_private(path), type=list[Member])
    except OSError as error:
        remedy = "not a key folder"
        if (folder / f"{HUB}.json").exists():
            remedy = (
                "without it the hub refuses every member: restore it, or move the folder away "
                "and make new keys by `rollmesh keys`"
            )
        raise ConfigError(f"{path}: {str(error.strerror).lower()}; {remedy}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a list of members: {error}") from None


def read_key_file(path: Path, role: Role | None = None) -> Keys:
    """Read the keys of a file, or of the file of `role` (default: the hub) in a folder.

    ConfigError in one line if it cannot be read, is not private, or has another role; or if `role`
    is the hub and its list of members cannot be read.
    """
    if path.is_dir():
        path = path / f"{role or HUB}.json"
    try:
        keys = decode_keys(read_private(path))
    except OSError as error:
        raise ConfigError(f"{path}: {str(error.strerror).lower()}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a key file: {error}") from None
    try:
        check_role(keys, role)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if role is Role.HUB:
        read_members(path.parent)
    folder = str(path.parent) if (path.parent / MEMBERS).is_file() else ""
    return msgspec.structs.replace(keys, folder=folder)


def check_role(keys: Keys, role: Role | None) -> Keys:
    """Return the keys; ConfigError if they are not accepted for `role`."""
    if role and keys.role not in (role, Role.HUB, *_ALSO_GOOD.get(role, ())):
        remedy = f"`rollmesh keys add {role}` makes one"
        if role is Role.HUB:
            remedy = f"name the folder of {HUB}.json"
        raise ConfigError(f"it is a key of role {keys.role}, and role {role} is needed; {remedy}")
    return keys


def decode_keys(raw: bytes | str) -> Keys:
    """Decode a key file's text; MsgspecError if it is malformed."""
    keys = msgspec.json.decode(raw, type=Keys)
    for text in (keys.public, keys.secret, keys.hub_public):
        if len(text) != 40 or not text.isascii():
            raise msgspec.ValidationError("a key is 40 characters of Z85")
    return msgspec.structs.replace(keys, folder="")


def read_keys(
    environment: Mapping[str, str] | Any = os.environ, role: Role | None = None
) -> Keys | None:
    """Return the inherited keys, or those of the file or folder in ROLLMESH_KEYS, or None; errors
    as in read_key_file."""
    text = handed(KEYS_VARIABLE) if environment is os.environ else None
    name = environment.get(KEYS_VARIABLE)
    try:
        if text is not None:
            return check_role(decode_keys(text), role)
        if not name:
            return None
        return read_key_file(Path(name), role)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{KEYS_VARIABLE}: not a key file: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{KEYS_VARIABLE}={error}") from None


def read_scheduler_keys(role: Role | None = None, token: Path | None = None) -> Keys | None:
    """Return the keys for a fleet's scheduler, or None.

    They are those of ROLLMESH_SCHEDULER_KEYS if set, else those of the mesh, else those that
    `fleet_keys` finds; `token` is the file of a pipeline's token.
    """
    name = os.environ.get(SCHEDULER_KEYS_VARIABLE)
    if name is not None:
        return read_keys({KEYS_VARIABLE: name}, role)
    if keys := read_keys(role=role):
        return keys
    folder = fleet_keys(token)
    return read_key_file(folder, role) if folder else None


def use_scheduler_keys(folder: Path | None) -> None:
    """Make this process and its children use the scheduler's keys in `folder`, unless the user has
    set some."""
    if folder and not os.environ.get(KEYS_VARIABLE):
        os.environ.setdefault(SCHEDULER_KEYS_VARIABLE, str(folder.absolute()))


def check_bind(bind: str, keys: Keys | None) -> None:
    """AddressError unless `bind` is loopback, a local socket, or there are keys."""
    if not keys and not _is_local(bind):
        raise AddressError(
            f"{bind}: others can reach it; set {KEYS_VARIABLE} to a key file or bind 127.0.0.1"
        )


def check_dial(address: str, keys: Keys | None) -> None:
    """AddressError if `address` is on another machine, which needs keys, and there are none."""
    if not keys and address.startswith("tcp://") and not _is_local(address):
        raise AddressError(
            f"{address}: connections to another machine need keys; "
            f"set {KEYS_VARIABLE} to the mesh's key file"
        )


def _is_local(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0]
    return scheme in ("ipc", "inproc") or (scheme == "tcp" and is_loopback(host))


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _member_keys(hub: Keys, name: str, role: Role) -> Keys:
    public, secret = _pair()
    return Keys(name=name, role=role, public=public, secret=secret, hub_public=hub.public)


def encode_keys(keys: Keys) -> bytes:
    """Return the content of a key file."""
    fields = msgspec.structs.asdict(keys)
    del fields["folder"]
    return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"


def _write(path: Path, raw: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(raw)


def _write_members(folder: Path, members: list[Member]) -> None:
    """Replace the list atomically: hubs may read it at any moment."""
    part = folder / f".{MEMBERS}.{secrets.token_hex(4)}"
    try:
        _write(part, msgspec.json.encode(members))
        part.replace(folder / MEMBERS)
    finally:
        part.unlink(missing_ok=True)


RUN_KEYS = "keys"
"""Name of the key folder in a run folder."""
RUNS = Path("runs")


class _Address(msgspec.Struct):
    address: str = ""


def find_keys(
    address: str,
    role: Role,
    run: Path | None = None,
    environment: Mapping[str, str] | Any = os.environ,
) -> Keys | None:
    """Return the keys for the router at `address`, or None for a mesh without keys.

    ConfigError for an unusable file; AddressError for another machine without keys.
    """
    if run is not None:
        return keys_of_run(run, role)
    keys = read_keys(environment, role)
    if keys is None and not environment.get(KEYS_VARIABLE):
        found = next((each for each in _runs() if address in _addresses(each)), None)
        keys = keys_of_run(found, role) if found else None
    check_dial(address, keys)
    return keys


def keys_of_run(run: Path, role: Role) -> Keys | None:
    """Return the keys of a role in a run folder; None if the run has none."""
    folder = run / RUN_KEYS
    if not run.is_dir():
        raise ConfigError(
            f"--run {run}: no such run folder; name a run's folder, such as {RUNS / 'mesh'}"
        )
    return read_key_file(folder, role) if has_keys(run) else None


def has_keys(run: Path) -> bool:
    """Whether a run folder has keys."""
    return (run / RUN_KEYS).is_dir()


def _runs() -> Iterator[Path]:
    """Yield the run folders under runs/, including meshes of evaluations, newest first."""
    found = [*RUNS.glob("*/addresses.json"), *RUNS.glob("*/*/addresses.json")]
    for path in sorted(found, key=_modified_s, reverse=True):
        yield path.parent


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _addresses(run: Path) -> set[str]:
    try:
        listed = msgspec.json.decode(
            (run / "addresses.json").read_bytes(), type=dict[str, _Address]
        )
    except (OSError, msgspec.MsgspecError):
        return set()
    return {each.address for each in listed.values()} - {""}
