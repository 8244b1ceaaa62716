"""Which requests the engine's HTTP face takes: by API key, Host, Origin and Sec-Fetch-Site.

- With a key every path needs it but those that begin with /health, as at SGLang.
- Requests that a web page sent are refused: the engine serves no pages.
- On loopback the Host must be a loopback name, so that a name of a foreign site that resolves to
  127.0.0.1 reads nothing.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from rollmesh.core.addresses import is_allowed_host
from rollmesh.core.errors import AddressError
from rollmesh.engine.embedded.replies import reply

OPEN_PREFIX = "/health"
"""Paths that health checks ask for without a key."""
LOOPBACK = ("localhost", "127.0.0.0/8", "::1")


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one engine."""

    api_key: str = ""
    is_loopback: bool = True
    """Whether it listens on loopback only."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts or networks, beside loopback, at which it may join a weight group."""

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The reply to a request that is not taken; None for one that is."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            return reply({"error": "exactly one Host header is needed"}, 400)
        if self.is_loopback and not is_allowed_host(_name_of(hosts[0]), LOOPBACK):
            return reply({"error": "the Host is not a loopback name"}, 403)
        site = request.headers.get("Sec-Fetch-Site", "none")
        if "Origin" in request.headers or site != "none":
            return reply({"error": "requests of web pages are refused"}, 403)
        if self.api_key and not request.path.startswith(OPEN_PREFIX):
            given = request.headers.get("Authorization", "")
            scheme, _, key = given.partition(" ")
            raw, own = key.encode("utf-8", "surrogateescape"), self.api_key.encode()
            if scheme.lower() != "bearer" or not hmac.compare_digest(raw, own):
                return reply({"error": "Unauthorized"}, 401)
        return None

    def may_join(self, host: str) -> bool:
        """Whether the engine may join a weight group whose store is at `host`."""
        return is_allowed_host(host, (*LOOPBACK, *self.allow_hosts))


def is_loopback(host: str) -> bool:
    """Whether a socket that is bound to this address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_open(host: str, api_key: str, *, is_open: bool) -> None:
    """AddressError where others reach the engine, there is no key, and `is_open` does not say that
    this is wanted."""
    if not (api_key or is_open or is_loopback(host)):
        raise AddressError(
            f"{host}: others can reach it; give --api-key-file or ROLLMESH_ENGINE_KEY_FILE, bind "
            "127.0.0.1, or say --no-api-key on a network of its own"
        )


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
