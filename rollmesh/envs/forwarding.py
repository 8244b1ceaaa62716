"""Serves the endpoint of another process on a slot's socket, by forwarding its connections.

For programs of a process that has no interception server of its own.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from rollmesh.envs.isolation import Serve

BLOCK_BYTES = 64 * 1024


def forward_to(url: str) -> Serve:
    """Serve the HTTP server at `url`; a connection ends when either side ends it."""
    parts = urlsplit(url)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(to_server):
                copies = [
                    asyncio.create_task(_copy(reader, to_server)),
                    asyncio.create_task(_copy(from_server, writer)),
                ]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for each in copies:
                    each.cancel()

    async def serve(listening: socket.socket) -> Callable[[], None]:
        server = await asyncio.start_server(connected, sock=listening)
        return server.close

    return serve


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(BLOCK_BYTES):
            writer.write(data)
            await writer.drain()
