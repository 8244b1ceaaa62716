"""Routes that change weights, adapters and memory.

    /update_weights_from_disk                                  one swap
    /stage_weights     a whole model, for an equal /update_weights_from_tensor; ours
    /begin_weight_update  .. /update_weights_from_tensor ..  /end_weight_update      one swap
                          .. /update_weights_from_distributed ..
    /init_weights_update_group   /destroy_weights_update_group
    /load_lora_adapter   /unload_lora_adapter   /update_weight_version
    /release_memory_occupation   frees weights and keys; refused while requests run
    /resume_memory_occupation    allocates keys; weights are missing until some are loaded

- Weights are loaded beside the running steps and swapped between two of them.
- The weights of a session take over together at its end, if they are a whole model; else the old
  ones stay. A staged model is of one version and dropped by the next swap.
- An adapter is usable once its route has answered; an unloaded one stays with its requests.
- Memory routes are idempotent; requests meanwhile wait. SGLang needs --enable-memory-saver for
  them, and otherwise answers and does nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from torch import Tensor

from rollmesh.core.errors import EngineRefused, ModelError
from rollmesh.engine.embedded.engine import Engine, MemoryOccupation, StepLoop, WeightUpdate
from rollmesh.engine.embedded.http import Guard, read_body, reply, success_reply
from rollmesh.engine.embedded.model import AdapterRegistry, Model
from rollmesh.engine.embedded.peft import read_adapter
from rollmesh.engine.embedded.weight_group import (
    DEVICES,
    GroupShape,
    WeightGroup,
    WeightGroupError,
    dial_store,
)
from rollmesh.engine.embedded.weight_loading import StageKey, Staging, dtype_of, read_segments
from rollmesh.engine.responses import one_line
from rollmesh.engine.shared_memory import LOAD_FORMAT

GROUP_TIMEOUT_S = 60.0
"""For all ranks to meet, and for one broadcast."""
NO_SESSION = "must run between begin_weight_update() and end_weight_update()"
FORMAT_TAKEN = f"load_format {{}}: only {LOAD_FORMAT!r} is supported here"
NOT_ALLOWED = "master_address is neither loopback nor a host of --allow-host"
OPEN_ALREADY = "a weight-update session is already open; call end_weight_update() first"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class DiskBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class BroadcastBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class GroupBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct):
    group_name: str = "weight_update_group"


class _UpdateSession(msgspec.Struct):
    """Weights received since /begin_weight_update."""

    weights: dict[str, Tensor] = {}
    policy_version: str | None = None
    flushes: bool = False
    model: Model | None = None
    """The staged model, if it replaces `weights`."""


class WeightRoutes:
    """Weight updates; keeps the open session, the staged model and the groups."""

    def __init__(
        self, steps: StepLoop, engine: Engine, model_path: str, guard: Guard | None = None
    ) -> None:
        self.model_path = model_path
        """Folder that was loaded last."""
        self._steps = steps
        self._engine = engine
        self._guard = guard or Guard()
        self._session: _UpdateSession | None = None
        self._staging = Staging()
        self._groups: dict[str, WeightGroup] = {}

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            "/update_weights_from_disk": {"POST": self._from_disk},
            "/stage_weights": {"POST": self._stage},
            "/begin_weight_update": {"POST": self._begin},
            "/update_weights_from_tensor": {"POST": self._from_tensor},
            "/update_weights_from_distributed": {"POST": self._from_group},
            "/end_weight_update": {"POST": self._end},
            "/init_weights_update_group": {"POST": self._join},
            "/destroy_weights_update_group": {"POST": self._leave},
        }

    def drop_staged(self) -> None:
        """Drop the staged model, since the engine frees its memory."""
        self._staging.drop()

    async def _from_disk(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), DiskBody)
        if body.abort_all_requests:
            self._steps.abort(None)
        make = self._maker(body.model_path)
        failure = await self._swap(make, body.weight_version, body.flush_cache)
        if not failure:
            self.model_path = body.model_path
        return success_reply(_done(body.weight_version), failure, num_paused_requests=0)

    async def _begin(self, _request: web.BaseRequest) -> web.StreamResponse:
        if self._session is not None:
            return success_reply("", OPEN_ALREADY)
        self._session = _UpdateSession()
        return success_reply("Success")

    async def _from_tensor(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), TensorBody)
        if body.load_format != LOAD_FORMAT:
            return success_reply("", FORMAT_TAKEN.format(body.load_format))
        staged, session = self._staging.take(_stage_key(body)), self._session
        if staged and session == _UpdateSession():
            answer = await self._load("update_weights_from_tensor", body, dict)
            try:  # it may still be loading: the publisher did not wait for it
                session.model = await staged
            except ModelError as error:
                return success_reply("", str(error))
            return answer
        read = partial(read_segments, body.serialized_named_tensors, self._dtype)
        return await self._load("update_weights_from_tensor", body, read)

    async def _stage(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), TensorBody)
        if body.load_format != LOAD_FORMAT:
            return success_reply("", FORMAT_TAKEN.format(body.load_format))
        read = partial(read_segments, body.serialized_named_tensors, self._dtype)
        try:
            await self._staging.stage(_stage_key(body), lambda: self._maker("staged", read())())
        except ModelError as error:
            return success_reply("", str(error))
        return success_reply("Staged.")

    async def _from_group(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), BroadcastBody)
        group = self._groups.get(body.group_name)
        if group is None:
            return success_reply("", f"Group {body.group_name} not in {list(self._groups)}")
        receive = partial(received, group, body, self._dtype)
        return await self._load("update_weights_from_distributed", body, receive)

    async def _end(self, _request: web.BaseRequest) -> web.StreamResponse:
        session, self._session = self._session, None
        if session is None:
            return success_reply(
                "", "no weight-update session is open; call begin_weight_update() first"
            )
        failure = ""
        if session.weights or session.model:
            name, flushes = session.policy_version, session.flushes
            make = self._maker("weights in memory", session.weights, session.model)
            failure = await self._swap(make, name, flushes)
        return success_reply("Success", failure)

    async def _join(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), GroupBody)
        if body.backend not in DEVICES:
            return success_reply(
                "", f"backend {body.backend}: one of {', '.join(DEVICES)} is supported here"
            )
        if not self._guard.may_join(body.master_address):
            return success_reply("", f"process group: {NOT_ALLOWED}")
        if body.group_name in self._groups:
            return success_reply("", f"group {body.group_name} already exists")
        try:
            group = await asyncio.get_running_loop().run_in_executor(None, joined, body)
        except WeightGroupError as error:
            return success_reply("", f"Failed to initialize custom process group: {error}")
        self._groups[body.group_name] = group
        return success_reply("Succeeded to initialize custom process group.")

    async def _leave(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), LeaveBody)
        if self._groups.pop(body.group_name, None) is None:
            return success_reply("", "The group to be destroyed does not exist.")
        return success_reply("Succeeded to destroy custom process group.")

    @property
    def _dtype(self) -> torch.dtype:
        return self._engine.runner.model.dtype

    async def _load(
        self, route: str, body: TensorBody | BroadcastBody, read: Callable[[], dict[str, Tensor]]
    ) -> web.StreamResponse:
        """Add weights to the session."""
        session = self._session
        if session is None:
            return success_reply("", f"{route} {NO_SESSION}")
        if body.abort_all_requests:
            self._steps.abort(None)
        try:
            session.weights |= await asyncio.get_running_loop().run_in_executor(None, read)
        except (ModelError, WeightGroupError) as error:
            return success_reply("", str(error))
        session.model = None
        session.policy_version = body.weight_version or session.policy_version
        session.flushes |= body.flush_cache
        return success_reply(_done(body.weight_version))

    def _maker(
        self, folder: str, weights: dict[str, Tensor] | None = None, made: Model | None = None
    ) -> Callable[[], Model]:
        """Return a function that builds the model; it raises ModelError if that fails."""
        if made:
            return lambda: made
        present = self._engine.runner.model
        return partial(Model, Path(folder), present.dtype, present.architecture, weights)

    async def _swap(
        self, make: Callable[[], Model], policy_version: str | None, flushes: bool
    ) -> str:
        """Build a model beside the running steps, then swap between two; return why it failed, else
        ''."""
        loop = asyncio.get_running_loop()
        self._staging.drop()
        try:
            model = await loop.run_in_executor(None, make)
        except (ModelError, OSError, ValueError) as error:
            return one_line(str(error))
        done: asyncio.Future[str] = loop.create_future()

        def when_done(message: str) -> None:
            loop.call_soon_threadsafe(done.set_result, message)

        update = WeightUpdate(model, policy_version, flushes, when_done)
        await self._steps.call(lambda engine: engine.update(update))
        return await done


def _stage_key(body: TensorBody) -> StageKey:
    return body.serialized_named_tensors, body.weight_version


def joined(body: GroupBody) -> WeightGroup:
    """Join the group; returns once all ranks have joined."""
    store = dial_store(body.master_address, body.master_port, body.world_size, GROUP_TIMEOUT_S)
    shape = GroupShape(body.group_name, body.backend, GROUP_TIMEOUT_S)
    return WeightGroup(store, body.rank_offset, body.world_size, shape)


def received(group: WeightGroup, body: BroadcastBody, dtype: torch.dtype) -> dict[str, Tensor]:
    """Receive broadcast tensors by name; ModelError if names, dtypes and shapes do not match."""
    weights: dict[str, Tensor] = {}
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise ModelError("names, dtypes and shapes differ in number")
    for name, kind, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        weights[name] = group.receive(dtype_of(kind), shape).to(dtype)
    return weights


def _done(weight_version: str | None) -> str:
    message = "Succeeded to update model weights."
    return message + f" Weight version updated to {weight_version}." * (weight_version is not None)


class LoadBody(msgspec.Struct):
    lora_name: str
    lora_path: str


class UnloadBody(msgspec.Struct):
    lora_name: str


class RenameBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class AdapterRoutes:
    """Loading and unloading of adapters, and renaming of weights."""

    def __init__(self, steps: StepLoop, engine: Engine, adapters: AdapterRegistry) -> None:
        self._steps = steps
        self._engine = engine
        self._adapters = adapters

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            "/load_lora_adapter": {"POST": self._load},
            "/unload_lora_adapter": {"POST": self._unload},
            "/update_weight_version": {"POST": self._rename},
        }

    def cards(self, parent: str) -> list[dict[str, Any]]:
        """Return the entries of /v1/models for the adapters of model `parent`."""
        return [
            {"id": name, "object": "model", "owned_by": "rollmesh", "root": root, "parent": parent}
            for name, root in self._adapters.folders().items()
        ]

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), LoadBody)
        if self._engine.occupation is not MemoryOccupation.HELD:
            return self._result("there are no weights for it to apply to")
        model = self._engine.runner.model
        read = partial(read_adapter, body.lora_name, Path(body.lora_path), model)
        try:
            self._adapters.put(await asyncio.get_running_loop().run_in_executor(None, read))
        except (EngineRefused, ModelError) as error:
            return self._result(str(error))
        return self._result()

    async def _unload(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), UnloadBody)
        try:
            self._adapters.forget(body.lora_name)
        except EngineRefused as error:
            return self._result(str(error))
        return self._result()

    def _result(self, failure: str = "") -> web.Response:
        result = {"success": not failure, "error_message": failure or None}
        return reply(
            {**result, "loaded_adapters": self._adapters.folders()}, 400 if failure else 200
        )

    async def _rename(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), RenameBody)
        if body.abort_all_requests:
            self._steps.abort(None)
        await self._steps.call(lambda engine: engine.rename(body.new_version))
        return success_reply(
            f"Weight version updated to {body.new_version}", new_version=body.new_version
        )


class MemoryBody(msgspec.Struct):
    """Body of both routes; SGLang's tags name parts of the memory."""

    tags: list[str] | None = None


class MemoryRoutes:
    """Release and allocation of the engine's memory."""

    def __init__(self, steps: StepLoop, weights: WeightRoutes) -> None:
        self._steps = steps
        self._weights = weights

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            "/release_memory_occupation": {"POST": self._release},
            "/resume_memory_occupation": {"POST": self._resume},
        }

    async def _release(self, request: web.BaseRequest) -> web.StreamResponse:
        self._weights.drop_staged()
        return await self._order(request, Engine.release)

    async def _resume(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._order(request, Engine.resume_memory)

    async def _order(
        self, request: web.BaseRequest, order: Callable[[Engine], str]
    ) -> web.StreamResponse:
        if read_body(await request.read(), MemoryBody).tags is not None:
            raise EngineRefused("tags: this engine releases and resumes its memory as a whole")
        if why := await self._steps.call(order):
            raise EngineRefused(why)
        return reply(None)
