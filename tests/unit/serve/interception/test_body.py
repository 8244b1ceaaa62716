"""Bodies of clients that ask before they send, over a real socket."""

import asyncio

from aiohttp import web

from rollmesh.core.process import listen
from rollmesh.serve.interception.body import read_body
from rollmesh.serve.interception.face import Face


async def handle(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await read_body(request, 1000, 10.0))


async def test_who_asks_whether_to_go_on_is_told_so_before_the_body() -> None:
    face = Face(handle, 1000, drain_s=0.1)
    address = await face.start(listen("127.0.0.1:0"))
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(3) == b"abc"
    writer.close()
    await writer.wait_closed()
    await face.stop()
