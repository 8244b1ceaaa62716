"""Fixtures for verbs that are called in the tests' own process, whose logging is restored."""

from collections.abc import Iterator

import pytest

from tests.log_setup import logs_as_before


@pytest.fixture(autouse=True)
def _quiet_afterwards() -> Iterator[None]:
    with logs_as_before():
        yield
