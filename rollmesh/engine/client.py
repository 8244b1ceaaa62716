"""A client of one engine: the subset of SGLang's native HTTP protocol that rollmesh uses.

    /generate /abort_request /pause_generation /continue_generation /flush_cache
    /update_weights_from_disk /model_info /server_info /v1/loads

Invariants: token ids are checked against the vocabulary before they leave, because one bad id kills
an SGLang server; a leg's tokens are told once each, whichever form of stream the server has; every
failure is EngineUnavailable (worth a retry) or EngineRefused (it would fail alike). Sources:
SGLang's http_server.py and io_struct.py. Driven by runtime/legs.py, probe.py and the publisher.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from yarl import URL

from rollmesh.core.errors import EngineError, EngineRefused, EngineUnavailable
from rollmesh.core.types import SamplingParams
from rollmesh.engine import answers
from rollmesh.engine.answers import Answer, EngineLoad, LegChunk, ModelInfo

TokenIds = Sequence[int] | msgspec.Raw
"""Token ids, or the JSON of a list of them that the caller has checked."""

CONTROL_TIMEOUT_S = 30.0
"""For pause, flush, update and continue; SGLang's pause alone polls each second."""
READ_TIMEOUT_S = 5.0
"""For what an engine answers by heart."""

KEEPALIVE_S = 4.0
"""SGLang's server closes connections that were idle for 5 s; a request must not meet that."""

_JSON = {"Content-Type": "application/json"}


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One `/generate` call."""

    rid: str
    input_ids: TokenIds
    params: SamplingParams
    max_new_tokens: int
    extra_key: str
    """Prefixes are shared only under the same key."""
    stream: bool


class _Sampling(msgspec.Struct, omit_defaults=True):
    """SGLang's sampling_params; it answers 500 to a name that it does not know."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


class _GenerateBody(msgspec.Struct, omit_defaults=True):
    input_ids: Any
    sampling_params: _Sampling
    rid: str = ""
    return_logprob: bool = False
    stream: bool = False
    extra_key: str = ""
    logprob_start_len: int = -1


_encoder = msgspec.json.Encoder()


