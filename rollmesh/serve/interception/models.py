"""The model list, in one shape that OpenAI's and Anthropic's clients both read.

A session has one model, the policy, under whatever name its agent asks for it. Shapes: OpenAI's
`GET /models` and Anthropic's, whose keys do not clash. Driven by edge.py.
"""

from typing import Any

import orjson


def model_list(name: str) -> bytes:
    """The one model as a list."""
    page = {"has_more": False, "first_id": name, "last_id": name}
    return orjson.dumps({"object": "list", "data": [_model(name)], **page})


def one_model(name: str) -> bytes:
    """The model under the name that was asked for."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rollmesh",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
