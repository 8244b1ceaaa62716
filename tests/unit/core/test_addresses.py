"""Engine URLs, host lists and loopback addresses are parsed, never compared as text."""

import pytest

from rollmesh.core.addresses import (
    is_allowed_url,
    is_loopback,
    why_no_engine_url,
    why_no_host_entry,
)
from rollmesh.core.config import load_config
from rollmesh.core.errors import ConfigError


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:1", "http://10.0.0.1:30000/", "http://[::1]:3", "http://a-b.c:1"]
)
def test_scheme_host_and_port_are_a_url(url: str) -> None:
    assert not why_no_engine_url(url)


@pytest.mark.parametrize(
    "url", ["", "h:1", "http://", "http://h/x", "http://h?", "http://h#", "http://@h", "http://h:x"]
)
def test_other_text_is_no_engine_url(url: str) -> None:
    assert why_no_engine_url(url)
    with pytest.raises(ConfigError, match="urls"):
        load_config(None, [f'engine.urls=["{url}"]'])


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("http://10.1.2.3:1", True),
        ("http://10.2.0.1:1", False),
        ("http://gpu-1:1", True),
        ("http://GPU-1.:1", True),
        ("http://gpu-1.evil.example:1", False),
        ("http://[fd00::5]:1", True),
        ("http://127.0.0.1:1", False),
        ("http://localhost:1", False),
    ],
)
def test_hosts_are_names_addresses_or_networks(url: str, is_allowed: bool) -> None:
    entries = ("10.1.0.0/16", "gpu-1", "fd00::/8")
    assert is_allowed_url(url, entries) == is_allowed


def test_an_entry_that_is_no_host_is_refused_in_one_line() -> None:
    assert why_no_host_entry("10.0.0.0/99")
    with pytest.raises(ConfigError, match="allow_hosts"):
        load_config(None, ['engine.allow_hosts=["10.0.0.1/8/"]'])


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
def test_names_that_begin_like_loopback_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)
