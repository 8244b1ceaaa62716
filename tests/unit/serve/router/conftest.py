"""A ledger to tell stories to."""

import pytest

from tests.unit.serve.router.scripted_router import ScriptedRouter


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()
