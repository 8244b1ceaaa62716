"""The SGLang backend: a client of one engine over SGLang's native HTTP protocol.

    plain:   head, body, end      -> on_chunk with all tokens, on_end
    stream:  head, events..., end -> on_chunk for each read that brings tokens, on_end

- A request body holds only valid token ids, since one bad id kills an SGLang server.
- Ready JSON of a prompt is sent unchanged; an image is read only when it is about to be sent.
- Each token is delivered once for either form of stream; a request ends by one on_end or on_error.
- Sources: SGLang's http_server.py, io_struct.py and tokenizer_manager.py.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollmesh.core.addresses import why_no_engine_url
from rollmesh.core.errors import (
    AddressError,
    EngineBroke,
    EngineError,
    EngineRefused,
    EngineUnavailable,
)
from rollmesh.core.logs import get_logger
from rollmesh.core.secret_files import process_engine_key
from rollmesh.core.types import SamplingParams
from rollmesh.engine import responses
from rollmesh.engine.backend import (
    CONTROL_TIMEOUT_S,
    READ_TIMEOUT_S,
    UNBOUNDED_S,
    EngineLoad,
    EngineMemory,
    EngineRequest,
    Image,
    ModelInfo,
    TokenChunk,
    TokenReceiver,
)
from rollmesh.engine.connection import Headers, HttpCall, Piece
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.responses import GenerateResponse

_IMAGE_SCHEMES = ("data:image/", "http://", "https://")


class _Sampling(msgspec.Struct, omit_defaults=True):
    """SGLang's sampling_params; it answers 500 to an unknown name."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class _Body(msgspec.Struct, omit_defaults=True):
    """All fields of a request but its ids."""

    sampling_params: _Sampling
    return_logprob: bool
    rid: str = ""
    stream: bool = False
    extra_key: str = ""
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    lora_path: str = ""


_encoder = msgspec.json.Encoder()


def encode_request(request: EngineRequest, vocab_size: int) -> list[Piece]:
    """Return the body of a request in pieces; EngineRefused for an invalid id or an empty
    prompt."""
    pieces: list[Piece] = [
        b'{"input_ids":[',
        request.prompt_json or _ids_json(request.prompt_ids, vocab_size),
    ]
    if len(request.sampled_ids):
        pieces += (b",", _ids_json(request.sampled_ids, vocab_size))
    body = _Body(
        sampling_params=_sampling_of(request.params, request.max_new_tokens),
        return_logprob=True,
        rid=request.rid,
        stream=request.stream,
        extra_key=request.extra_key,
        top_logprobs_num=request.num_top_logprobs,
        lora_path=request.adapter,
    )
    pieces.append(b"],")
    if request.images:
        pieces += _images_json(request.images)
    pieces.append(_encoder.encode(body)[1:])
    return pieces


