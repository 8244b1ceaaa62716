"""Tests with hosts that are network namespaces need root, and a kernel that allows them."""

import functools

import pytest

from rollmesh.testing.network import why_no_network

reason = functools.cache(why_no_network)


@pytest.fixture(autouse=True, scope="session")
def _needs_network() -> None:
    if reason():
        pytest.skip(reason())
