"""An HTTP client, which the fixture checks for open connections."""

from collections.abc import AsyncIterator

import pytest

from rollmesh.engine.http import HttpClient


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with HttpClient() as client:
        yield client
    assert client.num_connections == 0
