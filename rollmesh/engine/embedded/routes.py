"""HTTP routes of the embedded engine: SGLang's native protocol over the step loop.

- `docs/reference/engine.md` lists the deliberate differences from SGLang.
- `serve` alone turns errors into replies; a client that disconnects aborts its requests.
- aiohttp's low-level server saves the cost of an application per call.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from rollmesh.core.errors import EngineRefused
from rollmesh.core.ids import new_id
from rollmesh.engine.embedded.engine import Engine, PauseMode, ProgressReader, StepLoop
from rollmesh.engine.embedded.http import Guard, read_body, reply
from rollmesh.engine.embedded.request import FinishReason, Progress
from rollmesh.engine.embedded.request_parser import (
    GenerateBody,
    ParsedBody,
    PromptRequest,
    RequestParser,
    SamplingBody,
)
from rollmesh.engine.embedded.responses import ResponseBuilder, ResponseJson
from rollmesh.engine.embedded.shaping import GrammarRefused
from rollmesh.engine.embedded.weight_routes import AdapterRoutes, MemoryRoutes, WeightRoutes
from rollmesh.engine.responses import one_line
from rollmesh.engine.shared_memory import LOAD_FORMAT

_DONE = b"data: [DONE]\n\n"
_IN_STREAM = {"type": "invalid_request_error", "code": 400, "retryable": False}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT


class ServerInfo(msgspec.Struct, frozen=True):
    """Facts that the server reports about itself, and the form of its responses."""

    model_path: str
    tokenizer: Tokenizer | None
    """For text in requests and responses; None for neither."""
    is_incremental: bool
    """Streamed events hold new tokens only (SGLang's --incremental-streaming-output)."""
    random_seed: int
    """Seed of the seeds of requests that name none."""


class Routes:
    """Handlers by method and path."""

    def __init__(
        self,
        steps: StepLoop,
        engine: Engine,
        decoder: RequestParser,
        info: ServerInfo,
        guard: Guard | None = None,
    ) -> None:
        self._steps = steps
        self._engine = engine
        self._decoder = decoder
        self._info = info
        self._guard = guard or Guard()
        self._weights = WeightRoutes(steps, engine, info.model_path, self._guard)
        self._adapters = AdapterRoutes(steps, engine, decoder.adapters)
        self._incarnation = new_id("e")
        self._handlers: dict[str, dict[str, Handler]] = {
            "/generate": {"POST": self._generate, "PUT": self._generate},
            "/abort_request": {"POST": self._abort},
            "/pause_generation": {"POST": self._pause},
            "/continue_generation": {"POST": self._continue},
            "/flush_cache": {"POST": self._flush, "GET": self._flush},
            "/model_info": {"GET": self._model_info},
            "/get_model_info": {"GET": self._model_info},
            "/server_info": {"GET": self._server_info},
            "/get_server_info": {"GET": self._server_info},
            "/v1/loads": {"GET": self._loads},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/health_generate": {"GET": self._health_generate},
            **self._weights.handlers(),
            **self._adapters.handlers(),
            **MemoryRoutes(steps, self._weights).handlers(),
        }

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request; refusals become replies here."""
        if refused := self._guard.refusal(request):
            return refused
        handlers = self._handlers.get(request.path)
        if handlers is None:
            return reply({"detail": "Not Found"}, status=404)
        handler = handlers.get(request.method)
        if handler is None:
            return reply({"detail": "Method Not Allowed"}, status=405)
        try:
            return await handler(request)
        except EngineRefused as error:
            return reply(refusal(error), status=400)
        except web.RequestPayloadError as error:
            why = EngineRefused(f"the body cannot be read: {one_line(str(error))}")
            return reply(refusal(why), status=400)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = self._decoder.read(await request.read())
        try:
            parsed = self._accepted(body)
        except EngineRefused as error:
            if not body.stream:
                raise
            return await refuse_in_stream(request, error)
        readers = [self._steps.submit(each.request) for each in parsed.requests]
        try:
            if parsed.streams:
                return await self._stream(request, parsed, readers)
            settled = [await reader.next() for reader in readers]
            refused = [p.finish for p in settled if p.finish and p.finish.status_code]
            if refused:
                return queue_full_reply(refused[0])
            answers = [
                self._responder(each, False).answer(progress)
                for each, progress in zip(parsed.requests, settled, strict=True)
            ]
            return reply(answers if parsed.is_list else answers[0])
        finally:
            for reader in readers:
                self._steps.leave(reader)

    def _accepted(self, body: GenerateBody) -> ParsedBody:
        encode = None if self._info.tokenizer is None else self._encode_text
        parsed = self._decoder.decode(body, encode)
        rids = [each.request.rid for each in parsed.requests]
        taken = [rid for rid in rids if self._steps.knows(rid) or rids.count(rid) > 1]
        if taken:
            raise EngineRefused(f"Duplicate request ID detected: {taken[0]}")
        return parsed

    async def _stream(
        self, request: web.BaseRequest, parsed: ParsedBody, readers: list[ProgressReader]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        streams = [
            self._events(each, reader)
            for each, reader in zip(parsed.requests, readers, strict=True)
        ]
        try:
            if parsed.is_list:
                await write_interleaved(response, streams)
            else:
                await write_events(response, streams[0])
        except* ConnectionResetError:
            pass  # the client has disconnected; _generate aborts its requests
        return response

    async def _events(
        self, prompt: PromptRequest, reader: ProgressReader
    ) -> AsyncIterator[ResponseJson]:
        """Yield a response for all progress since the last one, until the request ends."""
        builder = self._responder(prompt, self._info.is_incremental)
        progress: Progress | None = None
        while progress is None or progress.finish is None:
            progress = await reader.next()
            yield builder.answer(progress)

    def _responder(self, prompt: PromptRequest, is_incremental: bool) -> ResponseBuilder:
        return ResponseBuilder(prompt, self._info.tokenizer, is_incremental)

    def _encode_text(self, text: str) -> list[int]:
        assert self._info.tokenizer is not None
        ids: list[int] = self._info.tokenizer.encode(text).ids
        return ids

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), AbortBody)
        if body.abort_all or body.rid:
            self._steps.abort(None if body.abort_all else body.rid)
        return web.Response()

    async def _pause(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), PauseBody)
        await self._steps.call(lambda engine: engine.pause(body.mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _request: web.BaseRequest) -> web.StreamResponse:
        await self._steps.call(lambda engine: engine.resume())
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, _request: web.BaseRequest) -> web.StreamResponse:
        if await self._steps.call(lambda engine: engine.flush()):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def _model_info(self, _request: web.BaseRequest) -> web.StreamResponse:
        architecture = self._engine.runner.model.architecture
        return reply(
            {
                "model_path": self._weights.model_path,
                "served_model_name": self._weights.model_path,
                "tokenizer_path": self._info.model_path,
                "is_generation": True,
                "weight_version": self._engine.policy_version,
                "model_type": architecture.family,
                "architectures": [architecture.name],
            }
        )

    async def _server_info(self, _request: web.BaseRequest) -> web.StreamResponse:
        limits = self._engine.limits
        return reply(
            {
                "model_path": self._weights.model_path,
                "served_model_name": self._weights.model_path,
                "version": "rollmesh-embedded",
                "incarnation": self._incarnation,
                "weight_version": self._engine.policy_version,
                "memory_occupation": self._engine.occupation.value,
                "context_length": self._engine.runner.model.architecture.max_context,
                "incremental_streaming_output": self._info.is_incremental,
                "weight_load_formats": [LOAD_FORMAT],
                "skip_tokenizer_init": self._info.tokenizer is None,
                "max_total_num_tokens": limits.num_slots,
                "max_running_requests": limits.max_running,
                "max_queued_requests": limits.max_queued,
                "chunked_prefill_size": limits.max_step_tokens,
                "random_seed": self._info.random_seed,
                "pid": os.getpid(),
                "internal_states": [],
            }
        )

    async def _loads(self, _request: web.BaseRequest) -> web.StreamResponse:
        # Plain counters of the step loop; slight skew is harmless.
        scheduler, memory = self._engine.scheduler, self._engine.memory
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": memory.num_held,
            "max_total_num_tokens": memory.num_slots,
            "max_running_requests": self._engine.limits.max_running,
            "token_usage": memory.num_held / memory.num_slots,
            "queues": {"waiting": len(scheduler.waiting)},
            "total_prefill_uncached_tokens": self._engine.runner.num_computed_tokens,
        }
        return reply({"timestamp": time.time(), "version": "rollmesh-embedded", "loads": [load]})

    async def _models(self, _request: web.BaseRequest) -> web.StreamResponse:
        model = {
            "id": self._weights.model_path,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "rollmesh",
            "root": self._weights.model_path,
            "max_model_len": self._engine.runner.model.architecture.max_context,
        }
        adapters = self._adapters.cards(self._weights.model_path)
        return reply({"object": "list", "data": [model, *adapters]})

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        await self._steps.call(lambda engine: engine.run_state)
        return web.Response()

    async def _health_generate(self, _request: web.BaseRequest) -> web.StreamResponse:
        params = SamplingBody(max_new_tokens=1, temperature=0)
        prompt = self._decoder.decode(GenerateBody(input_ids=[0], sampling_params=params)).requests[
            0
        ]
        await self._steps.submit(prompt.request).next()
        return web.Response()


async def begin_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Send the head of an event stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def refuse_in_stream(request: web.BaseRequest, error: EngineRefused) -> web.StreamResponse:
    """Send a refusal of a streamed request as SGLang does: in the first event, after a 200.

    SGLang compiles a grammar after accepting the request, so such a refusal looks like an abort.
    """
    event: ResponseJson = {"error": {**refusal(error)["error"], **_IN_STREAM}}
    if isinstance(error, GrammarRefused):
        abort = FinishReason("abort", message=str(error), status_code=400).as_json()
        meta = {"id": "", "finish_reason": abort, "completion_tokens": 0, "weight_version": ""}
        event = {"text": "", "output_ids": [], "meta_info": meta}
    response = await begin_stream(request)
    await response.write_eof(frame(event) + _DONE)
    return response


async def write_events(response: web.StreamResponse, events: AsyncIterator[ResponseJson]) -> None:
    """Write the events of one prompt; the last one and the end of the stream share a packet."""
    async for event in events:
        if event["meta_info"]["finish_reason"] is None:
            await response.write(frame(event))
        else:
            await response.write_eof(frame(event) + _DONE)


async def write_interleaved(
    response: web.StreamResponse, streams: list[AsyncIterator[ResponseJson]]
) -> None:
    """Write the events of several prompts as they come, each with its prompt's index."""

    async def pump(index: int) -> None:
        async for event in streams[index]:
            await response.write(frame({**event, "index": index}))

    async with asyncio.TaskGroup() as pumps:
        for index in range(len(streams)):
            pumps.create_task(pump(index))
    await response.write_eof(_DONE)


def frame(event: ResponseJson) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def refusal(error: EngineRefused) -> ResponseJson:
    """Return SGLang's body of a 400."""
    return {"error": {"message": str(error)}}


def queue_full_reply(finish: FinishReason) -> web.Response:
    """Return the reply to a request that was refused because the queue is full."""
    error = {
        "object": "error",
        "message": finish.message,
        "param": None,
        "code": finish.status_code,
    }
    return reply({**error, "type": str(finish.status_code)}, finish.status_code or 500)
