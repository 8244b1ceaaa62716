"""The routes by which adapters come and go, and by which weights change their name alone.

    /load_lora_adapter   /unload_lora_adapter   /update_weight_version

Invariants: an adapter is read beside the running steps, and is there for requests once its route
has answered; one that is unloaded stays with the requests that have it. Driven by routes.py.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollmesh.core.errors import EngineRefused, ModelError
from rollmesh.engine.embedded.adapters import Shelf
from rollmesh.engine.embedded.engine import Engine, Tenure
from rollmesh.engine.embedded.peft import read_adapter
from rollmesh.engine.embedded.replies import read_body, reply, told
from rollmesh.engine.embedded.steploop import StepLoop
from rollmesh.engine.embedded.weight_routes import Handler


class LoadBody(msgspec.Struct):
    """/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadBody(msgspec.Struct):
    """/unload_lora_adapter."""

    lora_name: str


class RenameBody(msgspec.Struct):
    """/update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class AdapterRoutes:
    """See the module."""

    def __init__(self, steps: StepLoop, engine: Engine, shelf: Shelf) -> None:
        self._steps = steps
        self._engine = engine
        self._shelf = shelf

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """By path and method."""
        return {
            "/load_lora_adapter": {"POST": self._load},
            "/unload_lora_adapter": {"POST": self._unload},
            "/update_weight_version": {"POST": self._rename},
        }

    def cards(self, parent: str) -> list[dict[str, Any]]:
        """What /v1/models says of them, over the model `parent`."""
        return [
            {"id": name, "object": "model", "owned_by": "rollmesh", "root": root, "parent": parent}
            for name, root in self._shelf.folders().items()
        ]

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), LoadBody)
        if self._engine.tenure is not Tenure.HELD:
            return self._told("there are no weights for it to stand over")
        model = self._engine.runner.model
        read = partial(read_adapter, body.lora_name, Path(body.lora_path), model)
        try:
            self._shelf.put(await asyncio.get_running_loop().run_in_executor(None, read))
        except (EngineRefused, ModelError) as error:
            return self._told(str(error))
        return self._told()

    async def _unload(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), UnloadBody)
        try:
            self._shelf.forget(body.lora_name)
        except EngineRefused as error:
            return self._told(str(error))
        return self._told()

    def _told(self, failure: str = "") -> web.Response:
        said = {"success": not failure, "error_message": failure or None}
        return reply({**said, "loaded_adapters": self._shelf.folders()}, 400 if failure else 200)

    async def _rename(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), RenameBody)
        if body.abort_all_requests:
            self._steps.abort(None)
        await self._steps.ask(lambda engine: engine.rename(body.new_version))
        return told(f"Weight version updated to {body.new_version}", new_version=body.new_version)
