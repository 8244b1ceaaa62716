"""Loopback is an address that was parsed, not a prefix."""

import pytest

from rollmesh.core.loopback import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_addresses_and_localhost_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "127.evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost@10.0.0.1",
        "127.0.0.1:0;10.0.0.1",
        "[::1",
        "::1.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "*",
        "",
    ],
)
def test_names_that_begin_like_loopback_are_not(host: str) -> None:
    assert not is_loopback(host)
