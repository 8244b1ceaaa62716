"""The baseline: an aiohttp proxy that parses and records nothing.

    python -m benchmarks.lib.proxy --engine URL --ready-fd N

It is configured as for production: uvloop, kept connections without a limit, no access log.
"""

import argparse
import asyncio
import os

import aiohttp
import uvloop
from aiohttp import web

from rollmesh.core.process import Ready, announce, die_with_parent, http_address, listen


async def proxy(engine: str, ready_fd: int | None) -> None:
    """Forward every request unchanged, and answers as they arrive."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await forward(request)
        except ConnectionError:
            # The client is gone, and aiohttp would log its traceback.
            return web.Response()

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.post(engine + request.path, data=body, headers=headers) as answer:
            if answer.content_type != "text/event-stream":
                return web.Response(body=await answer.read(), content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listening = listen("127.0.0.1:0")
    await web.SockSite(runner, listening, backlog=1024).start()
    announce(ready_fd, Ready("bare", os.getpid(), http_address(listening)))
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.proxy")
    arguments.add_argument("--engine", required=True)
    arguments.add_argument("--ready-fd", type=int)
    options = arguments.parse_args()
    die_with_parent()
    uvloop.run(proxy(options.engine, options.ready_fd))


if __name__ == "__main__":
    main()
