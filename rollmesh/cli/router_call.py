"""Requests of the command line to a router, by either of its addresses.

tcp://host:port    the router address, which workers and clients dial
http://host:port   the status address
"""

import time
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from rollmesh.core.errors import AddressError
from rollmesh.core.ids import new_id
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.dashboard.rows import RouterRow
from rollmesh.wire.frames import Packet
from rollmesh.wire.key_search import find_keys
from rollmesh.wire.keys import Role
from rollmesh.wire.messages import AddressesAnswered, AskAddresses, AskDrain, DrainAnswered
from rollmesh.wire.sockets import Dialer, check_admitted, wait

ANSWER_S = 3.0
REPEAT_S = 0.5
WILDCARD_HOSTS = ("0.0.0.0", "[::]", "*")

Answer = TypeVar("Answer", AddressesAnswered, DrainAnswered)


def check_router(address: str) -> None:
    """AddressError if it is neither a router address nor a status address."""
    if not address.startswith(("tcp://", "http://", "https://")):
        raise AddressError(
            f"--router {address}: name an address of the router, tcp://HOST:PORT or "
            "http://HOST:PORT; `rollmesh status` prints both"
        )


def status_of(address: str, run: Path | None = None) -> RouterRow:
    """Return the report of the router at either address; AddressError, one line, without one."""
    check_router(address)
    if address.startswith("tcp://"):
        answer = ask(address, AskAddresses(1), AddressesAnswered, run)
        return _get(facing(answer.status_url, address), asked=address)
    return _get(address.rstrip("/"), asked=address)


def router_address(address: str) -> str:
    """The tcp:// address of the router at either address."""
    check_router(address)
    if address.startswith("tcp://"):
        return address
    if found := status_of(address).address:
        return facing(found, address)
    raise AddressError(f"--router {address}: does not report its tcp:// address; name that")


def facing(address: str, known: str) -> str:
    """`address` with the host of `known` where its own is a wildcard."""
    parts, host = urlsplit(address), urlsplit(known).hostname or ""
    if parts.netloc.rpartition(":")[0] not in WILDCARD_HOSTS:
        return address
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def ask(
    router: str,
    message: AskAddresses | AskDrain,
    kind: type[Answer],
    run: Path | None = None,
) -> Answer:
    """The router's answer, of type `kind`; AddressError if there is none in time.

    `run` is the run folder whose keys it takes; see find_keys.
    """
    keys = find_keys(router, Role.OPERATOR, run)
    check_admitted(router, keys)
    dialer = Dialer(router, new_id("verb"), keys)
    try:
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            dialer.send(Packet(message))
            wait([dialer], None, REPEAT_S)
            for packet in dialer.receive():
                if isinstance(packet.message, kind):
                    return packet.message
    finally:
        dialer.close()
    raise AddressError(
        f"{router}: no router answers there within {ANSWER_S:g} s; "
        "are its address and our keys right?"
    )


def _get(url: str, asked: str) -> RouterRow:
    where = f"--router {asked}" if url == asked.rstrip("/") else f"--router {asked} ({url})"
    token = admin_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.get(f"{url}/status", headers=headers, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AddressError(f"{where}: does not answer: {error}") from None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise AddressError(f"{where}: asks for a token; set {ADMIN_TOKEN_VARIABLE}")
    try:
        router = msgspec.json.decode(reply.content, type=RouterRow)
    except msgspec.MsgspecError:
        router = None
    if reply.status_code != httpx.codes.OK or router is None:
        raise AddressError(f"{where}: is no router: {reply.status_code}")
    return router
