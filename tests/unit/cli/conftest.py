"""Verbs called in the tests' own process.

Invariant: a verb that gets as far as to set up its logs leaves them as they were. Driven by pytest.
"""

from collections.abc import Iterator

import pytest

from tests.log_setup import logs_as_before


@pytest.fixture(autouse=True)
def _quiet_afterwards() -> Iterator[None]:
    with logs_as_before():
        yield
