"""The way of an adapter to an engine: loaded beside the one it replaces, then that is forgotten.

Invariants: an adapter's name tells its version, so no request is answered by another one than it
names; the engine's weights get the new version's number only once the new adapter is there, and the
old one goes only after that, so an engine whose publisher dies in between is either as before or
serves what nobody uses. Driven by publish.py, for a folder that holds an adapter.
"""

from pathlib import Path

from rollmesh.engine.client import EngineClient
from rollmesh.engine.member import ADAPTER_PREFIX, adapter_name

CONFIG = "adapter_config.json"
"""What makes a folder one of PEFT's."""


def name_of(policy_version: int, folder: Path) -> str:
    """The name under which engines know the adapter in `folder`; '' if that holds whole weights."""
    return adapter_name(policy_version) if (folder / CONFIG).exists() else ""


async def swap_adapter(client: EngineClient, policy_version: int, folder: Path, name: str) -> None:
    """Make `name` the engine's adapter of ours, and its weights those of `policy_version`."""
    loaded = await _ours(client)
    if name in loaded:  # by a try that was cut short, or by another run
        await client.unload_adapter(name)
    await client.load_adapter(name, folder)
    renamed = {"new_version": str(policy_version), "abort_all_requests": False}
    await client.order("/update_weight_version", renamed)
    # SGLang that holds as many as it may (--max-loaded-loras) has let go of one by itself.
    for old in await _ours(client):
        if old != name:
            await client.unload_adapter(old)


async def drop_adapters(client: EngineClient) -> None:
    """Forget ours: whole weights are to come, whose version one of another run might have."""
    for name in await _ours(client):
        await client.unload_adapter(name)


async def _ours(client: EngineClient) -> list[str]:
    return [name for name in await client.adapters() if name.startswith(ADAPTER_PREFIX)]
