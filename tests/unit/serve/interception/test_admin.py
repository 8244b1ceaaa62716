"""Admin routes over a real socket: tokens, bodies, and the sessions that they open."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import SamplingConfig
from rollmesh.core.metrics import Exposition
from rollmesh.core.process import listen
from rollmesh.core.types import EVAL_SAMPLING, FieldPolicy, SamplingPolicy, SamplingRule
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.serve.interception.admin import AdminRoutes
from rollmesh.serve.interception.capture import CaptureOptions, OpenedSession
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.server import HttpServer
from rollmesh.serve.interception.sessions import SessionRegistry
from rollmesh.serve.interception.token_capture import TokenCapture
from rollmesh.testing.sampler import ScriptedSampler

TOKEN = "the-admins-token"
TRAINING = SamplingConfig(max_tokens=77).policy()


class RecordingCapture(TokenCapture):
    """A capture that records the options of opened sessions."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, TRAINING)
        self.runtime = runtime
        self.seen: list[CaptureOptions] = []

    def open(self, wish: CaptureOptions) -> OpenedSession:
        self.seen.append(wish)
        return super().open(wish)


class AdminUnderTest:
    """The admin routes on a server, and a client for them."""

    def __init__(self, capture: RecordingCapture) -> None:
        self.capture = capture
        self.registry = SessionRegistry(capture, SystemClock(), 100.0)
        self.client = aiohttp.ClientSession()
        health = {"status": "ok"}
        self._admin = AdminRoutes(
            self.registry, TOKEN, TRAINING, Exposition("gateway"), lambda: health
        )
        self.server = HttpServer(self._handle, drain_s=0.1)
        self.base = ""

    async def _handle(self, request: HttpRequest) -> None:
        path = request.path.partition("?")[0]
        if not await self._admin.handle(request, path):
            request.answer(299, b"", b"")

    async def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        auth = {"Authorization": f"Bearer {TOKEN}"}
        url = self.base + path
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(
            method, url, data=raw, headers={**auth, **named}
        ) as response:
            answer = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, msgspec.json.decode(answer) if is_json else answer


@pytest.fixture
async def admin(prompts: Prompts) -> AsyncIterator[AdminUnderTest]:
    sampler = ScriptedSampler(None)
    admin = AdminUnderTest(RecordingCapture(Runtime(sampler, prompts, 4096, sampler.clock)))
    admin.base = await admin.server.start(listen("127.0.0.1:0"))
    yield admin
    await admin.client.close()
    await admin.server.stop()


Route = tuple[str, str]
GUARDED: list[Route] = [
    ("POST", "/admin/sessions"),
    ("GET", "/admin/sessions"),
    ("GET", "/admin/sessions/s0"),
    ("DELETE", "/admin/sessions/s0"),
    ("POST", "/admin/sessions/s0/finish"),
    ("POST", "/admin/sessions/s0/reward"),
    ("GET", "/metrics"),
    ("GET", "/admin"),
]


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"])
async def test_every_route_but_health_needs_the_token(
    admin: AdminUnderTest, route: Route, header: str
) -> None:
    status, answer = await admin.ask(*route, Authorization=header)
    assert (status, answer["error"]["code"]) == (401, "invalid_admin_token")
    assert admin.capture.seen == []


async def test_health_needs_no_token_and_other_paths_are_not_handled(admin: AdminUnderTest) -> None:
    assert await admin.ask("GET", "/healthz", Authorization="") == (200, {"status": "ok"})
    assert (await admin.ask("POST", "/v1/chat/completions"))[0] == 299
    assert (await admin.ask("POST", "/administer"))[0] == 299


async def test_an_opened_session_is_found_by_either_of_its_secrets(admin: AdminUnderTest) -> None:
    status, answer = await admin.ask("POST", "/admin/sessions", {"metadata": [1, {"a": None}]})
    assert status == 201
    assert answer["base_url"] == f"{admin.base}/v1"
    secret = answer["path_url"].removeprefix(f"{admin.base}/s/").removesuffix("/v1")
    runtime = admin.capture.runtime
    assert runtime.sessions.find(answer["api_key"]) is runtime.sessions.find(secret)
    assert runtime.sessions.find(secret).session_id == answer["session_id"]
    status, row = await admin.ask("GET", f"/admin/sessions/{answer['session_id']}")
    assert row["metadata"] == [1, {"a": None}]
    assert answer["api_key"] not in repr(row)
    status, listed = await admin.ask("GET", "/admin/sessions")
    assert listed == {"sessions": [row]}


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ({"Host": "gw.example:81"}, "http://gw.example:81"),
        ({"Host": "[::1]:81", "X_Forwarded_Proto": "https"}, "https://[::1]:81"),
    ],
)
async def test_addresses_are_those_that_the_client_used(
    admin: AdminUnderTest, headers: dict[str, str], base: str
) -> None:
    _, answer = await admin.ask("POST", "/admin/sessions", {}, **headers)
    assert answer["base_url"] == f"{base}/v1"
    assert (await admin.ask("POST", "/admin/sessions", {}, Host="a b"))[0] == 400


