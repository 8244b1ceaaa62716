"""The gateway's routes for who runs it: sessions, rewards, health and figures.

    POST   /admin/sessions                {"metadata", "sampling", "seed"} -> keys and addresses
    GET    /admin/sessions                all of them, briefly
    GET    /admin/sessions/ID             how it stands
    POST   /admin/sessions/ID/reward      {"reward", "node"}
    POST   /admin/sessions/ID/finish      {"outcome"} -> samples, messages, forks
    DELETE /admin/sessions/ID
    GET    /healthz  (no token)    GET /metrics

Invariants: all but /healthz need the admin token as a Bearer, compared in constant time; a wrong
body is refused in one line that names the key, and changes nothing. Driven by the edge, which asks
here before it takes a request for an agent's.
"""

import hmac
import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from aiohttp import web

from rollmesh.core.errors import SessionError
from rollmesh.core.metrics import CONTENT_TYPE, Exposition
from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.serve.interception.book import Entry, SessionBook
from rollmesh.serve.interception.capture import SessionWish
from rollmesh.serve.interception.rules import Wish, policy_of

SESSIONS = "/admin/sessions"
MAX_METADATA_BYTES = 16 * 1024

_JSON = {"Content-Type": "application/json"}
_HOST = re.compile(r"[A-Za-z0-9.\-_]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")

B = TypeVar("B", bound=msgspec.Struct)


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of POST /admin/sessions."""

    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """Any JSON; given back as it is."""
    sampling: Wish | None = None
    """Left out, training's rules."""
    seed: int | None = None
    """From which turns get their seeds where a rule forces them; random if left out."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of POST .../reward."""

    reward: float
    node: int | str | None = None
    """A sampled node's number or a response's id; left out, the reward is the session's."""


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of POST .../finish."""

    outcome: Outcome | None = None
    """Left out: `completed`, or `infra_error` where the last call got no answer."""


class AdminKit(msgspec.Struct, frozen=True):
    """What the routes speak for."""

    book: SessionBook
    token: str
    sampling: SamplingPolicy
    """Training's."""
    exposition: Exposition
    health: Callable[[], dict[str, Any]]


class Admin:
    """See the module; `handle` is the edge's door."""

    def __init__(self, kit: AdminKit) -> None:
        self._kit = kit
        self._token = kit.token.encode()

    async def handle(self, request: web.BaseRequest, path: str) -> web.StreamResponse | None:
        """The answer to a request that is ours, None for any other."""
        if path == "/healthz" and request.method == "GET":
            return _answer(self._kit.health())
        if path != "/metrics" and path != "/admin" and not path.startswith("/admin/"):
            return None
        try:
            self._check_token(request)
            return await self._route(request, path)
        except SessionError as error:
            told = {"error": {"message": str(error), "code": error.code}}
            return _answer(told, error.status)

    def _check_token(self, request: web.BaseRequest) -> None:
        scheme, _, said = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(said.strip().encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() != "bearer" or not known:
            why = "send the token of --admin-token-file as `Authorization: Bearer TOKEN`"
            raise SessionError(401, "invalid_admin_token", why)

    async def _route(self, request: web.BaseRequest, path: str) -> web.Response:
        if path == "/metrics":
            _expect(request, "GET")
            body = self._kit.exposition.render()
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
        if path == SESSIONS:
            if request.method == "GET":
                rows = [entry.describe() for entry in self._kit.book.entries()]
                return _answer({"sessions": rows})
            _expect(request, "POST")
            return self._open(request, await _read(request, OpenBody))
        if not path.startswith(SESSIONS + "/"):
            raise SessionError(404, "unknown_route", f"no route {path}; see {SESSIONS}")
        session_id, _, verb = path.removeprefix(SESSIONS + "/").partition("/")
        return await self._route_session(request, unquote(session_id), verb)

    async def _route_session(
        self, request: web.BaseRequest, session_id: str, verb: str
    ) -> web.Response:
        book = self._kit.book
        if verb == "" and request.method == "DELETE":
            book.delete(book.find(session_id))
            return _answer({"session_id": session_id, "deleted": True})
        if verb == "":
            _expect(request, "GET")
            return _answer(book.find(session_id).describe())
        if verb not in ("reward", "finish"):
            raise SessionError(404, "unknown_route", f"no {verb!r} here; there are reward, finish")
        _expect(request, "POST")
        if verb == "reward":
            return self._reward(book.find(session_id), await _read(request, RewardBody))
        asked = await _read(request, FinishBody)
        return _answer(book.finish(book.find(session_id), asked.outcome))

    def _open(self, request: web.BaseRequest, asked: OpenBody) -> web.Response:
        metadata = bytes(asked.metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            why = f"metadata: {len(metadata)} bytes; at most {MAX_METADATA_BYTES}"
            raise SessionError(413, "metadata_too_large", why)
        base = _address(request)
        policy = policy_of(asked.sampling, self._kit.sampling) if asked.sampling else None
        opened = self._kit.book.open(SessionWish(policy, asked.seed), metadata)
        answer = {
            "session_id": opened.captured.session_id,
            "api_key": opened.api_key,
            "base_url": f"{base}/v1",
            "path_url": f"{base}/s/{opened.path_secret}/v1",
        }
        return _answer(answer, 201)

    def _reward(self, entry: Entry, asked: RewardBody) -> web.Response:
        self._kit.book.reward(entry, asked.reward, asked.node)
        return _answer(entry.describe())


def _address(request: web.BaseRequest) -> str:
    """How the caller reached us, which is how the agent on its side will."""
    host = request.headers.get("Host", "")
    scheme = request.headers.get("X-Forwarded-Proto", "http").lower()
    if not _HOST.fullmatch(host) or scheme not in ("http", "https"):
        raise SessionError(400, "invalid_host", f"Host: {host!r} is no address to give to agents")
    return f"{scheme}://{host}"


async def _read(request: web.BaseRequest, kind: type[B]) -> B:
    """The body as `kind`, an empty one as {}; SessionError names the key that is wrong."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise SessionError(413, "body_too_large", "the body is too long") from None
    try:
        raw.decode()  # metadata is kept unopened, and must come out as the text it is
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SessionError(400, "invalid_body", f"the body: {error}") from None


def _expect(request: web.BaseRequest, method: str) -> None:
    if request.method != method:
        why = f"{request.method} is not possible here; use {method}"
        raise SessionError(405, "wrong_method", why)


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, headers=_JSON)
