"""Faults of a scripted engine's `/generate`, and SGLang's answers to them.

- A fault with an answer is formatted here as SGLang does, for a plain call or a stream; the other
  faults happen on the connection, in engine.py.
"""

import enum
from typing import Any

import orjson
from aiohttp import web


class Fault(enum.Enum):
    """A fault of one call."""

    BAD_REQUEST = "answers 400"
    BAD_EVENT = "answers a stream by an error event, as SGLang does where a plain call gets 400"
    BUSY = "answers 429"
    FULL = "its queue is full: 503, or an aborted first event of a stream, as SGLang has it"
    ERROR = "answers 500"
    HANG = "takes the request and never answers"
    CUT = "closes the connection after a token"


_STATUS = {Fault.BAD_REQUEST: 400, Fault.BAD_EVENT: 400, Fault.BUSY: 429, Fault.ERROR: 500}
_FULL = {"type": "abort", "message": "The request queue is full.", "status_code": 503}


def refusal(fault: Fault, stream: bool) -> web.Response | None:
    """The HTTP answer for `fault`; None if the fault has no answer."""
    if fault is Fault.FULL:
        if stream:
            return _event({"output_ids": [], "meta_info": {"finish_reason": _FULL}})
        return _json({"detail": _FULL["message"]}, 503)
    if fault not in _STATUS:
        return None
    answer = {"error": {"message": fault.value}}
    if fault is Fault.BAD_EVENT and stream:
        return _event(answer)
    return _json(answer, _STATUS[fault])


def _event(answer: dict[str, Any]) -> web.Response:
    return web.Response(body=b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(answer))


def _json(answer: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(answer), status=status, content_type="application/json")
