"""Sequences of SGLang calls: swap an adapter, and bracket an update of weights in memory.

- An adapter's name contains its version, so every request is answered by the adapter it names.
- The new adapter is loaded first, then the engine's weight version changes, then the old adapter is
  unloaded: if the publisher dies in between, the engine is unchanged or has an unused adapter.
- An update session that was begun is always ended, also if a load failed; one that a killed
  publisher left open is closed first. Source: SGLang 0.5.21,
  scheduler_components/weight_updater.py.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollmesh.core.errors import EngineError, EngineRefused
from rollmesh.engine.backend import READ_TIMEOUT_S, EngineBackend
from rollmesh.engine.members import ADAPTER_PREFIX, adapter_name

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a folder is a PEFT adapter."""


def adapter_in(policy_version: int, folder: Path) -> str:
    """Return the name under which engines know the adapter in `folder`; '' if it holds whole
    weights."""
    return adapter_name(policy_version) if (folder / ADAPTER_CONFIG).exists() else ""


async def swap_adapter(client: EngineBackend, policy_version: int, folder: Path, name: str) -> None:
    """Replace the engine's adapter of this run with `name`, and set its weight version to
    `policy_version`."""
    loaded = await _our_adapters(client)
    if name in loaded:  # loaded by an interrupted attempt, or by another run
        await client.unload_adapter(name)
    await client.load_adapter(name, folder)
    renamed = {"new_version": str(policy_version), "abort_all_requests": False}
    await client.command("/update_weight_version", renamed)
    # SGLang at its limit (--max-loaded-loras) has already dropped one by itself.
    for old in await _our_adapters(client):
        if old != name:
            await client.unload_adapter(old)


async def drop_adapters(client: EngineBackend) -> None:
    """Unload this run's adapters before whole weights are loaded; the version of one may be another
    run's."""
    for name in await _our_adapters(client):
        await client.unload_adapter(name)


async def _our_adapters(client: EngineBackend) -> list[str]:
    return [name for name in await client.adapters() if name.startswith(ADAPTER_PREFIX)]


ALREADY_OPEN = "already open"
"""SGLang's error text for a session that is already open."""


@contextlib.asynccontextmanager
async def update_session(client: EngineBackend) -> AsyncIterator[None]:
    """Keep an update session open; EngineRefused if the engine has none, as SGLang before
    0.5.21."""
    await begin_update(client)
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):
            await end_update(client, READ_TIMEOUT_S)
        raise
    await end_update(client)


async def begin_update(client: EngineBackend) -> None:
    """Begin an update session; EngineRefused as for `update_session`."""
    try:
        await client.command("/begin_weight_update", {})
    except EngineRefused as error:
        if ALREADY_OPEN not in str(error):
            raise
        with contextlib.suppress(EngineRefused):  # its weights may be incomplete
            await end_update(client)
        await client.command("/begin_weight_update", {})


async def end_update(client: EngineBackend, timeout_s: float | None = None) -> None:
    """End the session; EngineRefused if there is none, or if the weights received are not a whole
    model."""
    await client.command("/end_weight_update", {}, timeout_s)
