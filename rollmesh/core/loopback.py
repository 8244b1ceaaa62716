"""Whether an address can be reached from this machine alone.

The host is parsed as an address, never compared by its prefix: `127.0.0.1.example.org` is a name
that any person can register.
"""

import ipaddress
from collections.abc import Sequence

LOCALHOST = "localhost"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, in brackets or not, or `localhost`."""
    if host.lower() == LOCALHOST:
        return True
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(hosts: Sequence[str]) -> bool:
    """Whether the Host headers of a request are one, and name this machine's loopback.

    A web page can have a name of its own resolve to 127.0.0.1 (DNS rebinding). The browser then
    sends that name, so an endpoint without a token answers to loopback names only.
    """
    if len(hosts) != 1:
        return False
    name, mark, port = hosts[0].rpartition(":")
    return is_loopback(name if mark and port.isdecimal() else hosts[0])
