"""Metrics of the gateway: event loop lag and sessions by state."""

import asyncio

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.metrics import Inventory
from rollmesh.core.types import Outcome
from rollmesh.serve.interception.backends import RelayBackend
from rollmesh.serve.interception.capture import CaptureOptions
from rollmesh.serve.interception.gateway import LAG_PROBE_S, LoopLag, gateway_figures
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.sessions import SessionRegistry


async def test_a_blocked_loop_is_reported_once() -> None:
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    await asyncio.sleep(0)
    until_s = loop.time() + LAG_PROBE_S + 0.05
    while loop.time() < until_s:
        pass
    for _ in range(3):
        await asyncio.sleep(0)
    assert 0.04 < lag.take() < 5.0
    assert lag.take() == 0.0
    lag.close()


async def test_sessions_are_counted_by_state_and_forks_by_cause() -> None:
    backend = RelayBackend(Config(), ("http://127.0.0.1:9",), "")
    registry = SessionRegistry(backend.capture, SystemClock(), 100.0)
    lag = LoopLag(asyncio.get_running_loop())
    one, other = (registry.open(CaptureOptions(), b"{}").captured for _ in range(2))
    registry.open(CaptureOptions(), b"{}")
    registry.finish(registry.find(one.session_id), Outcome.COMPLETED)
    registry.delete(registry.find(other.session_id))
    registry.set_aside("s7", "its events are of another release")
    values = {
        (figure.name, *figure.labels.values()): figure.value
        for figure in gateway_figures(registry, backend, lag)
    }
    assert values["sessions", "open"] == values["sessions", "finished"] == 1
    assert values["sessions", "set_aside"] == 1
    assert values["sessions_opened_total",] == 3
    assert values["engines", "ready"] == values["engine_ready", "http://127.0.0.1:9"] == 1
    assert (values["calls_total",], values["live_legs",]) == (0, 0)
    lag.close()
    await backend.close()


async def test_a_gateway_counts_its_sessions() -> None:
    backend = RelayBackend(Config(), ("http://127.0.0.1:9",), "")
    registry, inventory = SessionRegistry(backend.capture, SystemClock(), 100.0), Inventory()
    backend.serve(answer_nothing)
    backend.count_in(inventory, registry)
    at_rest = [(figure.name, *figure.labels.values()) for figure in inventory.figures()]
    assert ("entries", "sessions") in at_rest
    assert not any(inventory.held().values())
    open_one, finished = (registry.open(CaptureOptions(), b"{}").captured for _ in range(2))
    registry.finish(registry.find(finished.session_id), Outcome.COMPLETED)
    assert inventory.held()["accounts"] == registry.find(finished.session_id).held_bytes > 0
    values = {
        (figure.name, *figure.labels.values()): figure.value for figure in inventory.figures()
    }
    assert (values["entries", "sessions"], values["entries", "doors"]) == (2, 4)
    for captured in (open_one, finished):
        registry.delete(registry.find(captured.session_id))
    assert not any(figure.value for figure in inventory.figures())
    await backend.close()


async def answer_nothing(request: HttpRequest, path: str) -> bool:
    return False
