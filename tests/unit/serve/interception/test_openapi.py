"""The OpenAPI document, and requests generated from it."""

import asyncio
from typing import Any

import aiohttp
import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.serve.interception.conftest import AgentSession, StartAgent

NUM_EXAMPLES = 25
"""Examples per route; all of them take about ten seconds."""
CHECKS = (
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
ROUTES = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /healthz",
    "GET /openapi.json",
}


async def document_of(agent: AgentSession) -> dict[str, Any]:
    async with agent.client.get(agent.base + "/openapi.json") as response:
        assert response.status == 200
        return dict(msgspec.json.decode(await response.read()))


async def test_the_document_names_every_route(start_agent: StartAgent) -> None:
    document = await document_of(await start_agent())
    named = {
        f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item
    }
    assert named == ROUTES
    read = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "n", "response_format", "max_completion_tokens"} <= set(read)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_server_answers_as_documented(start_agent: StartAgent) -> None:
    agent = await start_agent(always="I guess 4")
    document = await document_of(agent)
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert {f"{each.method.upper()} {each.path}" for each in operations} == ROUTES
    headers = {"x-api-key": agent.opened.api_key}
    statuses: set[int] = set()
    for operation in operations:
        strategy = operation.as_strategy()

        @hypothesis.seed(7)
        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def question(case: Any) -> None:
            response = case.call(base_url=agent.base, headers=headers)
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        await asyncio.to_thread(question)
    assert {200, 400} <= statuses
    async with aiohttp.ClientSession() as client, client.get(agent.base + "/healthz") as response:
        assert response.status == 200
