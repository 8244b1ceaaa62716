"""OpenAPI 3.1 document of the agent server.

- Request schemas are generated from the structs that decode requests; additional keys are accepted.
- Every status that a route can return is listed.
"""

import functools
from collections.abc import Iterable

import msgspec
import orjson

from rollmesh.serve.interception.dialects.dialect import Dialect, Json, object_schema
from rollmesh.serve.interception.dialects.registry import DEFAULT_DIALECT, DIALECTS

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


def openapi_document() -> bytes:
    """Return the document of the registered dialects as JSON."""
    return _document(tuple(DIALECTS.values()))


@functools.cache
def _document(dialects: tuple[Dialect, ...]) -> bytes:
    bodies = [dialect.schema.request for dialect in dialects]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REFERENCE + "{name}")
    bearer = {"type": "http", "scheme": "bearer"}
    key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "rollmesh",
            "version": "1",
            "description": "Any prefix may precede /v1; /s/<secret>/v1 needs no key.",
        },
        "paths": _paths(dialects),
        "components": {
            "schemas": {**schemas, **_shapes(dialects)},
            "securitySchemes": {"bearer": bearer, "key": key},
        },
        "security": [{"bearer": []}, {"key": []}],
    }
    return orjson.dumps(document)


def _paths(dialects: Iterable[Dialect]) -> Json:
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    is_open: Json = {"security": []}
    paths: Json = {}
    for dialect in dialects:
        name = dialect.schema.operation
        paths[f"/v1{dialect.route}"] = {"post": _sampled(dialect, name, name)}
        if dialect.count_route:
            count = _sampled(dialect, "CountTokens", "TokenCount", streams=False)
            paths[f"/v1{dialect.count_route}"] = {"post": count}
    return {
        **paths,
        "/v1/models": {"get": _looked_up("ModelList", [401])},
        "/v1/models/{model}": {"get": {**_looked_up("Model", [401]), "parameters": [model]}},
        "/healthz": {"get": {**_looked_up("Health", []), **is_open}},
        "/openapi.json": {"get": {**_looked_up("Document", []), **is_open}},
    }


def _sampled(dialect: Dialect, name: str, answer: str, streams: bool = True) -> Json:
    """Describe a route that takes a body of one dialect."""
    content = _json(_REFERENCE + answer)
    if streams:
        content["text/event-stream"] = {}
    body = _json(_REFERENCE + dialect.schema.request.__name__)
    return {
        "operationId": f"create{name}",
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "the answer", "content": content},
            **_errors(_ERRORS, dialect.schema.error_name),
        },
    }


def _looked_up(answer: str, statuses: Iterable[int]) -> Json:
    content = _json(_REFERENCE + answer)
    answers = {"200": {"description": "found", "content": content}}
    responses = {**answers, **_errors(statuses, DEFAULT_DIALECT.schema.error_name)}
    return {"operationId": f"get{answer}", "responses": responses}


def _errors(statuses: Iterable[int], error: str) -> Json:
    content = _json(_REFERENCE + error)
    return {str(s): {"description": _ERRORS[s], "content": content} for s in statuses}


def _json(reference: str) -> Json:
    return {"application/json": {"schema": {"$ref": reference}}}


def _shapes(dialects: Iterable[Dialect]) -> Json:
    """Describe the guaranteed fields of answers."""
    text = {"type": "string"}
    models = {"type": "array", "items": {"$ref": _REFERENCE + "Model"}}
    schemas = [dialect.schema for dialect in dialects]
    return {
        **{schema.operation: schema.answer for schema in schemas},
        **{schema.error_name: schema.error for schema in schemas},
        "TokenCount": object_schema(input_tokens={"type": "integer"}),
        "Model": object_schema(id=text, object={"const": "model"}),
        "ModelList": object_schema(object={"const": "list"}, data=models),
        "Health": object_schema(status={"const": "ok"}),
        "Document": object_schema(openapi=text, paths={"type": "object"}),
    }
