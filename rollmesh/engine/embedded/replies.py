"""JSON in and out of a route: bodies are read by their type, answers are SGLang's.

Invariant: a body that is not what a route takes is refused in one line, as a 400. Driven by the
routes.
"""

from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web

from rollmesh.core.errors import DECODE_ERRORS, EngineRefused

Body = TypeVar("Body")


def reply(value: Any, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def told(message: str, failure: str = "", **more: Any) -> web.Response:
    """Whether something succeeded, as SGLang says it: 400 with the reason where it did not."""
    said = {"success": not failure, "message": failure or message, **more}
    return reply(said, 400 if failure else 200)


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """A JSON body as `kind`; EngineRefused in one line if it is not one."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise EngineRefused(f"bad request: {error}") from None
