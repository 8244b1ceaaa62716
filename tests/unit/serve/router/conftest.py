"""A scripted router for each test."""

import pytest

from tests.unit.serve.router.scripted_router import ScriptedRouter


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()
