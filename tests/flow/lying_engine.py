"""An engine that samples honestly and records wrongly: one as embedded, behind a proxy that lies.

Stands for what engines do wrong in the field (a kernel, a cache, a dtype): tokens and weights are
right, scores of prompts too, so that every probe is passed, and only the log-probs of what is
sampled are off. Owns the process and the proxy from `running` on. Driven by test_meter.py.
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
Lie = Callable[[int], float]
"""How far off the log-probs of an answer are, by the number of prompt tokens."""


def honest(num_prompt_tokens: int) -> float:
    del num_prompt_tokens
    return 0.0


@contextlib.contextmanager
def embedded(model: Path) -> Any:
    """The address of an engine process that serves `model`."""
    reading, writing = os.pipe()
    words = ["--model-dir", str(model), "--ready-fd", str(writing)]
    command = [sys.executable, "-m", "rollmesh.engine.embedded", *words]
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
async def running(model: Path, lie: Lie) -> AsyncIterator[str]:
    """Its address, which is the proxy's."""
    with embedded(model) as upstream:
        async with aiohttp.ClientSession() as client:
            runner = web.AppRunner(_app(client, upstream, lie))
            await runner.setup()
            socket = listen("127.0.0.1:0")
            await web.SockSite(runner, socket).start()
            host, port = socket.getsockname()
            yield f"http://{host}:{port}"
            await runner.cleanup()


def _app(client: aiohttp.ClientSession, upstream: str, lie: Lie) -> web.Application:
    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        kind = {"Content-Type": request.content_type}
        url = upstream + request.path_qs
        async with client.request(request.method, url, data=body, headers=kind) as answer:
            told = await answer.read()
            if request.path == "/generate" and answer.status == 200:
                told = _bent(told, lie(len(orjson.loads(body)["input_ids"])))
            return web.Response(body=told, status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


def _bent(told: bytes, off: float) -> bytes:
    answer = orjson.loads(told)
    recorded = answer["meta_info"].get("output_token_logprobs", [])
    answer["meta_info"]["output_token_logprobs"] = [[p - off, *rest] for p, *rest in recorded]
    return orjson.dumps(answer)
