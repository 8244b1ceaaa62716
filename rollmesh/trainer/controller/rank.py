"""A rank process: its roles' methods run on the main thread, whatever they need is there before.

    main thread    meets the others, makes the roles, runs one call after the other
    fetch thread   has the arguments of the calls that come next brought here, in their order
    post thread    hears and answers the controller (post.py), frees what has ended
    count thread   clears what it is told to, and says what is held; it may have to wait for owners

    a call here: staged by the fetch thread > run by the main thread > forgotten
                                            > dropped

Invariants: what fails in a role, in a fetch or in a message fails that call and names why; a rank
runs what it is told to run, in that order, and nothing that its own command line does not name; of
a call that has ended nothing is held. It dies with its controller. Driven by `python -m
rollmesh.trainer.controller`.
"""

import gc
import os
import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import torch

from rollmesh.core.errors import RollmeshError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import FAILED, OK
from rollmesh.tensors.handles import UNTAGGED, RTensor
from rollmesh.tensors.nested import transform
from rollmesh.tensors.plane import use
from rollmesh.trainer.controller.answers import without_padding
from rollmesh.trainer.controller.cast import Cast
from rollmesh.trainer.controller.dispatch import Arguments
from rollmesh.trainer.controller.household import Household, held
from rollmesh.trainer.controller.meeting import Meeting, Place, give, take
from rollmesh.trainer.controller.parcels import decode, encode, fill, handles_of
from rollmesh.trainer.controller.post import Post
from rollmesh.trainer.controller.spec import RankSpec
from rollmesh.wire.frames import Buffer
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    ControllerBeat,
    DropCall,
    EndRank,
    FormGroup,
    RankHello,
    RankLeft,
    RankReady,
    ReadTensors,
    RunCall,
    StageCall,
    TensorsTold,
)

log = get_logger()

EXPIRE_BEATS = 20
"""Beats of the controller between two looks at leases."""
ID_BYTES = 8


class _Staged(msgspec.Struct):
    """A call whose arguments are here, or will come from this group's head."""

    message: StageCall
    method: Callable[..., Any]
    body: bytes = b""
    handles: Sequence[RTensor] = ()
    tensors: Sequence[torch.Tensor] = ()
    """Those of the handles."""
    arguments: Arguments | None = None
    rows: tuple[int, int] | None = None
    """How many there are, and how many of them are no padding."""

    def own_tags(self) -> dict[int, RTensor]:
        """By the id() of its tensor, each handle that the call's step has taken."""
        step = self.message.step
        if step == UNTAGGED:
            return {}
        pairs = zip(self.handles, self.tensors, strict=True)
        return {id(tensor): handle for handle, tensor in pairs if handle.step == step}


