"""Engine URLs, host lists and loopback addresses are parsed, never compared as text."""

import socket

import pytest

from rollmesh.core.addresses import (
    address_towards,
    advertised,
    is_allowed_url,
    is_loopback,
    own_address,
    public_url,
    split_address,
    why_no_engine_url,
    why_no_host_entry,
    why_no_public_url,
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


@pytest.mark.parametrize(
    ("bound", "chosen", "expected"),
    [
        ("tcp://127.0.0.1:5", "gpu-1", "tcp://127.0.0.1:5"),
        ("tcp://10.0.0.1:5", "", "tcp://10.0.0.1:5"),
        ("tcp://10.0.0.1:5", "gpu-1", "tcp://gpu-1:5"),
        ("tcp://0.0.0.0:5", "fd00::5", "tcp://[fd00::5]:5"),
        ("http://[::]:5", "gpu-1", "http://gpu-1:5"),
        ("tcp://127.0.0.1:5", "tcp://nat.example:7", "tcp://nat.example:7"),
    ],
)
def test_peers_are_given_the_chosen_host_unless_only_loopback_listens(
    bound: str, chosen: str, expected: str
) -> None:
    assert advertised(bound, chosen) == expected


@pytest.mark.parametrize("bound", ["tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://*:5"])
@pytest.mark.parametrize("peer", ["", "tcp://127.0.0.1:9", "tcp://no such host:9"])
def test_a_listener_on_all_interfaces_is_advertised_by_an_address_of_this_machine(
    bound: str, peer: str
) -> None:
    host, port = split_address(advertised(bound, "", peer))
    assert (host, port) == (own_address(), "5")
    with socket.create_server((host, 0)):
        pass  # it is an address of this machine


def test_the_address_towards_a_peer_is_that_of_its_route() -> None:
    assert address_towards("127.0.0.1") == address_towards("localhost") == "127.0.0.1"
    assert address_towards("no such host") == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "tcp://h:1", "h:1", "a b", "h/x"])
def test_a_host_that_peers_cannot_be_given_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"network\.advertise|advertise: "):
        load_config(None, [f'network.advertise="{host}"'])


@pytest.mark.parametrize("address", ["h:1", "tcp://h", "tcp://0.0.0.0:1", "tcp://h:0", "tcp://h:x"])
@pytest.mark.parametrize("section", ["router", "trainer"])
def test_an_address_that_peers_cannot_be_given_is_refused(section: str, address: str) -> None:
    with pytest.raises(ConfigError, match="advertise: "):
        load_config(None, [f'{section}.advertise="{address}"'])


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("", "http://10.0.0.5:8100"),
        ("http://{host}:{port}", "http://10.0.0.5:8100"),
        ("https://agents.example/w/{host}/{port}/", "https://agents.example/w/10.0.0.5/8100"),
        ("http://host.docker.internal:{port}", "http://host.docker.internal:8100"),
    ],
)
def test_agents_are_given_the_public_url(template: str, url: str) -> None:
    assert not template or not why_no_public_url(template)
    assert public_url(template, "http://10.0.0.5:8100") == url


@pytest.mark.parametrize(
    "template",
    [
        "{host}:{port}",
        "ftp://{host}",
        "http://{ip}:1",
        "http://{host}:{port",
        "http://:1",
        "http://{host}:{port}/v1",
        "http://0.0.0.0:{port}",
        "http://user@{host}",
        "http://{host}?a=1",
        "http://{host}:x",
        "http://{host} x",
    ],
)
def test_a_public_url_that_agents_cannot_use_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="public_url: "):
        load_config(None, [f'interception.public_url="{template}"'])
