"""Baseline of the tensor benchmark: the format of the system that introduced RTensor, HTTP with
base64 in JSON.

- The owner answers `POST /data/batch {shard_ids}` with `{type, data, shape, dtype}` for each shard;
  the consumer opens a session per call, requests 32 shards at a time, and copies what it decodes.
- Without its other costs: Flask, pydantic records, and bf16 sent as float32. It is as fast as these
  few lines allow, so that any difference is due to the format.
"""

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from benchmarks.lib.tensor_protocol import Bytes, HeldBytes, Piece, Stored, sum_of
from rollmesh.core.process import http_address, listen

MAX_SHARDS = 32
"""Per request."""


class PioneerOwner:
    """A dictionary, and an HTTP server in a thread."""

    def __init__(self) -> None:
        self._pieces: Sequence[Piece] = ()
        self._shards: dict[str, Piece] = {}
        self._listening = listen("127.0.0.1:0")
        threading.Thread(target=self._serve, name="pioneer", daemon=True).start()

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Keep the arrays unchanged."""
        self._pieces = pieces

    def publish(self) -> None:
        """Store without a copy: a CPU tensor is stored unchanged."""
        self._shards = {str(number): piece for number, piece in enumerate(self._pieces)}

    def take(self, step: int) -> Stored:
        """Return the shard ids as handles."""
        del step
        return Stored(http_address(self._listening), orjson.dumps(list(self._shards)))

    def end_step(self, step: int) -> None:
        """Drop all shards."""
        del step
        self._shards, self._pieces = {}, ()

    def held(self) -> HeldBytes:
        """Count the stored shards."""
        return HeldBytes(len(self._shards), sum(each.data.nbytes for each in self._shards.values()))

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()

    def _serve(self) -> None:
        asyncio.run(self._serve_http())

    async def _serve_http(self) -> None:
        app = web.Application()
        app.router.add_post("/data/batch", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._listening).start()
        await asyncio.Event().wait()

    async def _answer(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        shards = [
            {
                "type": "tensor",
                "data": base64.b64encode(piece.data.tobytes()).decode(),
                "shape": piece.shape,
                "dtype": piece.dtype,
            }
            for piece in (self._shards[each] for each in asked["shard_ids"])
        ]
        return web.Response(body=orjson.dumps(shards), content_type="application/octet-stream")


class PioneerConsumer:
    """An event loop and a session for each call."""

    def __init__(self) -> None:
        self._address = ""

    def prepare(self, stored: Stored) -> list[str]:
        """Return the shard ids."""
        self._address = stored.address
        ids: list[str] = orjson.loads(stored.handles)
        return ids

    def fetch(self, items: list[str]) -> list[Bytes]:
        """Fetch all shards, 32 per request."""
        return asyncio.run(self._fetch(items))

    async def _fetch(self, items: list[str]) -> list[Bytes]:
        arrays: list[Bytes] = []
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            for start in range(0, len(items), MAX_SHARDS):
                body = orjson.dumps({"shard_ids": items[start : start + MAX_SHARDS]})
                async with session.post(f"{self._address}/data/batch", data=body) as answer:
                    answer.raise_for_status()
                    arrays += map(_decode, orjson.loads(await answer.read()))
        return arrays

    def sum_of(self, array: Bytes) -> int:
        """Sum of the 64-bit words."""
        return sum_of(array)

    def end_step(self, step: int) -> None:
        """Free nothing."""

    def held(self) -> HeldBytes:
        """Count nothing."""
        return HeldBytes()

    def close(self) -> None:
        """Do nothing: no connection is open between calls."""


def _decode(shard: dict[str, Any]) -> Bytes:
    return np.frombuffer(base64.b64decode(shard["data"]), np.uint8).copy()
