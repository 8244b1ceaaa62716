"""The debugging page shows a shard's bytes only with the admin token."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.tensors import acceptor
from rollmesh.tensors.acceptor import MAX_REQUEST_BYTES
from rollmesh.tensors.handles import Content
from tests.unit.tensors.owners import PATIENCE_S, Owned, content_of, owned, soon

TOKEN = "a-token-for-tests"


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owned]:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, TOKEN)
    with owned() as owner:
        yield owner


def get(
    owner: Owned, path: str, token: str | None = TOKEN, scheme: str = "Bearer "
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Status, body and headers."""
    parts = urlsplit(owner.address)
    headers = {} if token is None else {"Authorization": f"{scheme}{token}"}
    with closing(http.client.HTTPConnection(parts.netloc, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


@pytest.mark.parametrize("form", [str, hex])
@pytest.mark.parametrize("size", [0, 5, 2**21])
def test_a_shard_is_shown(owner: Owned, form: type[str], size: int) -> None:
    data = content_of(0, size).data
    (handle,) = owner.store.put([Content("float8_e5m2", (size, 1), data)])
    status, body, headers = get(owner, f"/tensors/{form(handle.shard_id)}")
    assert (status, body) == (200, bytes(data))
    assert headers["X-Rollmesh-Dtype"] == "float8_e5m2"
    assert headers["X-Rollmesh-Shape"] == f"{size},1"
    assert headers["Content-Length"] == str(size)


@pytest.mark.parametrize(
    ("token", "scheme"),
    [(None, ""), ("", "Bearer "), ("other", "Bearer "), (TOKEN[:-1], "Bearer "), (TOKEN, "Basic ")],
)
def test_a_request_without_the_token_is_shown_nothing(
    owner: Owned, token: str | None, scheme: str
) -> None:
    (handle,) = owner.put([5])
    for path in (f"/tensors/{handle.shard_id}", "/tensors/1", "/"):
        status, body, _ = get(owner, path, token, scheme)
        assert status == 401
        assert ADMIN_TOKEN_VARIABLE.encode() in body


def test_without_a_token_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE, raising=False)
    with owned() as owner:
        (handle,) = owner.put([5])
        for token in (None, "", TOKEN):
            assert get(owner, f"/tensors/{handle.shard_id}", token)[0] == 401
        assert get(owner, f"/tensors/{handle.shard_id}", "", scheme="")[0] == 401


@pytest.mark.parametrize(
    "path", ["/", "/tensors", "/tensors/", "/tensors/x", "/tensors/-1", f"/tensors/{2**64}", "/x/1"]
)
def test_what_is_no_shard_is_not_found(owner: Owned, path: str) -> None:
    assert get(owner, path)[0] == 404


def test_a_cleared_shard_is_reported_as_cleared(owner: Owned) -> None:
    (handle,) = owner.put([5])
    owner.store.clear([handle.shard_id])
    status, body, _ = get(owner, f"/tensors/{handle.shard_id}")
    assert status == 404
    assert b"cleared" in body


def test_a_client_that_drips_its_request_is_disconnected(
    owner: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.1)
    host, _, port = urlsplit(owner.address).netloc.partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as dripping:
        dripping.sendall(b"GET ")
        dripping.settimeout(0.02)

        def is_hung_up() -> bool:
            try:
                dripping.sendall(b"x")
                return not dripping.recv(1)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        soon(is_hung_up)
    soon(lambda: owner.num_guests() == 0)
    assert get(owner, "/")[0] == 404, "others are still served"


def test_a_request_without_end_is_hung_up_on(owner: Owned) -> None:
    with pytest.raises((http.client.HTTPException, OSError)):
        get(owner, "/tensors/" + "9" * MAX_REQUEST_BYTES)
    soon(lambda: owner.num_guests() == 0)