def open_session() -> aiohttp.ClientSession:
    """A session whose requests cost little: no cookies, no timers, connections kept."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=READ_TIMEOUT_S),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        auto_decompress=False,
        read_bufsize=2**18,
    )


class EngineClient:
    """Talks to the engine at `url` over a shared `session`; has no state of its own."""

    def __init__(self, url: str, session: aiohttp.ClientSession, vocab_size: int = 2**31) -> None:
        """Token ids must be below `vocab_size`; the default is for callers that send none."""
        self.url = url.rstrip("/")
        self._session = session
        self._vocab_size = vocab_size
        self._generate_url = URL(f"{self.url}/generate")

    async def generate(self, leg: LegRequest) -> AsyncIterator[LegChunk]:
        """The leg's tokens: as they come if `leg.stream`, else all at once; the last has a finish.

        Raises EngineRefused (also for an id that is no token) and EngineUnavailable. There is no
        time-out: whoever drives the leg aborts it. Closing the iterator hangs up.
        """
        if not leg.stream:
            yield await self.sample(leg)
            return
        async for chunk in self._stream(self._encode(leg)):
            yield chunk

    async def sample(self, leg: LegRequest) -> LegChunk:
        """A whole leg by one plain call, without the cost of an iterator; errors as `generate`."""
        raw = await self._generate(self._encode(leg))
        return answers.chunk_of(answers.decode_answer(raw), 0)

    async def score(self, token_ids: TokenIds, extra_key: str) -> list[float]:
        """Log-probs of all of `token_ids` but the first, under the engine's current weights."""
        self._check(token_ids)
        body = _GenerateBody(
            input_ids=token_ids,
            sampling_params=_Sampling(max_new_tokens=0),
            return_logprob=True,
            logprob_start_len=0,
            extra_key=extra_key,
        )
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                raw = await self._generate(_encoder.encode(body))
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url}: {_line(error)} while scoring") from None
        return answers.scores_of(answers.decode_answer(raw))

    async def abort(self, rid: str) -> None:
        """End `rid` with what it has; no effect, and no error, if the engine does not know it."""
        await self._post("/abort_request", {"rid": rid}, READ_TIMEOUT_S)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating; what comes from now on waits for `resume`."""
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Generate again; no effect if the engine is not paused."""
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def flush(self) -> None:
        """Forget all prefixes; EngineRefused while requests run."""
        await self._post("/flush_cache", {}, CONTROL_TIMEOUT_S)

    async def update_from_disk(self, path: Path, policy_version: int) -> None:
        """Load the weights in folder `path` as `policy_version`; prefixes are forgotten."""
        body = {
            "model_path": str(path),
            "weight_version": str(policy_version),
            "flush_cache": True,
        }
        raw = await self._post("/update_weights_from_disk", body, CONTROL_TIMEOUT_S)
        told = answers.update_of(raw)
        if told:
            raise EngineRefused(f"{self.url}: cannot load {path}: {told}")

    async def model_info(self) -> ModelInfo:
        """What it serves; answered also while paused."""
        return answers.model_info_of(await self._get("/model_info"))

    async def server_info(self) -> dict[str, Any]:
        """How it was started; for `incremental_streaming_output` and the like."""
        return answers.server_info_of(await self._get("/server_info"))

    async def loads(self) -> EngineLoad:
        """How busy it is; answered also while paused."""
        return answers.load_of(await self._get("/v1/loads"))

    def _encode(self, leg: LegRequest) -> bytes:
        self._check(leg.input_ids)
        params = leg.params
        sampling = _Sampling(
            max_new_tokens=leg.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=params.stop_token_ids,
            sampling_seed=params.seed,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
        )
        input_ids = leg.input_ids
        body = _GenerateBody(
            input_ids=input_ids.tolist() if isinstance(input_ids, array) else input_ids,
            sampling_params=sampling,
            rid=leg.rid,
            return_logprob=True,
            stream=leg.stream,
            extra_key=leg.extra_key,
        )
        return _encoder.encode(body)

    def _check(self, token_ids: TokenIds) -> None:
        if isinstance(token_ids, msgspec.Raw):
            return
        if not len(token_ids):
            raise EngineRefused("an empty prompt cannot be continued")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise EngineRefused(f"a token id is not below the vocabulary size {self._vocab_size}")

    async def _generate(self, body: bytes) -> bytes:
        try:
            async with self._session.post(self._generate_url, data=body, headers=_JSON) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self.url}: {_line(error)}") from None
        if response.status != 200:
            raise self._refusal(response.status, raw)
        return raw

    async def _stream(self, body: bytes) -> AsyncIterator[LegChunk]:
        num_seen = 0
        is_finished = False
        try:
            async with self._session.post(self._generate_url, data=body, headers=_JSON) as response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.read())
                # Read to its very end, or the connection could not be used again.
                async for answer in _events(response.content, self.url):
                    chunk = answers.chunk_of(answer, num_seen)
                    num_seen += len(chunk.token_ids)
                    is_finished = chunk.finish is not None
                    yield chunk
        except (aiohttp.ClientError, OSError) as error:
            if not is_finished:
                raise EngineUnavailable(f"{self.url}: {_line(error)}") from None
        if not is_finished:
            raise EngineUnavailable(f"{self.url}: the stream was cut")

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> bytes:
        return await self._call("POST", path, _encoder.encode(body), timeout_s)

    async def _get(self, path: str) -> bytes:
        return await self._call("GET", path, None, READ_TIMEOUT_S)

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        url = self.url + path
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, data=body, headers=_JSON) as response,
            ):
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{url}: {_line(error)}") from None
        if response.status != 200:
            raise self._refusal(response.status, raw)
        return raw

    def _refusal(self, status: int, raw: bytes) -> EngineRefused | EngineUnavailable:
        kind = EngineRefused if answers.is_refusal(status) else EngineUnavailable
        return kind(f"{self.url}: HTTP {status}: {answers.error_text(raw)}")


async def _events(stream: aiohttp.StreamReader, url: str) -> AsyncIterator[Answer]:
    """The answers in a server-sent event stream, until its end.

    Of cumulative answers that arrive together only the newest is decoded. SGLang tells of a bad
    request by a first event with an error, where it would answer a plain call with 400.
    """
    pending = b""
    num_seen = 0
    conflates = False
    async for data in stream.iter_any():
        *events, pending = (pending + data).split(b"\n\n")
        payloads = [event[5:].strip() for event in events if event.startswith(b"data:")]
        if payloads and payloads[-1] == b"[DONE]":
            payloads.pop()
        for payload in payloads[-1:] if conflates else payloads:
            try:
                answer = answers.decode_answer(
                    payload, EngineUnavailable if num_seen else EngineRefused
                )
            except EngineError as error:
                raise type(error)(f"{url}: {error}") from None
            conflates = conflates or answers.is_cumulative(answer, num_seen)
            num_seen = answer.meta_info.completion_tokens
            yield answer


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
