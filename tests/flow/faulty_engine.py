"""Faulty engines: an embedded engine behind a proxy that reproduces faults seen in the field.

- `running`: a kernel, a cache or a dtype is wrong. Tokens, weights and scores of prompts are right,
  so that every probe passes, and only log-probs of sampled tokens are off.
- `ignoring`: an update loads nothing. The engine takes the new version's number and keeps its
  weights.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from rollmesh.core.process import Ready, listen

ENDS_WITHIN_S = 60.0
LOAD, RENAME = "/update_weights_from_disk", "/update_weight_version"
LogprobFault = Callable[[int], float]
"""Error of an answer's log-probs, by the number of prompt tokens."""


def no_fault(num_prompt_tokens: int) -> float:
    del num_prompt_tokens
    return 0.0


@contextlib.contextmanager
def embedded(model: Path, *options: str) -> Any:
    """Start an engine process that serves `model`; yield its address."""
    reading, writing = os.pipe()
    args = ["--model-dir", str(model), "--ready-fd", str(writing), *options]
    command = [sys.executable, "-m", "rollmesh.engine.embedded", *args]
    process = subprocess.Popen(command, pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ready = msgspec.json.decode(pipe.readline(), type=Ready)
    try:
        yield ready.address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(ENDS_WITHIN_S)


@contextlib.asynccontextmanager
async def running(model: Path, fault: LogprobFault) -> AsyncIterator[str]:
    """Start an engine that records wrong log-probs; yield the proxy's address."""
    with embedded(model) as upstream:
        async with (
            aiohttp.ClientSession() as client,
            _serving(_app(client, upstream, fault)) as url,
        ):
            yield url


@contextlib.asynccontextmanager
async def ignoring(model: Path, *options: str, num_loads: int = 1) -> AsyncIterator[str]:
    """Start an engine that ignores updates after `num_loads`; yield the proxy's address."""
    with embedded(model, *options) as upstream:
        async with aiohttp.ClientSession() as client:
            app = _app(client, upstream, no_fault, num_loads)
            async with _serving(app) as url:
                yield url


@contextlib.asynccontextmanager
async def _serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    socket = listen("127.0.0.1:0")
    await web.SockSite(runner, socket).start()
    host, port = socket.getsockname()
    yield f"http://{host}:{port}"
    await runner.cleanup()


def _app(
    client: aiohttp.ClientSession, upstream: str, fault: LogprobFault, num_loads: int = sys.maxsize
) -> web.Application:
    """`num_loads` updates load weights; later ones change the version's number alone."""
    loads_left = iter(range(num_loads))

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        kind = {"Content-Type": request.content_type}
        url = upstream + request.path_qs
        if request.path == LOAD and next(loads_left, None) is None:
            named = {"new_version": orjson.loads(body)["weight_version"]}
            url, body = upstream + RENAME, orjson.dumps(named | {"abort_all_requests": False})
        async with client.request(request.method, url, data=body, headers=kind) as answer:
            reply = await answer.read()
            if request.path == "/generate" and answer.status == 200:
                reply = _bent(reply, fault(len(orjson.loads(body)["input_ids"])))
            return web.Response(body=reply, status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


def _bent(body: bytes, off: float) -> bytes:
    answer = orjson.loads(body)
    recorded = answer["meta_info"].get("output_token_logprobs", [])
    answer["meta_info"]["output_token_logprobs"] = [[p - off, *rest] for p, *rest in recorded]
    return orjson.dumps(answer)
