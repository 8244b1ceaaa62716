"""GET /tensors/{id}: one shard's bytes for whoever debugs, over HTTP, at the owner's own address.

    curl -H "Authorization: Bearer $ROLLMESH_ADMIN_TOKEN" http://10.0.0.4:7000/tensors/0x2a00000001

A consumer's first four bytes are a length that no header has if they are read as "GET ", so one
port serves both and a rank needs no HTTP server. Invariant: who does not show the admin token gets
401, also on loopback, and where there is none set, everybody; one request, one answer, and the
connection ends. Ranks never come here. Driven by guest.py.
"""

import hmac
import math
from http import HTTPStatus
from typing import Final

from rollmesh.core.errors import ShardMissing
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.tensors.line import Line
from rollmesh.tensors.store import OwnerStore

BEGINNING: Final = b"GET "
MAX_REQUEST_BYTES: Final = 8192
_PATH = "/tensors/"


def shows_token(request: bytes, token: str) -> bool:
    """Whether a whole request carries the token."""
    return _shows(token, request.decode("latin-1").split("\r\n")[1:])


def refused_page() -> bytes:
    """The answer to a request without the token."""
    why = f"send the token of {ADMIN_TOKEN_VARIABLE} as Bearer; the owner needs it set too"
    text = f"{why}\n".encode()
    return _head(HTTPStatus.UNAUTHORIZED, "text/plain", len(text)) + text


def answer_page(line: Line, store: OwnerStore, token: str) -> None:
    """Read one request and answer it; OSError where the other end is gone."""
    request = line.receive_until(b"\r\n\r\n", MAX_REQUEST_BYTES).decode("latin-1")
    line.allow(math.inf)
    path, *headers = request.split("\r\n")
    path = path.removeprefix(BEGINNING.decode()).partition(" ")[0]
    if not _shows(token, headers):
        line.send(refused_page())
        return
    shard_id = _id_in(path)
    if shard_id is None:
        _say(line, HTTPStatus.NOT_FOUND, f"there is {_PATH}ID here, decimal or 0x..., and no more")
        return
    try:
        content = store.read(shard_id)
    except ShardMissing as error:
        _say(line, HTTPStatus.NOT_FOUND, str(error))
        return
    shape = ",".join(map(str, content.shape))
    told = f"X-Rollmesh-Dtype: {content.dtype}\r\nX-Rollmesh-Shape: {shape}\r\n"
    head = _head(HTTPStatus.OK, "application/octet-stream", content.data.nbytes, told)
    line.send(head, [content.data.data])


def _shows(token: str, headers: list[str]) -> bool:
    for header in headers:
        name, _, value = header.partition(":")
        if name.lower() == "authorization":
            said = value.strip().removeprefix("Bearer ")
            return bool(token) and hmac.compare_digest(said.encode("latin-1"), token.encode())
    return False


def _id_in(path: str) -> int | None:
    try:
        shard_id = int(path.removeprefix(_PATH), 0)
    except ValueError:
        return None
    return shard_id if path.startswith(_PATH) and 0 <= shard_id < 1 << 64 else None


def _say(line: Line, status: HTTPStatus, why: str) -> None:
    text = f"{why}\n".encode()
    line.send(_head(status, "text/plain", len(text)) + text)


def _head(status: HTTPStatus, kind: str, num_bytes: int, more: str = "") -> bytes:
    first = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    about = f"Content-Type: {kind}\r\nContent-Length: {num_bytes}\r\nConnection: close\r\n"
    return f"{first}{about}{more}\r\n".encode()
