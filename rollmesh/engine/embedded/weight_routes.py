"""The routes by which weights change: from a folder, from memory of this host, from a group.

    /update_weights_from_disk                                  one swap
    /stage_weights     a whole model, for the /update_weights_from_tensor that says the same; ours
    /begin_weight_update  .. /update_weights_from_tensor ..  /end_weight_update      one swap
                          .. /update_weights_from_distributed ..
    /init_weights_update_group   /destroy_weights_update_group

Owns the bracket that is open, the groups, and the path that is served. Invariants: weights are
brought beside the running steps and swapped between two; what came in a bracket takes over as one
when it ends, and only if it is all of the model, else the old weights stay; what is staged is of
one version, and dropped with the next swap. Driven by routes.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from aiohttp import web
from torch import Tensor

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.engine import Engine, Update
from rollmesh.engine.embedded.groups import (
    DEVICES,
    GroupBroken,
    GroupShape,
    WeightGroup,
    dial_store,
)
from rollmesh.engine.embedded.guard import Guard
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.embedded.replies import read_body, told
from rollmesh.engine.embedded.shared_memory import dtype_of, read_told
from rollmesh.engine.embedded.staging import Saying, Staging
from rollmesh.engine.embedded.steploop import StepLoop
from rollmesh.engine.responses import one_line
from rollmesh.engine.shared_memory import LOAD_FORMAT

GROUP_TIMEOUT_S = 60.0
"""For all ranks to meet, and for one broadcast."""
NO_BRACKET = "must run between begin_weight_update() and end_weight_update()"
FORMAT_TAKEN = f"load_format {{}}: only {LOAD_FORMAT!r} is taken here"
NOT_ALLOWED = "master_address is neither loopback nor a host of --allow-host"
OPEN_ALREADY = "a weight-update session is already open; call end_weight_update() first"

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class DiskBody(msgspec.Struct):
    """/update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct):
    """/update_weights_from_tensor."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class BroadcastBody(msgspec.Struct):
    """/update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class GroupBody(msgspec.Struct):
    """/init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct):
    """/destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class _Bracket(msgspec.Struct):
    """What has come since it was opened."""

    weights: dict[str, Tensor] = {}
    policy_version: str | None = None
    flushes: bool = False
    model: Model | None = None
    """In their place, where it was staged."""


