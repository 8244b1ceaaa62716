"""The requests behind the fleet machine's ProbeEngine and ContinueEngine.

- Every ask is answered by exactly one EngineProbed, whatever the engine does.
- /health is never used: it generates, and hangs while the engine is paused.
"""

import asyncio
import hashlib
from typing import Any

from rollmesh.core.errors import AddressError, EngineError, LocalShortage
from rollmesh.engine.client import EngineClient
from rollmesh.engine.fleet import ContinueEngine, EngineProbed, ProbeEngine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.member import adapter_name

PROBE_SHORTAGE_WAIT_S = 0.0
"""A probe's dial that fails for a shortage here is not repeated: the fleet asks again, and must
learn in time that the engine is not to blame."""
PROBE_TIMEOUT_S = 2.0
"""Shorter than the fleet's own patience, so that a failure comes with its reason."""

_IDENTITY_KEYS = ("incarnation", "random_seed", "pid", "start_time")
"""Parts of /server_info that differ between two lives of a server; SGLang draws a random_seed."""


async def probe_engine(ask: ProbeEngine | ContinueEngine, http: HttpClient) -> EngineProbed:
    """Resume the engine first if `ask` says so; then read its weights, incarnation and load."""
    try:
        client = EngineClient(ask.url, http)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            if isinstance(ask, ContinueEngine):
                await client.resume()
            model, server = await client.model_info(), await client.server_info()
            load = await client.loads()
            adapter = adapter_name(model.policy_version)
            is_there = adapter in await client.adapters()
    except LocalShortage as error:
        return EngineProbed(
            url=ask.url, serial=ask.serial, ok=False, is_local=True, detail=str(error)
        )
    except (AddressError, EngineError, TimeoutError) as error:
        detail = str(error) or f"no answer within {PROBE_TIMEOUT_S:g} s"
        return EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=detail)
    return EngineProbed(
        url=ask.url,
        serial=ask.serial,
        ok=True,
        incarnation=incarnation_of(server),
        policy_version=model.policy_version,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        max_running=load.max_running,
        adapter=adapter if is_there else "",
    )


def incarnation_of(server_info: dict[str, Any]) -> str:
    """A short text that changes when the server was started again."""
    parts = repr([server_info.get(key) for key in _IDENTITY_KEYS])
    return hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()
