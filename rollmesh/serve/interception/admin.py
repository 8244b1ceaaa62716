"""Admin routes of the gateway: sessions, rewards, health and metrics.

    POST   /admin/sessions                {"metadata", "sampling", "seed"} -> keys and addresses
    GET    /admin/sessions                all sessions
    GET    /admin/sessions/ID             one session
    POST   /admin/sessions/ID/reward      {"reward", "node"}
    POST   /admin/sessions/ID/finish      {"outcome"} -> samples, messages, forks
    DELETE /admin/sessions/ID
    GET    /healthz  (no token)    GET /metrics

- All routes but /healthz need the admin token as a Bearer; /healthz shows the engines only with the
  token or on loopback.
- An invalid body is refused with one line that names the key, and changes nothing. A sampling rule
  that no engine can follow is refused here, not in each call. Ranges: SGLang's
  SamplingParams.verify.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

import msgspec

from rollmesh.core.addresses import names_loopback
from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.core.metrics import CONTENT_TYPE, Exposition
from rollmesh.core.types import EVAL_SAMPLING, Outcome, SamplingPolicy, SamplingRule
from rollmesh.serve.interception.capture import CaptureOptions
from rollmesh.serve.interception.dialects.request_parts import Int64
from rollmesh.serve.interception.exchange import refuse
from rollmesh.serve.interception.pieces import Piece
from rollmesh.serve.interception.request import JSON, HttpRequest, has_bearer
from rollmesh.serve.interception.sessions import RegisteredSession, SessionRegistry

SamplingChoice = Literal["train", "eval"] | dict[str, SamplingRule]
"""Training's rules, evaluation's, or changes by field to training's."""

Number = float | int
_Range = tuple[str, Callable[[Number], bool]]

_RANGES: Mapping[str, _Range] = {
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("-1 or a whole number from 1", lambda value: value == -1 or _counts(value)),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "max_tokens": ("a whole number from 1", lambda value: _counts(value)),
    "seed": ("a whole number", lambda value: value == int(value)),
}
"""Allowed values by field; the rules of other fields only allow or forbid."""


def policy_of(wish: SamplingChoice, training: SamplingPolicy) -> SamplingPolicy:
    """Return the session's policy; SessionError 400 names the invalid field."""
    if wish == "train":
        return training
    if wish == "eval":
        return EVAL_SAMPLING
    for name, rule in wish.items():
        if name not in SamplingPolicy.__struct_fields__:
            raise _refusal(
                name, f"unknown field; fields: {', '.join(SamplingPolicy.__struct_fields__)}"
            )
        _check(name, rule.value)
    return msgspec.structs.replace(training, **wish)


def _check(name: str, value: Number | None) -> None:
    if value is None:
        return
    if name not in _RANGES:
        raise _refusal(name, "takes no value; `forced` means none")
    allowed, fits = _RANGES[name]
    if not fits(value):
        raise _refusal(name, f"{value:g} is not {allowed}")


def _counts(value: Number) -> bool:
    return value >= 1 and value == int(value)


def _refusal(name: str, why: str) -> SessionError:
    return SessionError(400, "invalid_body", f"sampling.{name}: {why}")


SESSIONS = "/admin/sessions"
MAX_METADATA_BYTES = 16 * 1024

MAX_BODY_BYTES = 128 * 1024
SILENCE_S = 10.0
"""Allowed silence while a body is read."""

_HOST = re.compile(r"[A-Za-z0-9.\-_]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")

B = TypeVar("B", bound=msgspec.Struct)


class OpenSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /admin/sessions."""

    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """Any JSON, returned unchanged."""
    sampling: SamplingChoice | None = None
    """Default: training's rules."""
    seed: Int64 | None = None
    """Base of the seeds of turns, where a rule forces seeds; random by default."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST .../reward."""

    reward: float
    node: int | str | None = None
    """Number of a sampled node or id of a response; None rewards the session."""


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST .../finish."""

    outcome: Outcome | None = None
    """Default: `completed`, or `infra_error` if the last call got no answer."""


class AdminRoutes:
    """Handler of the admin routes."""

    def __init__(
        self,
        registry: SessionRegistry,
        token: str,
        sampling: SamplingPolicy,
        exposition: Exposition,
        health: Callable[[], dict[str, Any]],
        *,
        scheme: str = "http",
        is_public: bool = False,
        public_url: str = "",
    ) -> None:
        """Create the handler.

        `sampling` are training's rules, `scheme` is that of returned addresses unless a proxy names
        another, `is_public` says that other machines can reach the gateway. `public_url` is the
        address for agents; '' for the one by which the caller reached the gateway.
        """
        self._registry = registry
        self._token = token.encode()
        self._sampling = sampling
        self._exposition = exposition
        self._health = health
        self._scheme = scheme
        self._is_public = is_public
        self._public_url = public_url

    async def handle(self, request: HttpRequest, path: str) -> bool:
        """Answer an admin request; return False for any other."""
        if path == "/healthz" and request.method == "GET":
            health = self._health() if self._may_see(request) else {"status": "ok"}
            request.answer(200, request.header_lines(JSON), _encode(health))
            return True
        if path != "/metrics" and path != "/admin" and not path.startswith("/admin/"):
            return False
        try:
            self._check_token(request)
            request.owner = "admin"
            body = await self._route(request, path)
        except SessionError as error:
            answer = {"error": {"message": str(error), "code": error.code}}
            refuse(request, _encode(answer), error)
            return True
        kind = CONTENT_TYPE.encode() if path == "/metrics" else JSON
        status = 201 if request.method == "POST" and path == SESSIONS else 200
        if isinstance(body, bytes):
            request.answer(status, request.header_lines(kind), body)
        else:
            await request.answer_in_parts(status, request.header_lines(kind), body)
        return True

    def _may_see(self, request: HttpRequest) -> bool:
        """Whether /healthz may show the engines: with the token, or to a local client."""
        headers = request.headers
        if has_bearer(self._token, headers):
            return True
        is_proxied = b"x-forwarded-for" in headers or b"forwarded" in headers
        host = headers.get(b"host", b"").decode("latin-1")
        return not self._is_public and not is_proxied and names_loopback([host])

    def _check_token(self, request: HttpRequest) -> None:
        if not has_bearer(self._token, request.headers):
            why = "send the token of --admin-token-file as `Authorization: Bearer TOKEN`"
            raise SessionError(401, "invalid_admin_token", why)

    async def _route(self, request: HttpRequest, path: str) -> bytes | list[Piece]:
        if path == "/metrics":
            _expect(request, "GET")
            return self._exposition.render()
        if path == SESSIONS:
            if request.method == "GET":
                rows = [entry.describe() for entry in self._registry.entries()]
                return _encode({"sessions": rows})
            _expect(request, "POST")
            return self._open(request, await _read(request, OpenSessionBody))
        if not path.startswith(SESSIONS + "/"):
            raise SessionError(404, "unknown_route", f"no route {path}; see {SESSIONS}")
        session_id, _, verb = path.removeprefix(SESSIONS + "/").partition("/")
        return await self._route_session(request, unquote(session_id), verb)

    async def _route_session(
        self, request: HttpRequest, session_id: str, verb: str
    ) -> bytes | list[Piece]:
        registry = self._registry
        if verb == "" and request.method == "DELETE":
            if not registry.delete_set_aside(session_id):
                registry.delete(registry.find(session_id))
            return _encode({"session_id": session_id, "deleted": True})
        if verb == "":
            _expect(request, "GET")
            return _encode(registry.find(session_id).describe())
        if verb not in ("reward", "finish"):
            raise SessionError(
                404, "unknown_route", f"unknown action {verb!r}; actions: reward, finish"
            )
        _expect(request, "POST")
        if verb == "reward":
            return self._reward(registry.find(session_id), await _read(request, RewardBody))
        body = await _read(request, FinishBody)
        return registry.finish(registry.find(session_id), body.outcome)

    def _open(self, request: HttpRequest, body: OpenSessionBody) -> bytes:
        metadata = bytes(body.metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            why = f"metadata: {len(metadata)} bytes; at most {MAX_METADATA_BYTES}"
            raise SessionError(413, "metadata_too_large", why)
        base = self._public_url or _address(request, self._scheme)
        policy = policy_of(body.sampling, self._sampling) if body.sampling else None
        opened = self._registry.open(CaptureOptions(policy, body.seed), metadata)
        answer = {
            "session_id": opened.captured.session_id,
            "api_key": opened.api_key,
            "base_url": f"{base}/v1",
            "path_url": f"{base}/s/{opened.path_secret}/v1",
        }
        return _encode(answer)

    def _reward(self, entry: RegisteredSession, body: RewardBody) -> bytes:
        self._registry.reward(entry, body.reward, body.node)
        return _encode(entry.describe())


def _address(request: HttpRequest, scheme: str) -> str:
    """Return the base address by which the caller reached the gateway, for use by its agents."""
    host = request.headers.get(b"host", b"").decode("latin-1")
    named = request.headers.get(b"x-forwarded-proto", scheme.encode())
    scheme = named.decode("latin-1").lower()
    if not _HOST.fullmatch(host) or scheme not in ("http", "https"):
        raise SessionError(
            400, "invalid_host", f"Host: {host!r} is not an address that agents can use"
        )
    return f"{scheme}://{host}"


async def _read(request: HttpRequest, kind: type[B]) -> B:
    """Decode the body as `kind`, an empty one as {}; SessionError names the invalid key."""
    raw = await request.read(MAX_BODY_BYTES, SILENCE_S)
    try:
        raw.decode()  # metadata is stored undecoded and must be valid UTF-8
        return msgspec.json.decode(raw or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise SessionError(400, "invalid_body", f"the body: {error}") from None


def _expect(request: HttpRequest, method: str) -> None:
    if request.method != method:
        why = f"{request.method} is not allowed; use {method}"
        raise SessionError(405, "wrong_method", why)


_encode = msgspec.json.encode
