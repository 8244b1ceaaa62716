"""How failures are told in OpenAI's APIs.

`{"error": {"message", "type", "param", "code"}}` with the true status; clients key on `code`
(`context_length_exceeded`) and on `type`. Driven by the dialects and by edge.py.
"""

from typing import Any

import orjson

from rollmesh.core.errors import SessionError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_failure(error: SessionError) -> dict[str, Any]:
    """The error object under its key."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, default)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def openai_failure_body(error: SessionError) -> bytes:
    """The body of a failed answer."""
    return orjson.dumps(openai_failure(error))