def encode_score(
    token_ids: Sequence[int], extra_key: str, vocab_size: int, adapter: str = ""
) -> list[bytes]:
    """Return a body that asks for log-probs of `token_ids` and samples nothing; errors as in
    `encode_request`."""
    body = _Body(
        sampling_params=_Sampling(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=0,
        extra_key=extra_key,
        lora_path=adapter,
    )
    ids = _ids_json(token_ids, vocab_size)
    return [b'{"input_ids":[', ids, b"],", _encoder.encode(body)[1:]]


def _sampling_of(params: SamplingParams, max_new_tokens: int) -> _Sampling:
    sampling = _Sampling(
        max_new_tokens=max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=params.stop_token_ids,
        sampling_seed=params.seed,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
    )
    if params.min_p:
        sampling.min_p = params.min_p
    if params.logit_bias:
        sampling.logit_bias = {str(token): bias for token, bias in params.logit_bias}
    if params.grammar:
        setattr(sampling, params.grammar.kind, params.grammar.text)
    return sampling


def _images_json(images: Sequence[Image]) -> list[Piece]:
    pieces: list[Piece] = []
    glue = b'"image_data":['
    for image in images:
        if not isinstance(image, str):
            pieces += (glue + b'"', image)
            glue = b'",'
        elif image.startswith(_IMAGE_SCHEMES):
            pieces.append(glue + _encoder.encode(image))
            glue = b","
        else:
            # SGLang would open it as a file on its own machine.
            raise EngineRefused("an image must have a data: or http(s) address")
    pieces.append(glue.removesuffix(b",") + b"],")
    return pieces


def _ids_json(token_ids: Sequence[int], vocab_size: int) -> bytes:
    if not len(token_ids):
        raise EngineRefused("an empty prompt cannot be continued")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise EngineRefused(f"a token id is not below the vocabulary size {vocab_size}")
    return _encoder.encode(list(token_ids))[1:-1]


class BatchResponse:
    """Parses the HTTP response to one engine request and passes its tokens to `receiver`."""

    __slots__ = (
        "_call",
        "_is_finished",
        "_num_seen",
        "_on_cumulative",
        "_pieces",
        "_receiver",
        "_status",
        "_url",
        "_vocab_size",
    )

    def __init__(
        self, url: str, receiver: TokenReceiver, on_cumulative: Callable[[], None], vocab_size: int
    ) -> None:
        """`on_cumulative` is called if events of a stream repeat earlier tokens."""
        self._url = url
        self._receiver = receiver
        self._on_cumulative = on_cumulative
        self._vocab_size = vocab_size
        self._call: HttpCall | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        """Body parts of a response that is parsed as a whole."""
        self._num_seen = 0
        self._is_finished = False

    def attend(self, call: HttpCall) -> None:
        """Set the HTTP call of this response; it is closed if the response is invalid."""
        self._call = call

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_end(self) -> None:
        try:
            if self._status != 200:
                raw = b"".join(self._pieces)
                raise responses.error_of(self._status, raw, is_generation=True)
            self._finish()
        except EngineError as error:
            self._fail(error)
        else:
            self._receiver.on_end()

    def on_error(self, error: EngineUnavailable) -> None:
        if self._is_finished:
            # Everything was delivered before the connection broke.
            self._receiver.on_end()
        else:
            self._receiver.on_error(self._broken(str(error)) if self._status == 200 else error)

    def _broken(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(why) if self._num_seen else EngineBroke(why)

    def _finish(self) -> None:
        chunk = responses.chunk_of(responses.decode_response(b"".join(self._pieces)), 0)
        if chunk.finish is None:
            raise EngineUnavailable("answered without a finish reason")
        self._deliver(chunk)

    def _deliver(self, chunk: TokenChunk) -> None:
        token_ids = chunk.token_ids
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            why = f"sent token ids of {self._vocab_size} or more; does it serve this model?"
            raise EngineUnavailable(why)
        self._num_seen += len(token_ids)
        self._is_finished = chunk.finish is not None
        self._receiver.on_chunk(chunk)

    def _fail(self, error: EngineError) -> None:
        if self._call:
            self._call.close()
        self._receiver.on_error(type(error)(f"{self._url}: {error}"))


class StreamResponse(BatchResponse):
    """Parses a response that is a stream of events."""

    __slots__ = ("_pending",)

    def __init__(
        self, url: str, receiver: TokenReceiver, on_cumulative: Callable[[], None], vocab_size: int
    ) -> None:
        super().__init__(url, receiver, on_cumulative, vocab_size)
        self._pending = b""
        """An incomplete event."""

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            super().on_data(data)
            return
        if self._pending:
            data = self._pending + data
        end = data.rfind(b"\n\n")
        if end < 0:
            self._pending = data
            return
        self._pending = data[end + 2 :]
        events = data[:end].split(b"\n\n")
        if events[-1].endswith(b"[DONE]"):
            events.pop()
        try:
            for chunk in self._read(events):
                self._deliver(chunk)
        except EngineError as error:
            self._fail(error)

    def _read(self, events: list[bytes]) -> list[TokenChunk]:
        """Decode events into one chunk for each version of the weights.

        Events are decoded from the newest backwards until no token is missing, so that of several
        cumulative events only one is decoded.
        """
        # SGLang reports a bad request by a first event; a plain call would get 400.
        is_first = not self._num_seen and len(events) == 1
        error = EngineRefused if is_first else EngineUnavailable
        opened: list[GenerateResponse] = []
        for event in reversed(events):
            if event.startswith(b"data:"):
                answer = responses.decode_response(event[5:], error)
                opened.append(answer)
                if answer.num_before <= self._num_seen:
                    break
        if self._num_seen and opened and opened[-1].output_ids and not opened[-1].num_before:
            self._on_cumulative()
        return responses.chunks_of(opened[::-1], self._num_seen)

    def _finish(self) -> None:
        if not self._is_finished:
            raise self._broken("the stream was cut")


_JSON = (("Content-Type", "application/json"),)

log = get_logger()


class SglangBackend:
    """A client of the engine at `url` over a shared `http`."""

    def __init__(
        self,
        url: str,
        http: HttpClient,
        vocab_size: int = 2**31,
        key: str | None = None,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """Arguments and errors: see `BackendFactory`."""
        if why := why_no_engine_url(url):
            raise AddressError(f"{url[:200]!a}: {why}")
        self.url = url.rstrip("/")
        self._http = http
        self._vocab_size = vocab_size
        self._control_timeout_s = control_timeout_s
        self._read_timeout_s = read_timeout_s
        key = process_engine_key() if key is None else key
        bearer = (("Authorization", f"Bearer {key}"),) if key else ()
        self._headers = (*_JSON, *bearer)
        self._generate_target = target("POST", f"{self.url}/generate", self._headers)
        self._has_warned = False
        self.memory: EngineMemory = _Memory(lambda path: self._post(path, {}, UNBOUNDED_S))

    def generate(self, request: EngineRequest, receiver: TokenReceiver) -> HttpCall:
        body = encode_request(request, self._vocab_size)
        kind = StreamResponse if request.stream else BatchResponse
        answer = kind(self.url, receiver, self._on_cumulative, self._vocab_size)
        call = self._http.send(self._generate_target, body, answer)
        answer.attend(call)
        return call

    async def score(
        self, token_ids: Sequence[int], extra_key: str, adapter: str = ""
    ) -> list[float]:
        body = encode_score(token_ids, extra_key, self._vocab_size, adapter)
        raw = await self._call("POST", "/generate", body, self._control_timeout_s)
        return responses.scores_of(responses.decode_response(raw))

    async def abort(self, rid: str) -> None:
        await self._post("/abort_request", {"rid": rid}, READ_TIMEOUT_S)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def flush(self) -> None:
        await self._post("/flush_cache", {})

    async def command(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> None:
        why = responses.update_error(await self._post(path, body, timeout_s))
        if why:
            raise EngineRefused(f"{self.url}: {path}: {why}")

    async def update_from_disk(
        self, path: Path, policy_version: int, timeout_s: float | None = None
    ) -> None:
        body = {
            "model_path": str(path),
            "weight_version": str(policy_version),
            "flush_cache": True,
        }
        raw = await self._post("/update_weights_from_disk", body, timeout_s)
        why = responses.update_error(raw)
        if why:
            raise EngineRefused(f"{self.url}: cannot load {path}: {why}")

    async def load_adapter(self, name: str, path: Path) -> None:
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    async def unload_adapter(self, name: str) -> None:
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        try:
            return responses.adapters_of(await self._get("/v1/models"))
        except EngineRefused:
            return []

    async def model_info(self) -> ModelInfo:
        return responses.model_info_of(await self._get("/model_info"))

    async def server_info(self) -> dict[str, Any]:
        return responses.server_info_of(await self._get("/server_info"))

    async def loads(self) -> EngineLoad:
        return responses.load_of(await self._get("/v1/loads"))

    def _on_cumulative(self) -> None:
        """Warn once that this engine's streams are cumulative."""
        if not self._has_warned:
            self._has_warned = True
            remedy = "start the engine with --incremental-streaming-output"
            log.warning("engine.streams_cumulatively", url=self.url, remedy=remedy)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> bytes:
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        return await self._call("POST", path, [msgspec.json.encode(body)], timeout_s)

    async def _get(self, path: str) -> bytes:
        return await self._call("GET", path, (), self._read_timeout_s)

    async def _call(self, method: str, path: str, body: Sequence[bytes], timeout_s: float) -> bytes:
        to = target(method, self.url + path, self._headers)
        response = await self._http.fetch(to, body, timeout_s=timeout_s)
        if response.status != 200:
            error = responses.error_of(response.status, response.body)
            raise type(error)(f"{self.url}: {error}")
        return response.body


class _Memory:
    """Frees and allocates one engine's memory."""

    def __init__(self, post: Callable[[str], Awaitable[bytes]]) -> None:
        self._post = post

    async def release(self) -> None:
        await self._post("/release_memory_occupation")

    async def resume(self) -> None:
        await self._post("/resume_memory_occupation")
