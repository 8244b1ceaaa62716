"""SGLang's bracket around weights that come without a file: begin, some loads, end.

Invariant: what was begun is ended, also where a load failed, so that the next publication finds the
engine as it found it; a bracket that a killed publisher left open is closed first. Source: SGLang
0.5.21, scheduler_components/weight_updater.py. Driven by the carriers.
"""

import contextlib
from collections.abc import AsyncIterator

from rollmesh.core.errors import EngineError, EngineRefused
from rollmesh.engine.client import CONTROL_TIMEOUT_S, READ_TIMEOUT_S, EngineClient

LEFT_OPEN = "already open"
"""SGLang's words for a bracket in a bracket."""


@contextlib.asynccontextmanager
async def weight_update(client: EngineClient) -> AsyncIterator[None]:
    """EngineRefused where the engine knows no such bracket, as SGLang before 0.5.21."""
    await begun(client)
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError):
            await ended(client, READ_TIMEOUT_S)
        raise
    await ended(client)


async def begun(client: EngineClient) -> None:
    """Open it; the same error."""
    try:
        await client.order("/begin_weight_update", {})
    except EngineRefused as error:
        if LEFT_OPEN not in str(error):
            raise
        with contextlib.suppress(EngineRefused):  # what is in it may not make a model
            await ended(client)
        await client.order("/begin_weight_update", {})


async def ended(client: EngineClient, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
    """Close it; EngineRefused where there is none, or where what came does not make a model."""
    await client.order("/end_weight_update", {}, timeout_s)