class WeightRoutes:
    """See the module."""

    def __init__(
        self, steps: StepLoop, engine: Engine, model_path: str, guard: Guard | None = None
    ) -> None:
        self.model_path = model_path
        """Of the folder that was last loaded."""
        self._steps = steps
        self._engine = engine
        self._guard = guard or Guard()
        self._bracket: _Bracket | None = None
        self._staging = Staging()
        self._groups: dict[str, WeightGroup] = {}

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """By path and method."""
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
        """Of what is staged nothing is kept: the engine gives its memory up."""
        self._staging.drop()

    async def _from_disk(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), DiskBody)
        if body.abort_all_requests:
            self._steps.abort(None)
        make = self._maker(body.model_path)
        failure = await self._swap(make, body.weight_version, body.flush_cache)
        if not failure:
            self.model_path = body.model_path
        return told(_done(body.weight_version), failure, num_paused_requests=0)

    async def _begin(self, _request: web.BaseRequest) -> web.StreamResponse:
        if self._bracket is not None:
            return told("", OPEN_ALREADY)
        self._bracket = _Bracket()
        return told("Success")

    async def _from_tensor(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), TensorBody)
        if body.load_format != LOAD_FORMAT:
            return told("", FORMAT_TAKEN.format(body.load_format))
        staged, bracket = self._staging.take(_says(body)), self._bracket
        if staged and bracket == _Bracket():
            answer = await self._load("update_weights_from_tensor", body, dict)
            try:  # it may be under way as yet: the publisher did not wait for it
                bracket.model = await staged
            except ModelError as error:
                return told("", str(error))
            return answer
        read = partial(read_told, body.serialized_named_tensors, self._dtype)
        return await self._load("update_weights_from_tensor", body, read)

    async def _stage(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), TensorBody)
        if body.load_format != LOAD_FORMAT:
            return told("", FORMAT_TAKEN.format(body.load_format))
        read = partial(read_told, body.serialized_named_tensors, self._dtype)
        try:
            await self._staging.stage(_says(body), lambda: self._maker("staged", read())())
        except ModelError as error:
            return told("", str(error))
        return told("Staged.")

    async def _from_group(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), BroadcastBody)
        group = self._groups.get(body.group_name)
        if group is None:
            return told("", f"Group {body.group_name} not in {list(self._groups)}")
        receive = partial(received, group, body, self._dtype)
        return await self._load("update_weights_from_distributed", body, receive)

    async def _end(self, _request: web.BaseRequest) -> web.StreamResponse:
        bracket, self._bracket = self._bracket, None
        if bracket is None:
            return told("", "no weight-update session is open; call begin_weight_update() first")
        failure = ""
        if bracket.weights or bracket.model:
            name, flushes = bracket.policy_version, bracket.flushes
            make = self._maker("what came in memory", bracket.weights, bracket.model)
            failure = await self._swap(make, name, flushes)
        return told("Success", failure)

    async def _join(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), GroupBody)
        if body.backend not in DEVICES:
            return told("", f"backend {body.backend}: one of {', '.join(DEVICES)} is taken here")
        if not self._guard.may_join(body.master_address):
            return told("", f"process group: {NOT_ALLOWED}")
        if body.group_name in self._groups:
            return told("", f"group {body.group_name} is formed already")
        try:
            group = await asyncio.get_running_loop().run_in_executor(None, joined, body)
        except GroupBroken as error:
            return told("", f"Failed to initialize custom process group: {error}")
        self._groups[body.group_name] = group
        return told("Succeeded to initialize custom process group.")

    async def _leave(self, request: web.BaseRequest) -> web.StreamResponse:
        body = read_body(await request.read(), LeaveBody)
        if self._groups.pop(body.group_name, None) is None:
            return told("", "The group to be destroyed does not exist.")
        return told("Succeeded to destroy custom process group.")

    @property
    def _dtype(self) -> torch.dtype:
        return self._engine.runner.model.dtype

    async def _load(
        self, route: str, body: TensorBody | BroadcastBody, read: Callable[[], dict[str, Tensor]]
    ) -> web.StreamResponse:
        """Some weights into the bracket."""
        bracket = self._bracket
        if bracket is None:
            return told("", f"{route} {NO_BRACKET}")
        if body.abort_all_requests:
            self._steps.abort(None)
        try:
            bracket.weights |= await asyncio.get_running_loop().run_in_executor(None, read)
        except (ModelError, GroupBroken) as error:
            return told("", str(error))
        bracket.model = None
        bracket.policy_version = body.weight_version or bracket.policy_version
        bracket.flushes |= body.flush_cache
        return told(_done(body.weight_version))

    def _maker(
        self, folder: str, weights: dict[str, Tensor] | None = None, made: Model | None = None
    ) -> Callable[[], Model]:
        """Makes a model of what is in the folder, or came for it; ModelError where it is none."""
        if made:
            return lambda: made
        present = self._engine.runner.model
        return partial(Model, Path(folder), present.dtype, present.architecture, weights)

    async def _swap(
        self, make: Callable[[], Model], policy_version: str | None, flushes: bool
    ) -> str:
        """Make a model beside the running steps, then swap between two; '' or why not."""
        loop = asyncio.get_running_loop()
        self._staging.drop()
        try:
            model = await loop.run_in_executor(None, make)
        except (ModelError, OSError, ValueError) as error:
            return one_line(str(error))
        done: asyncio.Future[str] = loop.create_future()

        def when_done(message: str) -> None:
            loop.call_soon_threadsafe(done.set_result, message)

        update = Update(model, policy_version, flushes, when_done)
        await self._steps.ask(lambda engine: engine.update(update))
        return await done


def _says(body: TensorBody) -> Saying:
    return body.serialized_named_tensors, body.weight_version


def joined(body: GroupBody) -> WeightGroup:
    """A rank of the group, once all are there."""
    store = dial_store(body.master_address, body.master_port, body.world_size, GROUP_TIMEOUT_S)
    shape = GroupShape(body.group_name, body.backend, GROUP_TIMEOUT_S)
    return WeightGroup(store, body.rank_offset, body.world_size, shape)


def received(group: WeightGroup, body: BroadcastBody, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is broadcast, by name; ModelError where names, dtypes and shapes do not fit."""
    weights: dict[str, Tensor] = {}
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise ModelError("names, dtypes and shapes are not as many")
    for name, kind, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        weights[name] = group.receive(dtype_of(kind), shape).to(dtype)
    return weights


def _done(weight_version: str | None) -> str:
    message = "Succeeded to update model weights."
    return message + f" Weight version updated to {weight_version}." * (weight_version is not None)
