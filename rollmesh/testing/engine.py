"""The scripted engine: SGLang's native protocol on a loopback socket without a model.

    async with ScriptedEngine() as engine:
        engine.hold()                    # no tokens until allow(n) or release()
        engine.faults.append(Fault.CUT)  # of the next /generate

    agent = ScriptedAgent(tokenizer, steps(AgentReply("I look.", uses=(ToolUse("ls", "{}"),))))
    async with ScriptedEngine(agent.next_token) as engine: ...

- The token after a context depends only on weights and context, so a recorded turn proves itself.
- Nothing waits by sleeping: held tokens wait for a gate that the test opens.
- A ScriptedAgent answers ChatML prompts in Qwen3's format; texts are cut into tokens unlike any
  tokenizer, so that a component that tokenises samples again is detected.
"""

import asyncio
import enum
import itertools
import random
import types
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
import orjson
from aiohttp import web

from rollmesh.core.types import policy_version_of
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.testing.faults import Fault, refusal

VOCAB_SIZE = 500
STOP_TOKEN = 0

NextToken = Callable[[int, Sequence[int]], int]
"""(policy version, context) -> the one token that these weights sample after it."""


def chain_token(policy_version: int, context: Sequence[int]) -> int:
    """Pseudo-random ids from a hash of the version and the context; about one in 16 ends a turn."""
    digest = zlib.crc32(repr((policy_version, list(context))).encode())
    return STOP_TOKEN if digest % 16 == 0 else 1 + digest % (VOCAB_SIZE - 1)


def endless_token(policy_version: int, context: Sequence[int]) -> int:
    """Return ids like `chain_token`, but never a stop token: turns end by their length."""
    return 1 + zlib.crc32(repr((policy_version, list(context))).encode()) % (VOCAB_SIZE - 1)


def logprob_of(policy_version: int, token_id: int) -> float:
    """Log-prob that the scripted engine reports for a token, exact in float32."""
    return -(1 + policy_version % 8) / 8 - token_id / 512


class FakeMemoryState(enum.Enum):
    """Memory state, as in the embedded engine; BARE is memory without weights."""

    HELD = "held"
    RELEASED = "released"
    BARE = "bare"


class SeenRequest(msgspec.Struct, frozen=True):
    """A request that the engine received."""

    path: str
    body: dict[str, Any]


