"""Addresses: which engine URLs are accepted, which hosts may join, and what is loopback.

A host is parsed as an address, never compared by its prefix: anyone can register the name
`127.0.0.1.example.org`.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit


def why_no_engine_url(url: str) -> str:
    """Return why `url` is not an engine's address; '' if it is `http(s)://host[:port]`."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "not an http:// or https:// URL"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "not an http:// or https:// URL with a host"
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(' \\"<>')
    has_more = parts.path not in ("", "/") or "?" in url or "#" in url or "@" in parts.netloc
    if has_more or not is_plain:
        return "an engine's URL is scheme, host and port only, such as http://10.0.0.5:30000"
    return ""


def why_no_host_entry(entry: str) -> str:
    """Return why `entry` cannot be in a list of hosts; '' for a host name, an IP address or a
    CIDR.
    """
    if "/" in entry:
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            return f"{entry!r}: {error}"
        return ""
    is_name = entry and entry.isascii() and not set(entry) & set(" @?#")
    return "" if is_name else f"{entry!r}: not a host name, an IP address or a CIDR"


def is_allowed_host(host: str, entries: Iterable[str]) -> bool:
    """Return whether `host` is one of `entries` or its address is in one of their networks.

    Names are compared as written and never resolved, so that a DNS answer cannot admit a host.
    """
    host = host.strip("[]").lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return any(host == entry.lower().rstrip(".") for entry in entries)
    return any(_holds(entry.strip("[]"), address) for entry in entries)


def is_allowed_url(url: str, entries: Iterable[str]) -> bool:
    """Return whether the host of `url` is allowed; see `is_allowed_host`."""
    return is_allowed_host(urlsplit(url).hostname or "", entries)


def _holds(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        return False
    return address.version == network.version and address in network


LOCALHOST = "localhost"


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, with or without brackets, or `localhost`."""
    if host.lower() == LOCALHOST:
        return True
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(hosts: Sequence[str]) -> bool:
    """Return whether a request has one Host header, and it names this machine's loopback.

    A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). The browser then sends
    that name, so an endpoint without a token answers to loopback names only.
    """
    if len(hosts) != 1:
        return False
    name, mark, port = hosts[0].rpartition(":")
    return is_loopback(name if mark and port.isdecimal() else hosts[0])
