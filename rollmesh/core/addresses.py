"""Addresses: which are accepted, which are loopback, and which peers are given.

- A host is parsed as an address, never compared by its prefix: anyone can register the name
  `127.0.0.1.example.org`.
- A listener on all interfaces is never advertised as such: peers are given network.advertise or
  this machine's address on the route to them.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import psutil


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


WILDCARDS = ("0.0.0.0", "::", "*", "")
_OUTSIDE = "192.0.2.1"
"""An address of the documentation's network (RFC 5737), for which routers take the default route;
nothing is sent there."""
_ANY_PORT = 9


def is_wildcard(host: str) -> bool:
    """Return whether a listener at `host` listens on all interfaces."""
    return host.strip("[]") in WILDCARDS


def split_address(address: str) -> tuple[str, str]:
    """Return host, without brackets, and port of `scheme://host:port` or `host:port`; '' for a part
    that is missing.
    """
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    return host.strip("[]"), port


def with_host(address: str, host: str) -> str:
    """Return `scheme://host:port` with another host."""
    scheme, mark, _ = address.rpartition("://")
    host = host.strip("[]")
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}{mark}{shown}:{split_address(address)[1]}"


def address_towards(peer: str, port: int = _ANY_PORT) -> str:
    """Return this machine's address on the route to `peer`, without sending anything; '' if there
    is no route or no such host.
    """
    try:
        found = socket.getaddrinfo(peer.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError, OverflowError):
        return ""


def own_address() -> str:
    """Return the address of this machine on its default route, else that of an interface that is
    up, else loopback.
    """
    routed = address_towards(_OUTSIDE)
    if routed and not is_loopback(routed):
        return routed
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for each in addresses:
            is_usable = name in up and each.family == socket.AF_INET
            if is_usable and not is_loopback(each.address):
                return str(each.address)
    return "127.0.0.1"


def advertised(bound: str, chosen: str = "", peer: str = "") -> str:
    """Return the address that peers are given for a listener bound at `bound`.

    - `chosen` is a setting: a whole address, such as router.advertise, or a host
      (network.advertise), which does not concern a listener on loopback.
    - Without it, a listener on all interfaces gets this machine's address on the route to the host
      of `peer`, or on the default route if there is no peer or it is on this machine.
    """
    if "://" in chosen:
        return chosen
    bound_host = split_address(bound)[0]
    if is_loopback(bound_host):
        return bound
    if chosen:
        return with_host(bound, chosen)
    if not is_wildcard(bound_host):
        return bound
    routed = address_towards(split_address(peer)[0]) if peer else ""
    return with_host(bound, own_address() if not routed or is_loopback(routed) else routed)


def facing(address: str, known: str) -> str:
    """Return `address` with the host of `known` if its own is a wildcard."""
    if not is_wildcard(split_address(address)[0]):
        return address
    return with_host(address, split_address(known)[0])


def why_not_advertised(host: str) -> str:
    """Return why peers cannot be given `host`; '' for a host name or an IP address."""
    if is_wildcard(host):
        return f"{host}: peers cannot connect to it; name this machine's own host name or address"
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host):
            return f"{host}: not a host name or an IP address; leave out scheme and port"
    return ""


def why_not_dialable(address: str) -> str:
    """Return why peers cannot be given `address`; '' for `tcp://HOST:PORT`."""
    host, port = split_address(address)
    if not address.startswith("tcp://") or not port.isdecimal() or not 0 < int(port) < 65536:
        return f"{address}: write tcp://HOST:PORT, as peers reach it"
    return why_not_advertised(host)


HOST_MARK, PORT_MARK = "{host}", "{port}"


def why_no_public_url(template: str) -> str:
    """Return why agents cannot be given `template`; '' if it is `http(s)://HOST[:PORT][/PATH]`,
    in which {host} and {port} may be written.
    """
    url = template.replace(HOST_MARK, "host").replace(PORT_MARK, "1")
    if marks := re.findall(r"\{[^}]*\}?|\}", url):
        return f"{template}: {marks[0]} is unknown; write {HOST_MARK} and {PORT_MARK}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"{template}: not an address: {error}"
    is_plain = url.isascii() and url.isprintable() and not set(url) & set(' \\"<>')
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        return f"{template}: not an address; write http(s)://HOST[:PORT][/PATH]"
    if is_wildcard(parts.hostname):
        return f"{template}: agents cannot connect to {parts.hostname}; write {HOST_MARK}"
    if "?" in url or "#" in url or "@" in parts.netloc:
        return f"{template}: leave out user, query and fragment"
    if parts.path.rstrip("/").endswith("/v1"):
        return f"{template}: leave out /v1, which is added"
    return ""


def public_url(template: str, address: str) -> str:
    """Return the base URL for agents on other machines: `template` with the host and port of
    `address`, or `address` itself if the template is empty.
    """
    if not template:
        return address
    host, port = split_address(address)
    shown = f"[{host}]" if ":" in host else host
    return template.replace(HOST_MARK, shown).replace(PORT_MARK, port).rstrip("/")
