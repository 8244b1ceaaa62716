"""Who may dial whom: loopback needs nothing, everything else needs CURVE keys.

One key file per mesh (0600, made by `new_keys`) holds the hub's key pair and the dialers' key pair.
A hub accepts only the dialers' public key; dialers accept only the hub's. Invariants: there is no
default secret, and an address that other machines can reach is refused without keys. The transport
is CurveZMQ (rfc.zeromq.org/spec/26). Driven by sockets.py; the file's path comes from the
environment variable ROLLMESH_KEYS.
"""

import functools
import os
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.handed import KEYS_VARIABLE as KEYS_VARIABLE
from rollmesh.core.handed import handed, read_key_file
from rollmesh.core.loopback import is_loopback
from rollmesh.core.secret_file import make_secret_file


class Keys(msgspec.Struct, frozen=True):
    """Z85 texts of both pairs."""

    hub_public: str
    hub_secret: str
    dialer_public: str
    dialer_secret: str

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make `socket` a CURVE server that lets only our dialers in."""
        _gate().public_keys.add(self.dialer_public.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.hub_secret)

    def sign(self, socket: "zmq.Socket[bytes]") -> None:
        """Make `socket` a CURVE client of our hub."""
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self.hub_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self.dialer_public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.dialer_secret)


class _Gate:
    """What pyzmq's authenticator asks for each connection."""

    def __init__(self) -> None:
        self.public_keys: set[bytes] = set()

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self.public_keys


@functools.cache
def _gate() -> _Gate:
    # One ZAP handler serves a zmq context, so there is one gate for all hubs of the process.
    gate = _Gate()
    authenticator = ThreadAuthenticator(zmq.Context.instance())
    authenticator.start()
    authenticator.configure_curve_callback("*", gate)
    return gate


def new_keys(path: Path) -> Keys:
    """Write fresh keys to `path`, readable by its owner only; FileExistsError if it is there."""
    hub_public, hub_secret = zmq.curve_keypair()
    dialer_public, dialer_secret = zmq.curve_keypair()
    keys = Keys(
        hub_public.decode(), hub_secret.decode(), dialer_public.decode(), dialer_secret.decode()
    )
    make_secret_file(path, msgspec.json.encode(keys))
    return keys


def read_keys(environment: dict[str, str] | Any = os.environ) -> Keys | None:
    """The keys that were handed over, or those of the file that ROLLMESH_KEYS names, or None.

    ConfigError if the file is open to others.
    """
    raw = handed(KEYS_VARIABLE) if environment is os.environ else None
    name = environment.get(KEYS_VARIABLE)
    if raw is None:
        if not name:
            return None
        raw = read_key_file(name)
    try:
        return msgspec.json.decode(raw, type=Keys)
    except msgspec.MsgspecError as error:
        source = f"{KEYS_VARIABLE}={name}" if name else KEYS_VARIABLE
        raise ConfigError(f"{source}: not a key file: {error}") from None


def check_bind(bind: str, keys: Keys | None) -> None:
    """AddressError unless `bind` is loopback, a local socket, or there are keys."""
    if not keys and not _is_local(bind):
        raise AddressError(
            f"{bind}: others can reach it; set {KEYS_VARIABLE} to a key file or bind 127.0.0.1"
        )


def check_dial(address: str, keys: Keys | None) -> None:
    """AddressError if who listens at `address` is bound to ask for keys, and there are none."""
    if not keys and address.startswith("tcp://") and not _is_local(address):
        raise AddressError(
            f"{address}: another machine lets in nobody without keys; "
            f"set {KEYS_VARIABLE} to the mesh's key file"
        )


def _is_local(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0]
    return scheme in ("ipc", "inproc") or (scheme == "tcp" and is_loopback(host))


def check_told(address: str) -> None:
    """AddressError if `address` is bound and then told to peers, who could not dial it."""
    if address.startswith(("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")):
        raise AddressError(
            f"{address}: peers are told it and cannot dial it; "
            "name this machine's own address, or an interface, such as tcp://eth0:5556"
        )
