"""The sampling rules that an opener may wish for a session, and what values they may have.

Invariant: a rule that no engine could carry out is refused when the session is opened, where its
author reads it, never call by call before the agent. Ranges: SGLang's SamplingParams.verify. Driven
by admin.py.

The gateway's routes for who runs it: sessions, rewards, health and figures.

    POST   /admin/sessions                {"metadata", "sampling", "seed"} -> keys and addresses
    GET    /admin/sessions                all of them, briefly
    GET    /admin/sessions/ID             how it stands
    POST   /admin/sessions/ID/reward      {"reward", "node"}
    POST   /admin/sessions/ID/finish      {"outcome"} -> samples, messages, forks
    DELETE /admin/sessions/ID
    GET    /healthz  (no token)    GET /metrics

Invariants: all but /healthz need the admin token as a Bearer; /healthz shows the engines with it,
or on loopback, and else "ok" alone; a wrong body is refused in one line
that names the key, and changes nothing. Driven by the edge, which asks here before it takes a
request for an agent's.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, SessionError
from rollmesh.core.loopback import names_loopback
from rollmesh.core.metrics import CONTENT_TYPE, Exposition
from rollmesh.core.types import EVAL_SAMPLING, Outcome, SamplingPolicy, SamplingRule
from rollmesh.serve.interception.capture import CaptureOptions
from rollmesh.serve.interception.dialects.request_parts import Int64
from rollmesh.serve.interception.exchange import refuse
from rollmesh.serve.interception.pieces import Piece
from rollmesh.serve.interception.request import JSON, HttpRequest, bears
from rollmesh.serve.interception.sessions import RegisteredSession, SessionRegistry

SamplingChoice = Literal["train", "eval"] | dict[str, SamplingRule]
"""Training's rules, evaluation's, or rules by field over training's."""

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
"""Of the fields whose rules have a value; the others are only let through or not."""


def policy_of(wish: SamplingChoice, training: SamplingPolicy) -> SamplingPolicy:
    """The session's policy; SessionError 400 names the field and what it may be."""
    if wish == "train":
        return training
    if wish == "eval":
        return EVAL_SAMPLING
    for name, rule in wish.items():
        if name not in SamplingPolicy.__struct_fields__:
            raise _refusal(name, f"no such field; {', '.join(SamplingPolicy.__struct_fields__)}")
        _check(name, rule.value)
    return msgspec.structs.replace(training, **wish)


def _check(name: str, value: Number | None) -> None:
    if value is None:
        return
    if name not in _RANGES:
        raise _refusal(name, "takes no value; forced means none")
    told, fits = _RANGES[name]
    if not fits(value):
        raise _refusal(name, f"{value:g} is not {told}")


def _counts(value: Number) -> bool:
    return value >= 1 and value == int(value)


def _refusal(name: str, why: str) -> SessionError:
    return SessionError(400, "invalid_body", f"sampling.{name}: {why}")


SESSIONS = "/admin/sessions"
MAX_METADATA_BYTES = 16 * 1024

MAX_BODY_BYTES = 128 * 1024
SILENCE_S = 10.0
"""A body may stop coming for this long."""

_HOST = re.compile(r"[A-Za-z0-9.\-_]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")

B = TypeVar("B", bound=msgspec.Struct)


class OpenSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of POST /admin/sessions."""

    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """Any JSON; given back as it is."""
    sampling: SamplingChoice | None = None
    """Left out, training's rules."""
    seed: Int64 | None = None
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

    book: SessionRegistry
    token: str
    sampling: SamplingPolicy
    """Training's."""
    exposition: Exposition
    health: Callable[[], dict[str, Any]]
    scheme: str = "http"
    """Of the addresses that are given out, where no proxy names another."""
    is_public: bool = False
    """Other machines can reach it."""


