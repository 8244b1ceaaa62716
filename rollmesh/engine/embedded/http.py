"""JSON bodies and replies of routes, and the guard that refuses requests.

- A malformed body is refused in one line, as a 400.
- With an API key all paths need it but those that begin with /health, as in SGLang.
- Requests sent by a web page are refused: the engine serves no pages.
- On loopback the Host must be a loopback name, so that a foreign site's name that resolves to
  127.0.0.1 reads nothing.
"""

import hmac
import ipaddress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import orjson
from aiohttp import web

from rollmesh.core.addresses import is_allowed_host
from rollmesh.core.errors import DECODE_ERRORS, AddressError, EngineRefused

Body = TypeVar("Body")


def reply(value: Any, status: int = 200) -> web.Response:
    """Return a JSON reply."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def success_reply(message: str, failure: str = "", **more: Any) -> web.Response:
    """Return SGLang's report of success; 400 with the reason after a failure."""
    result = {"success": not failure, "message": failure or message, **more}
    return reply(result, 400 if failure else 200)


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body as `kind`; EngineRefused in one line if it is malformed."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise EngineRefused(f"bad request: {error}") from None


OPEN_PREFIX = "/health"
"""Prefix of paths that health checks request without a key."""
LOOPBACK = ("localhost", "127.0.0.0/8", "::1")


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """The access rules of one engine."""

    api_key: str = ""
    is_loopback: bool = True
    """Whether it listens on loopback only."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts or networks, besides loopback, at which it may join a weight group."""

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Return the reply to a refused request; None if it is accepted."""
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
    """Whether a socket bound to this address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_open(host: str, api_key: str, *, is_open: bool) -> None:
    """AddressError if other machines can reach the engine without a key, unless `is_open` allows
    it."""
    if not (api_key or is_open or is_loopback(host)):
        raise AddressError(
            f"{host}: others can reach it; give --api-key-file or ROLLMESH_ENGINE_KEY_FILE, bind "
            "127.0.0.1, or give --no-api-key on a network of its own"
        )


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
