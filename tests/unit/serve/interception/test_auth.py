"""Where secrets are found."""

import pytest

from rollmesh.serve.interception.auth import find_secret


@pytest.mark.parametrize(
    ("path", "headers", "secret"),
    [
        ("/v1/chat/completions", {"Authorization": "Bearer k"}, "k"),
        ("/v1/chat/completions", {"Authorization": "bearer k "}, "k"),
        ("/v1/chat/completions", {"x-api-key": "k"}, "k"),
        ("/v1/chat/completions", {"Authorization": "Basic k", "x-api-key": "x"}, "x"),
        ("/s/p/v1/chat/completions", {"Authorization": "Bearer sk-unused"}, "p"),
        ("/prefix/s/p/chat/completions", {}, "p"),
        ("/v1/chat/completions", {}, ""),
        ("/v1/s/p", {"x-api-key": "k"}, "k"),
    ],
)
def test_a_secret_is_found(path: str, headers: dict[str, str], secret: str) -> None:
    assert find_secret(path, headers) == secret
