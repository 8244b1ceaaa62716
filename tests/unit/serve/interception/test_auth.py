"""Where secrets are found, and who has the admin's token."""

import pytest

from rollmesh.serve.interception.auth import bears, find_secret


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


@pytest.mark.parametrize(
    ("token", "said", "is_good"),
    [
        (b"k", b"Bearer k", True),
        (b"k", b"bearer  k ", True),
        (b"k", b"Basic k", False),
        (b"k", b"k", False),
        (b"k", b"Bearer kk", False),
        (b"k", b"", False),
        (b"", b"Bearer ", False),
        (b"k", b"Bearer \xff", False),
    ],
)
def test_the_token_is_a_bearer_and_an_empty_one_is_nobodys(
    token: bytes, said: bytes, is_good: bool
) -> None:
    assert bears(token, {b"authorization": said}) == is_good
    assert not bears(token, {b"x-api-key": token})
