"""Where secrets are found."""

import pytest

from rollmesh.serve.interception.auth import find_secret


@pytest.mark.parametrize(
    ("path", "headers", "secret"),
    [
        ("/v1/chat/completions", {b"authorization": b"Bearer k"}, "k"),
        ("/v1/chat/completions", {b"authorization": b"bearer k "}, "k"),
        ("/v1/chat/completions", {b"x-api-key": b"k"}, "k"),
        ("/v1/chat/completions", {b"authorization": b"Basic k", b"x-api-key": b"x"}, "x"),
        ("/s/p/v1/chat/completions", {b"authorization": b"Bearer sk-unused"}, "p"),
        ("/prefix/s/p/chat/completions", {}, "p"),
        ("/v1/chat/completions", {}, ""),
        ("/v1/s/p", {b"x-api-key": b"k"}, "k"),
    ],
)
def test_a_secret_is_found(path: str, headers: dict[bytes, bytes], secret: str) -> None:
    assert find_secret(path, headers) == secret