async def test_a_session_uses_the_training_settings_unless_it_names_others(
    admin: AdminUnderTest,
) -> None:
    top_k = {"policy": "default", "value": 3}
    for sampling in (None, "train", "eval", {"top_k": top_k}):
        await admin.ask("POST", "/admin/sessions", {"sampling": sampling, "seed": 5})
    plain, train, evaluation, own = admin.capture.seen
    assert (plain.sampling, train.sampling, evaluation.sampling) == (None, TRAINING, EVAL_SAMPLING)
    assert own.sampling == msgspec.structs.replace(
        TRAINING, top_k=SamplingRule(FieldPolicy.DEFAULT, 3)
    )
    assert plain.seed == 5
    assert SamplingPolicy().max_tokens != TRAINING.max_tokens


Bad = tuple[str, bytes, int, str]
BAD: list[Bad] = [
    ("", b"{", 400, "the body: Input data was truncated"),
    ("", b"[]", 400, "Expected `object`"),
    ("", b'{"metdata": 1}', 400, "unknown field `metdata`"),
    ("", b'{"sampling": "trian"}', 400, "Invalid enum value 'trian'"),
    ("", b'{"sampling": {"topk": {"policy": "allow"}}}', 400, "sampling.topk: unknown field"),
    ("", b'{"sampling": {"top_k": {"policy": "often"}}}', 400, "Invalid enum value 'often'"),
    *[
        ("", b'{"sampling": {"%b": {"policy": "force", "value": %b}}}' % (field, value), 400, line)
        for field, value, line in [
            (b"temperature", b"-1", "sampling.temperature: -1 is not at least 0"),
            (b"top_p", b"0", "sampling.top_p: 0 is not above 0 and at most 1"),
            (b"top_k", b"0", "sampling.top_k: 0 is not -1 or a whole number from 1"),
            (b"max_tokens", b"1.5", "sampling.max_tokens: 1.5 is not a whole number from 1"),
            (b"min_p", b"2", "sampling.min_p: 2 is not from 0 to 1"),
            (b"penalties", b"9", "sampling.penalties: takes no value; `forced` means none"),
            (b"grammar", b"1", "sampling.grammar: takes no value; `forced` means none"),
        ]
    ],
    ("", b'{"metadata": "\xff"}', 400, "the body: 'utf-8' codec can't decode byte 0xff"),
    ("", b'{"seed": "x"}', 400, "Expected `int | null`"),
    ("", b'{"metadata": "%b"}' % (b"x" * 20_000), 413, "metadata: 20002 bytes; at most 16384"),
    ("", b"x" * 200_000, 413, "longer than 131072 bytes"),
    ("/ID/reward", b"{}", 400, "missing required field `reward`"),
    ("/ID/reward", b'{"reward": "1"}', 400, "Expected `float`"),
    ("/ID/reward", b'{"reward": 1, "node": 0}', 404, "node: 0 is neither"),
    ("/ID/reward", b'{"reward": 1, "node": "chatcmpl-x"}', 404, "node: 'chatcmpl-x' is neither"),
    ("/ID/finish", b'{"outcome": "fine"}', 400, "Invalid enum value 'fine'"),
    ("/ID/stop", b"{}", 404, "unknown action 'stop'; actions: reward, finish"),
    ("/s9/finish", b"{}", 404, "no session 's9'"),
    ("/ID", b"{}", 405, "POST is not allowed; use GET"),
]


@pytest.mark.parametrize("bad", BAD)
async def test_an_invalid_request_is_a_one_line_error_and_changes_nothing(
    admin: AdminUnderTest, bad: Bad
) -> None:
    path, body, expected, line = bad
    _, answer = await admin.ask("POST", "/admin/sessions", {})
    path = path.replace("ID", answer["session_id"])
    before = await admin.ask("GET", "/admin/sessions")
    status, refusal = await admin.ask("POST", f"/admin/sessions{path}", body)
    assert (status, "\n" in refusal["error"]["message"]) == (expected, False)
    assert line in refusal["error"]["message"]
    assert await admin.ask("GET", "/admin/sessions") == before


async def test_finish_can_be_repeated_until_the_session_is_deleted(
    admin: AdminUnderTest,
) -> None:
    _, answer = await admin.ask("POST", "/admin/sessions", {})
    path = f"/admin/sessions/{answer['session_id']}"
    status, report = await admin.ask("POST", f"{path}/finish")
    assert (status, report["samples"], report["messages"]) == (200, [], [])
    assert await admin.ask("POST", f"{path}/finish", {"outcome": "stale"}) == (200, report)
    deleted = {"session_id": answer["session_id"], "deleted": True}
    assert await admin.ask("DELETE", path) == (200, deleted)
    assert [(await admin.ask(*route))[0] for route in _after(path)] == [404, 404, 404]


def _after(path: str) -> list[Route]:
    return [("POST", f"{path}/finish"), ("GET", path), ("DELETE", path)]


async def test_a_session_that_is_set_aside_is_409_and_can_be_deleted(
    admin: AdminUnderTest,
) -> None:
    admin.registry.set_aside("s7", "DecodeError: no such event")
    path = "/admin/sessions/s7"
    for route in (("GET", path), ("POST", f"{path}/finish")):
        status, answer = await admin.ask(*route)
        assert (status, answer["error"]["code"]) == (409, "session_set_aside")
        assert "(DecodeError: no such event); DELETE removes it" in answer["error"]["message"]
    assert await admin.ask("DELETE", path) == (200, {"session_id": "s7", "deleted": True})
    assert (await admin.ask("GET", path))[0] == 404
