"""A router in a process of its own, and scripted peers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.router_process import RouterProcess, ScriptedPeers


@pytest.fixture
def peers() -> Iterator[ScriptedPeers]:
    peers = ScriptedPeers()
    yield peers
    peers.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path) as running:
        yield running