class RankProcess:
    """See the module; `hear`, `end_step` and `lose` are the post's."""

    def __init__(self, spec: RankSpec, keys: Keys | None) -> None:
        self._spec = spec
        self._post = Post(spec, keys, self)
        try:
            self._household = Household(spec.plane, keys)
            self._meeting = Meeting(spec)
        except RollmeshError as error:
            self._post.start()  # to nobody but a controller that hears why
            self._post.say(RankLeft(spec.rank, _said(error)))
            self._post.close()
            raise
        self._plane = self._household.plane
        use(self._plane)
        self._place: Place | None = None
        self._cast: Cast | None = None
        self._staged: dict[int, _Staged] = {}
        """In the order in which they are to be run."""
        self._to_stage: queue.SimpleQueue[tuple[StageCall, bytes]] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[ReadTensors, bytes]] = queue.SimpleQueue()
        self._to_run: queue.SimpleQueue[FormGroup | RunCall | EndRank] = queue.SimpleQueue()
        self._num_beats = 0
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        threading.Thread(target=self._count, name="count", daemon=True).start()

    def run(self) -> int:
        """Serve until told to end; the exit code."""
        self._post.say(RankHello(self._spec.rank, os.getpid()))
        self._post.start()
        code = OK
        while not isinstance(message := self._to_run.get(), EndRank):
            if isinstance(message, RunCall):
                self._run(message.call_id)
            elif not self._form():
                code = FAILED
                break
        self._staged.clear()
        self._meeting.leave()
        if code == OK:
            self._post.say(RankLeft(self._spec.rank, "told to end"))
        self._post.close()
        self._household.close()
        return code

    # heard, on the post's thread

    def hear(self, message: AnyMessage, body: Buffer) -> None:
        """Pass it to the thread that it is for."""
        match message:
            case StageCall():
                self._to_stage.put((message, bytes(body)))
            case FormGroup() | RunCall() | EndRank():
                self._to_run.put(message)
            case DropCall(call_id=call_id):
                self._staged.pop(call_id, None)
            case ReadTensors():
                self._to_read.put((message, bytes(body)))
            case ControllerBeat():
                self._renew()

    def end_step(self, step: int) -> None:
        """Free what is tagged up to `step`."""
        self._plane.end_step(step)

    def lose(self, why: str) -> NoReturn:
        """End at once: the main thread may be in a collective that never ends."""
        log.error("rank.ended", rank=self._spec.rank, why=why)
        self._household.abandon()
        os._exit(FAILED)

    def _renew(self) -> None:
        """Our controller lives, so what we own is needed."""
        store = self._plane.store
        assert store is not None
        store.renew()
        self._num_beats += 1
        if not self._num_beats % EXPIRE_BEATS:
            store.expire()

    # staged, on the fetch thread

    def _fetch(self) -> None:
        while True:
            message, body = self._to_stage.get()
            error = ""
            try:
                self._staged[message.call_id] = self._stage(message, body)
            except Exception as failure:  # noqa: BLE001 - door: a call that cannot be staged
                error = _said(failure)
            self._post.say(CallStaged(self._spec.rank, message.call_id, error))

    def _stage(self, message: StageCall, body: bytes) -> _Staged:
        assert self._cast is not None, "calls come when roles stand"
        role, name = message.role, message.method
        if not body:
            return _Staged(message, self._cast.method(role, name))
        values = decode(body)
        handles = handles_of(values)
        tensors = self._plane.localize(handles)
        args, kwargs, rows = fill(values, tensors)
        method = self._cast.fitting(role, name, args, kwargs)
        return _Staged(message, method, body, handles, tensors, Arguments(args, kwargs), rows)

    # counted, on the count thread

    def _count(self) -> None:
        while True:
            message, body = self._to_read.get()
            self._post.say(self._told(message, body))

    def _told(self, message: ReadTensors, body: bytes) -> TensorsTold:
        error, num_cleared = "", 0
        try:
            num_cleared = self._cleared(body)
            self._household.settle()
        except Exception as failure:  # noqa: BLE001 - door: what is not cleared is told, and tried again
            error = _said(failure)
        rank, (stored, buffered) = self._spec.rank, held(self._plane)
        return TensorsTold(
            rank, message.ask_id, message.ended_step, num_cleared, stored, buffered, error
        )

    def _cleared(self, body: bytes) -> int:
        if len(body) % ID_BYTES:
            raise WireError(f"{len(body)} bytes are no list of ids")
        shard_ids = array("Q")
        shard_ids.frombytes(body)
        return self._plane.clear(shard_ids.tolist()) if shard_ids else 0

    # run, on the main thread

    def _form(self) -> bool:
        """Whether the roles stand."""
        try:
            place = self._place = self._meeting.join()
            torch.set_num_threads(self._spec.num_threads)
            self._cast = Cast(self._spec.roles, place)
        except Exception as failure:  # door: a role's maker may raise anything
            log.exception("rank.not_ready", rank=self._spec.rank)
            self._post.say(RankLeft(self._spec.rank, _said(failure)))
            return False
        gc.freeze()  # torch alone is 400,000 objects, which no collection need look at
        self._post.say(RankReady(self._spec.rank, self._household.address))
        return True

    def _run(self, call_id: int) -> None:
        if list(self._staged)[:1] != [call_id]:  # at once: other threads add and take away
            self.lose("a message was lost: an earlier call is still to be run")
        staged = self._staged.pop(call_id)
        body, error = b"", ""
        try:
            body = self._answer(staged)
        except Exception as failure:  # door: a role's method may raise anything
            error = _said(failure)
            log.exception("call.failed", rank=self._spec.rank, method=staged.message.method)
        # Before the controller knows: it may look at once at what is still held.
        del staged
        self._post.say(CallEnded(self._spec.rank, call_id, error), body)

    def _answer(self, staged: _Staged) -> bytes:
        assert self._place is not None
        given = staged.arguments
        if self._spec.topology.tensor_parallel > 1:
            if given is None:
                args, kwargs, _ = take(self._place)
                given = Arguments(args, kwargs)
            else:
                give(staged.body, staged.tensors, self._place)
        assert given is not None
        result = staged.method(*given.args, **given.kwargs)
        if not self._place.is_head:
            return b""
        if staged.rows is not None:
            result = without_padding(result, *staged.rows)
        return encode(self._plane.remotize(_given_back(result, staged), staged.message.step))


def _given_back(result: Any, staged: _Staged) -> Any:
    """With the very handle for each argument that is answered as it came: nothing is stored anew.

    Only one that the call's own step took: it lives as long as an answer has to, and no longer.
    """
    known = staged.own_tags()
    return transform(result, torch.Tensor, lambda found: [known.get(id(t), t) for t in found])


def _said(failure: Exception) -> str:
    """One line of it."""
    first = next(iter(str(failure).splitlines()), "")
    return (
        first
        if isinstance(failure, RollmeshError) and first
        else f"{type(failure).__name__}: {first}"
    )