class AdminRoutes:
    """See the module; `handle` is the edge's door."""

    def __init__(self, kit: AdminKit) -> None:
        self._kit = kit
        self._token = kit.token.encode()

    async def handle(self, request: HttpRequest, path: str) -> bool:
        """Answer a request that is ours; False for any other."""
        if path == "/healthz" and request.method == "GET":
            health = self._kit.health() if self._may_see(request) else {"status": "ok"}
            request.answer(200, request.dated(JSON), _encode(health))
            return True
        if path != "/metrics" and path != "/admin" and not path.startswith("/admin/"):
            return False
        try:
            self._check_token(request)
            request.owner = "admin"
            body = await self._route(request, path)
        except SessionError as error:
            told = {"error": {"message": str(error), "code": error.code}}
            refuse(request, _encode(told), error)
            return True
        kind = CONTENT_TYPE.encode() if path == "/metrics" else JSON
        status = 201 if request.method == "POST" and path == SESSIONS else 200
        if isinstance(body, bytes):
            request.answer(status, request.dated(kind), body)
        else:
            await request.answer_piecewise(status, request.dated(kind), body)
        return True

    def _may_see(self, request: HttpRequest) -> bool:
        """Whether /healthz shows the engines: with the token, or to this machine alone."""
        headers = request.headers
        if bears(self._token, headers):
            return True
        is_proxied = b"x-forwarded-for" in headers or b"forwarded" in headers
        host = headers.get(b"host", b"").decode("latin-1")
        return not self._kit.is_public and not is_proxied and names_loopback([host])

    def _check_token(self, request: HttpRequest) -> None:
        if not bears(self._token, request.headers):
            why = "send the token of --admin-token-file as `Authorization: Bearer TOKEN`"
            raise SessionError(401, "invalid_admin_token", why)

    async def _route(self, request: HttpRequest, path: str) -> bytes | list[Piece]:
        if path == "/metrics":
            _expect(request, "GET")
            return self._kit.exposition.render()
        if path == SESSIONS:
            if request.method == "GET":
                rows = [entry.describe() for entry in self._kit.book.entries()]
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
        book = self._kit.book
        if verb == "" and request.method == "DELETE":
            if not book.free(session_id):
                book.delete(book.find(session_id))
            return _encode({"session_id": session_id, "deleted": True})
        if verb == "":
            _expect(request, "GET")
            return _encode(book.find(session_id).describe())
        if verb not in ("reward", "finish"):
            raise SessionError(404, "unknown_route", f"no {verb!r} here; there are reward, finish")
        _expect(request, "POST")
        if verb == "reward":
            return self._reward(book.find(session_id), await _read(request, RewardBody))
        asked = await _read(request, FinishBody)
        return book.finish(book.find(session_id), asked.outcome)

    def _open(self, request: HttpRequest, asked: OpenSessionBody) -> bytes:
        metadata = bytes(asked.metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            why = f"metadata: {len(metadata)} bytes; at most {MAX_METADATA_BYTES}"
            raise SessionError(413, "metadata_too_large", why)
        base = _address(request, self._kit.scheme)
        policy = policy_of(asked.sampling, self._kit.sampling) if asked.sampling else None
        opened = self._kit.book.open(CaptureOptions(policy, asked.seed), metadata)
        answer = {
            "session_id": opened.captured.session_id,
            "api_key": opened.api_key,
            "base_url": f"{base}/v1",
            "path_url": f"{base}/s/{opened.path_secret}/v1",
        }
        return _encode(answer)

    def _reward(self, entry: RegisteredSession, asked: RewardBody) -> bytes:
        self._kit.book.reward(entry, asked.reward, asked.node)
        return _encode(entry.describe())


def _address(request: HttpRequest, scheme: str) -> str:
    """The address by which the caller reached us, and by which its agents will."""
    host = request.headers.get(b"host", b"").decode("latin-1")
    named = request.headers.get(b"x-forwarded-proto", scheme.encode())
    scheme = named.decode("latin-1").lower()
    if not _HOST.fullmatch(host) or scheme not in ("http", "https"):
        raise SessionError(400, "invalid_host", f"Host: {host!r} is no address to give to agents")
    return f"{scheme}://{host}"


async def _read(request: HttpRequest, kind: type[B]) -> B:
    """The body as `kind`, an empty one as {}; SessionError names the key that is wrong."""
    raw = await request.read(MAX_BODY_BYTES, SILENCE_S)
    try:
        raw.decode()  # metadata is kept unopened, and must come out as the text it is
        return msgspec.json.decode(raw or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise SessionError(400, "invalid_body", f"the body: {error}") from None


def _expect(request: HttpRequest, method: str) -> None:
    if request.method != method:
        why = f"{request.method} is not possible here; use {method}"
        raise SessionError(405, "wrong_method", why)


_encode = msgspec.json.encode
