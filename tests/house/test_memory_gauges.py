"""Each memory gauge has a bound in core/metrics.py, and each bound a gauge that exists."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config, ModelConfig, RouterConfig
from rollmesh.core.metrics import CACHE_ENTRIES, ENTRIES, HELD_BYTES, Figure, Inventory
from rollmesh.serve.interception.agent_server import count_blobs
from rollmesh.serve.interception.backends import GatewayBackend, RelayBackend, TokenBackend
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.sessions import SessionRegistry
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.status import figures_of, status_of
from rollmesh.serve.server.worker import Worker, WorkerSettings
from rollmesh.testing.model_folder import write_model_folder
from rollmesh.wire.fleet import FleetChanged

GAUGES = {"held_bytes": HELD_BYTES, "entries": ENTRIES, "cache_entries": CACHE_ENTRIES}
"""Bounds by the metric whose label names them."""


async def refuse(request: HttpRequest, path: str) -> bool:
    return False


def of_gateway(backend: GatewayBackend) -> Iterable[Figure]:
    inventory = Inventory()
    count_blobs(inventory)
    backend.serve(refuse)
    backend.count_in(inventory, SessionRegistry(backend.capture, SystemClock(), 1.0))
    return inventory.figures()


def of_router() -> Iterable[Figure]:
    return figures_of(status_of("i1", GroupScheduler(RouterConfig(), 0.0), FleetChanged(1, ()), {}))


async def all_figures(folder: Path) -> dict[str, list[Figure]]:
    """Metrics of each process that has done nothing yet."""
    model = ModelConfig(path=str(write_model_folder(folder / "model")))
    config = msgspec.structs.replace(Config(), model=model)
    worker = Worker(WorkerSettings("worker-0", "tcp://127.0.0.1:9", config, None))
    worker._post.close()  # noqa: SLF001 - one that never serves has no other end
    backends: list[GatewayBackend] = [
        TokenBackend(config, ()),
        RelayBackend(config, ("http://127.0.0.1:9",), ""),
    ]
    gateway = [figure for backend in backends for figure in of_gateway(backend)]
    for backend in backends:
        await backend.close()
    # A worker's agent server has the gauges of a gateway in tokens mode.
    edge = [each for each in of_gateway(TokenBackend(config, ())) if is_not_of_sessions(each)]
    return {
        "worker": [*worker.inventory.figures(), *edge],
        "gateway": gateway,
        "router": list(of_router()),
    }


def is_not_of_sessions(figure: Figure) -> bool:
    return not {"accounts", "sessions"} & set(figure.labels.values())


@pytest.mark.parametrize("metric", GAUGES)
def test_bounds_and_gauges_agree(metric: str, tmp_path: Path) -> None:
    shown: dict[str, set[str]] = {}
    for process, figures in asyncio.run(all_figures(tmp_path)).items():
        for figure in figures:
            if figure.name == metric:
                [label] = figure.labels.values()
                shown.setdefault(label, set()).add(process)
    assert {name: set(bound.processes) for name, bound in GAUGES[metric].items()} == shown
