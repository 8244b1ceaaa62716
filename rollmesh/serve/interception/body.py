"""Reading a request's body within limits of size and silence.

Invariant: a body over the limit is refused by what its head says, or once the limit is passed,
never after it was read whole; a sender that falls silent does not hold us. Driven by exchange.py
and by the relay.
"""

import asyncio

import aiohttp
from aiohttp import web

from rollmesh.core.errors import SessionError


async def read_body(request: web.BaseRequest, max_bytes: int, silence_s: float) -> bytes:
    """The body; SessionError 413 if it is too long, 408 if it stops coming, 400 if it breaks."""
    content = request.content
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    if "Expect" in request.headers and request.transport is not None:
        # aiohttp leaves this to routes, which we have none of; curl waits a second for it.
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        if content.is_eof():
            chunks.append(content.read_nowait())
        while not content.at_eof():
            async with asyncio.timeout(silence_s):
                chunks.append(await content.readany())
            num_bytes += len(chunks[-1])
            if num_bytes > max_bytes:
                break
    except TimeoutError:
        raise SessionError(408, "body_timeout", "the body stopped coming") from None
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, web.RequestPayloadError):
        raise SessionError(400, "invalid_body", "the body breaks off or is garbled") from None
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _too_large(max_bytes: int) -> SessionError:
    return SessionError(413, "body_too_large", f"the body is longer than {max_bytes} bytes")