class _LiveRequest:
    """A `/generate` request that is being sampled."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.rid: str = body.get("rid", "")
        self.num_top: int = body.get("top_logprobs_num", 0)
        self.prompt: list[int] = body["input_ids"]
        self.sampling: dict[str, Any] = body["sampling_params"]
        self.output: list[tuple[int, float]] = []
        self.versions: list[int] = []
        self.is_aborted = False
        self.finish: dict[str, Any] | None = None


class ScriptedEngine:
    """A scripted SGLang server; `url` stays the same across `die` and `restart`."""

    def __init__(
        self,
        next_token: NextToken = chain_token,
        *,
        is_incremental: bool = True,
        weight_version: str = "0",
    ) -> None:
        self.next_token = next_token
        self.is_incremental = is_incremental
        self.weight_version = weight_version
        self.url = ""
        self.model_path = "scripted"
        self.info_version: str | None = None
        """Version in /model_info instead of `weight_version`; '' leaves the field out."""
        self.seen: list[SeenRequest] = []
        self.faults: deque[Fault] = deque()
        self.update_error = ""
        """Message with which weight updates fail."""
        self.update_is_idle = False
        """Whether weight updates claim success and change only the version label."""
        self.max_running = 0
        """The limit of running requests that it reports but does not enforce; 0 for none."""
        self.api_key = ""
        """If set, requests without it are refused with 401 and are not in `seen`."""
        self.num_ignored_aborts = 0
        """Number of aborts to ignore, as if they had arrived before their request."""
        self.is_paused = False
        self.memory_state = FakeMemoryState.HELD
        self.num_sampled = 0
        self.num_starts = 0
        self._start_version = weight_version
        self._weights = weight_version
        self._allowed: int | None = None
        self._live: dict[str, _LiveRequest] = {}
        self._handling: dict[asyncio.Transport, asyncio.Task[Any]] = {}
        self._moved = asyncio.Condition()
        self._runner: web.ServerRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self._serve()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        await self.die()

    # controls for tests

    def hold(self) -> None:
        """Sample nothing until `allow` or `release`."""
        self._allowed = 0

    async def allow(self, num_tokens: int) -> None:
        """Allow `num_tokens` more tokens, shared by all requests."""
        self._allowed = (self._allowed or 0) + num_tokens
        await self._notify()

    async def release(self) -> None:
        """Sample freely again."""
        self._allowed = None
        await self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked after every event of the engine."""
        async with self._moved:
            await self._moved.wait_for(condition)

    def num_seen(self, path: str) -> int:
        """Number of requests for `path` so far."""
        return sum(request.path == path for request in self.seen)

    @property
    def num_live(self) -> int:
        """Number of requests that are being sampled."""
        return len(self._live)

    async def update(self, policy_version: int | str) -> None:
        """Update weights as a publisher does: pause, let running requests end, change weights,
        continue.
        """
        self.is_paused = True
        self._abort(list(self._live))
        await self._notify()
        await self.until(lambda: all(not live.is_aborted for live in self._live.values()))
        self.weight_version = self._weights = str(policy_version)
        self.is_paused = False
        await self._notify()

    async def die(self) -> None:
        """Close the port and cut every connection."""
        runner, self._runner = self._runner, None
        for connection, handling in list(self._handling.items()):
            connection.abort()
            handling.cancel()
        if runner and (server := runner.server):
            await runner.cleanup()
            for _ in range(4):  # let the loop hand accepted sockets to their protocols
                await asyncio.sleep(0)
            await server.shutdown(0.0)

    async def restart(self, weight_version: str | None = None) -> None:
        """Serve again at the same address with empty memory and the first weights, or
        `weight_version`.
        """
        await self.die()
        if weight_version is not None:
            self._start_version = weight_version
        self.weight_version = self._weights = self._start_version
        self.model_path, self.is_paused = "scripted", False
        self.memory_state = FakeMemoryState.HELD
        await self._serve()

    async def _serve(self) -> None:
        self.num_starts += 1
        server = web.Server(self._track, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # the protocol

    async def _track(self, request: web.BaseRequest) -> web.StreamResponse:
        handling, connection = asyncio.current_task(), request.transport
        assert handling
        assert connection
        self._handling[connection] = handling
        try:
            return await self._handle(request)
        finally:
            del self._handling[connection]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.content.read()  # of any length
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return _json({"error": "Unauthorized"}, 401)
        body = orjson.loads(raw) if raw else {}
        self.seen.append(SeenRequest(request.path, body))
        await self._notify()
        if request.path == "/generate":
            return await self._on_generate(request, body)
        answer = self._control(request.path, body)
        await self._notify()
        return answer

    def _control(self, path: str, body: dict[str, Any]) -> web.Response:
        match path:
            case "/abort_request":
                self._on_abort(body.get("rid", ""))
            case "/pause_generation":
                self.is_paused = True
                if body["mode"] == "abort":
                    self._abort(list(self._live))
            case "/continue_generation":
                self.is_paused = False
            case "/flush_cache":
                return web.Response(status=400 if self._live and not self.is_paused else 200)
            case "/release_memory_occupation":
                return self._release()
            case "/resume_memory_occupation":
                self.memory_state = (
                    FakeMemoryState.BARE
                    if self.memory_state is FakeMemoryState.RELEASED
                    else self.memory_state
                )
            case "/update_weights_from_disk":
                return self._update(body)
            case _:
                return self._report(path, body)
        return web.Response()

    def _report(self, path: str, body: dict[str, Any]) -> web.Response:
        match path:
            case "/update_weight_version":
                self.weight_version = body["new_version"]
                return _json({"success": True, "message": "renamed"})
            case "/model_info":
                named = self.weight_version if self.info_version is None else self.info_version
                numbered = {"weight_version": named} if named else {}
                return _json({"model_path": self.model_path, **numbered})
            case "/server_info":
                info = {"random_seed": self.num_starts, "is_paused": self.is_paused}
                return _json({**info, "incremental_streaming_output": self.is_incremental})
            case "/v1/loads":
                tokens = sum(len(live.prompt) + len(live.output) for live in self._live.values())
                load = {"num_running_reqs": len(self._live), "num_used_tokens": tokens}
                load["max_running_requests"] = self.max_running
                return _json({"loads": [load]})
        return web.Response(status=404)

    def _release(self) -> web.Response:
        if self._live:
            return _json({"error": {"message": "requests are running; SGLang would crash"}}, 400)
        self.memory_state = FakeMemoryState.RELEASED
        return web.Response()

    def _update(self, body: dict[str, Any]) -> web.Response:
        error = (
            "its memory is released"
            if self.memory_state is FakeMemoryState.RELEASED
            else self.update_error
        )
        if error:
            return _json({"success": False, "message": error}, 400)
        self.memory_state = FakeMemoryState.HELD
        self.weight_version, self.model_path = body["weight_version"], body["model_path"]
        if not self.update_is_idle:
            self._weights = self.weight_version
        return _json({"success": True, "message": "Succeeded to update model weights."})

    def _on_abort(self, rid: str) -> None:
        if self.num_ignored_aborts:
            self.num_ignored_aborts -= 1
        else:
            self._abort([rid])

    def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            if rid in self._live:
                self._live[rid].is_aborted = True

    async def _on_generate(self, http: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else None
        if fault and (answer := refusal(fault, bool(body.get("stream")))):
            return answer
        if body["sampling_params"]["max_new_tokens"] == 0:
            return _json(self._score(body["input_ids"]))
        if fault is Fault.HANG:
            await asyncio.get_running_loop().create_future()
        request = _LiveRequest(body)
        if request.rid in self._live:
            return _json({"error": {"message": "Duplicate request ID detected"}}, 400)
        self._live[request.rid] = request
        try:
            return await self._run(http, request, bool(body.get("stream")), fault)
        finally:
            self._live.pop(request.rid, None)
            await self._notify()

    async def _run(
        self, http: web.BaseRequest, request: _LiveRequest, stream: bool, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if stream:
            await response.prepare(http)
        while request.finish is None:
            await self.until(lambda: request.is_aborted or self._may_sample())
            self._sample(request)
            if fault is Fault.CUT and http.transport:
                if stream:
                    await response.write(b"data: %b\n\n" % self._answer(request))
                http.transport.abort()
                raise ConnectionResetError
            if stream:
                await response.write(b"data: %b\n\n" % self._answer(request))
        if not stream:
            return web.Response(body=self._answer(request, is_whole=True))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _may_sample(self) -> bool:
        return (
            not self.is_paused and self.memory_state is FakeMemoryState.HELD and self._allowed != 0
        )

    def _sample(self, request: _LiveRequest) -> None:
        if request.is_aborted:
            request.finish = {"type": "abort", "message": "Aborted"}
            return
        if self._allowed is not None:
            self._allowed -= 1
        policy_version = policy_version_of(self._weights)
        context = request.prompt + [token for token, _ in request.output]
        token = self.next_token(policy_version, context)
        self.num_sampled += 1
        request.output.append((token, logprob_of(policy_version, token)))
        request.versions.append(policy_version)
        if token in request.sampling.get("stop_token_ids", ()):
            request.finish = {"type": "stop", "matched": token}
        elif len(request.output) >= request.sampling["max_new_tokens"]:
            request.finish = {"type": "length", "length": len(request.output)}

    def _answer(self, request: _LiveRequest, is_whole: bool = False) -> bytes:
        """All tokens so far, or only the newest if the stream is incremental."""
        new = request.output
        if self.is_incremental and not is_whole:
            new = [] if request.is_aborted else request.output[-1:]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "weight_version": self.weight_version,
            "output_token_logprobs": [[logprob, token, None] for token, logprob in new],
        }
        if request.num_top:
            meta["output_top_logprobs"] = [_top(token, lp, request.num_top) for token, lp in new]
        if request.finish:
            meta["weight_versions"] = _spans(request.versions)
        return orjson.dumps({"text": "", "output_ids": [t for t, _ in new], "meta_info": meta})

    def _score(self, token_ids: list[int]) -> dict[str, Any]:
        policy_version = policy_version_of(self._weights)
        scores: list[list[float | int | None]] = [[None, token_ids[0], None]]
        scores += [[logprob_of(policy_version, token), token, None] for token in token_ids[1:]]
        finish = {"type": "length", "length": 0}
        return {
            "output_ids": [],
            "meta_info": {"input_token_logprobs": scores, "finish_reason": finish},
        }


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    """SGLang's `weight_versions`: half-open spans of equal versions."""
    spans: list[dict[str, Any]] = []
    for at, policy_version in enumerate(versions):
        if spans and spans[-1]["version"] == str(policy_version):
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": str(policy_version), "start": at, "end": at + 1})
    return spans


def _top(token: int, logprob: float, num_top: int) -> list[list[float | int | None]]:
    """The sampled token as the likeliest one, followed by less likely ones."""
    return [[logprob - at, (token + at) % VOCAB_SIZE, None] for at in range(num_top)]


def _json(answer: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")


_MAX_PIECE = 5
"""In characters; longer than most tokens, shorter than most words."""
_MAX_KEPT = 512
"""Answers to keep: each is looked up once per token."""


class ToolUse(msgspec.Struct, frozen=True):
    """A tool call, as the model writes it."""

    name: str
    arguments: str
    """JSON text, with the model's own spacing."""


class AgentReply(msgspec.Struct, frozen=True):
    """One turn of the model."""

    text: str = ""
    reasoning: str = ""
    uses: tuple[ToolUse, ...] = ()


class AgentContext(msgspec.Struct, frozen=True):
    """The conversation that the model continues."""

    turns: tuple[tuple[str, str], ...]
    """Role and text of each turn; special tokens are text here."""

    @property
    def num_called(self) -> int:
        """Number of assistant turns that called tools."""
        return sum(role == "assistant" and "<tool_call>" in text for role, text in self.turns)

    @property
    def offers_tools(self) -> bool:
        """Whether the first turn lists tools, in Qwen3's format or that of a plain template."""
        role, text = self.turns[0] if self.turns else ("", "")
        return role == "tools" or "<tools>" in text


AgentScript = Callable[[AgentContext], AgentReply]


def steps(*answers: AgentReply, aside: AgentReply | None = None) -> AgentScript:
    """Script a tool task: one answer after each round of tool results; the last one repeats.

    A conversation without tools gets `aside`, if set: agents ask for titles in separate calls.
    """

    def reply(context: AgentContext) -> AgentReply:
        if aside is not None and not context.offers_tools:
            return aside
        return answers[min(context.num_called, len(answers) - 1)]

    return reply


class ScriptedAgent:
    """A scripted model; pass `next_token` to a ScriptedEngine."""

    def __init__(self, tokenizer: Tokenizer, script: AgentScript) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._start: int = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._opening = [self._start, *tokenizer.encode("assistant\n")]
        self._kept: dict[tuple[int, ...], list[int]] = {}

    def next_token(self, policy_version: int, context: Sequence[int]) -> int:
        """Return the token after `context`, the same for every policy version; the end token if
        `context` has no open assistant turn.
        """
        del policy_version
        backwards = range(len(context) - 1, -1, -1)
        opened = next((n for n in backwards if context[n] == self._start), None)
        if opened is None:
            return self._end
        answer = self._answer(tuple(context[:opened]))
        prefix = list(context[opened + len(self._opening) :])
        return answer[_index_after(prefix, answer)]

    def _answer(self, before: tuple[int, ...]) -> list[int]:
        """All tokens of the turn after `before`, to its end."""
        answer = self._kept.get(before)
        if answer is None:
            answer = [*self._tokens(self._script(self._context(before))), self._end]
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[before] = answer
        return answer

    def _context(self, ids: tuple[int, ...]) -> AgentContext:
        starts = [n for n, token_id in enumerate(ids) if token_id == self._start]
        turns = []
        for start, stop in itertools.pairwise([*starts, len(ids)]):
            text = self._tokenizer.decode(ids[start + 1 : stop])
            role, _, content = text.partition("\n")
            turns.append((role, content.removesuffix("\n").removesuffix("<|im_end|>")))
        return AgentContext(tuple(turns))

    def _tokens(self, reply: AgentReply) -> list[int]:
        ids: list[int] = []
        if reply.reasoning:
            ids += self._framed("think", reply.reasoning) + self._cut("\n\n")
        ids += self._cut(reply.text)
        for use in reply.uses:
            ids += self._cut("\n") if ids else []
            text = f'{{"name": "{use.name}", "arguments": {use.arguments}}}'
            ids += self._framed("tool_call", text)
        return ids

    def _framed(self, mark: str, text: str) -> list[int]:
        opens, closes = self._tokenizer.convert_tokens_to_ids([f"<{mark}>", f"</{mark}>"])
        return [opens, *self._cut(f"\n{text}\n"), closes]

    def _cut(self, text: str) -> list[int]:
        """Tokenise `text` in pieces of pseudo-random lengths; the same text is always cut the same
        way.
        """
        dice = random.Random(zlib.crc32(text.encode()))
        ids: list[int] = []
        at = 0
        while at < len(text):
            size = dice.randint(1, _MAX_PIECE)
            ids += self._tokenizer.encode(text[at : at + size])
            at += size
        return ids


def _index_after(prefix: list[int], answer: list[int]) -> int:
    """Index in `answer` of the token that follows `prefix`.

    A gateway that forces a tool call prefills its beginning, so `prefix` may start inside the
    answer. If it matches nowhere, the turn ends.
    """
    num_tokens = len(prefix)
    for at in range(len(answer) - num_tokens):
        if answer[at : at + num_tokens] == prefix:
            return at + num_tokens
    return len(answer) - 1
