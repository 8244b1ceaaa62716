"""A ledger to tell stories to."""

import pytest

from tests.unit.serve.router.story import Story


@pytest.fixture
def story() -> Story:
    return Story()
