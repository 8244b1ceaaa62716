"""OpenAPI 3.1 document of the agent server.

- Request schemas are generated from the structs that decode requests; additional keys are accepted.
- Every status that a route can return is listed.
"""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec
import orjson

from rollmesh.serve.interception.dialects.chat import ChatBody
from rollmesh.serve.interception.dialects.completions import CompletionBody
from rollmesh.serve.interception.dialects.messages import MessagesBody
from rollmesh.serve.interception.dialects.responses import ResponsesBody

Json = dict[str, Any]

_BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)
_ERRORS = {
    400: "the request is invalid, or longer than the context (`context_length_exceeded`)",
    401: "no session has this key",
    408: "the body stopped arriving",
    410: "the session is sealed",
    413: "the body is too long",
    429: "overloaded; retry after `Retry-After`",
    500: "an internal error",
    503: "no engine is available; retry after `Retry-After`",
}
_REFERENCE = "#/components/schemas/"


@functools.cache
def openapi_document() -> bytes:
    """Return the document as JSON."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REFERENCE + "{name}")
    bearer = {"type": "http", "scheme": "bearer"}
    key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "rollmesh",
            "version": "1",
            "description": "Any prefix may precede /v1; /s/<secret>/v1 needs no key.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**schemas, **_shapes()},
            "securitySchemes": {"bearer": bearer, "key": key},
        },
        "security": [{"bearer": []}, {"key": []}],
    }
    return orjson.dumps(document)


def _paths() -> Json:
    count = _sampled("CountTokens", MessagesBody, "TokenCount", streams=False)
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    is_open: Json = {"security": []}
    return {
        "/v1/chat/completions": {"post": _sampled("ChatCompletion", ChatBody, "ChatCompletion")},
        "/v1/completions": {"post": _sampled("Completion", CompletionBody, "Completion")},
        "/v1/responses": {"post": _sampled("Response", ResponsesBody, "Response")},
        "/v1/messages": {"post": _sampled("Message", MessagesBody, "Message")},
        "/v1/messages/count_tokens": {"post": count},
        "/v1/models": {"get": _looked_up("ModelList", [401])},
        "/v1/models/{model}": {"get": {**_looked_up("Model", [401]), "parameters": [model]}},
        "/healthz": {"get": {**_looked_up("Health", []), **is_open}},
        "/openapi.json": {"get": {**_looked_up("Document", []), **is_open}},
    }


def _sampled(name: str, body: type, answer: str, streams: bool = True) -> Json:
    """Describe a route that takes a body of one dialect."""
    error = "AnthropicError" if body is MessagesBody else "OpenAIError"
    content = _json(_REFERENCE + answer)
    if streams:
        content["text/event-stream"] = {}
    asked = _json(_REFERENCE + body.__name__)
    return {
        "operationId": f"create{name}",
        "requestBody": {"required": True, "content": asked},
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_errors(_ERRORS, error),
        },
    }


def _looked_up(answer: str, statuses: Iterable[int]) -> Json:
    content = _json(_REFERENCE + answer)
    answers = {"200": {"description": "found", "content": content}}
    responses = {**answers, **_errors(statuses, "OpenAIError")}
    return {"operationId": f"get{answer}", "responses": responses}


def _errors(statuses: Iterable[int], error: str) -> Json:
    content = _json(_REFERENCE + error)
    return {str(s): {"description": _ERRORS[s], "content": content} for s in statuses}


def _json(reference: str) -> Json:
    return {"application/json": {"schema": {"$ref": reference}}}


def _shapes() -> Json:
    """Describe the guaranteed fields of answers."""
    text, number, anything = {"type": "string"}, {"type": "integer"}, {"type": "array"}
    openai = {"message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text}
    anthropic = {"message": text, "type": text, "code": text}
    tokens = _object(prompt_tokens=number, completion_tokens=number, total_tokens=number)
    counts = _object(input_tokens=number, output_tokens=number)
    choices = {"type": "array", "items": _object(index=number, finish_reason=text)}
    made = {"id": text, "model": text, "created": number, "choices": choices, "usage": tokens}
    return {
        "ChatCompletion": _object(object={"const": "chat.completion"}, **made),
        "Completion": _object(object={"const": "text_completion"}, **made),
        "Response": _object(
            object={"const": "response"},
            id=text,
            model=text,
            status={"enum": ["completed", "incomplete"]},
            output=anything,
            usage=counts,
        ),
        "Message": _object(
            type={"const": "message"},
            id=text,
            model=text,
            role={"const": "assistant"},
            content=anything,
            stop_reason=text,
            usage=counts,
        ),
        "TokenCount": _object(input_tokens=number),
        "Model": _object(id=text, object={"const": "model"}),
        "ModelList": _object(
            object={"const": "list"},
            data={"type": "array", "items": {"$ref": _REFERENCE + "Model"}},
        ),
        "Health": _object(status={"const": "ok"}),
        "Document": _object(openapi=text, paths={"type": "object"}),
        "OpenAIError": _object(error=_object(**openai)),
        "AnthropicError": _object(type={"const": "error"}, error=_object(**anthropic)),
    }


def _object(**properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}
