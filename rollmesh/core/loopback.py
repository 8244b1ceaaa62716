"""Whether an address can be reached from this machine alone.

The host is parsed as an address, never compared by its prefix: `127.0.0.1.example.org` is a name
that anybody can register.
"""

import ipaddress

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
