"""A rank's talk with its controller: one thread that owns the socket and computes nothing.

Invariants: a message from the controller is heard, and a beat goes out, however long a step takes;
whatever is heard frees what it says has ended, before anything else is done about it. A controller
that is silent for `silence_s`, or of which a message was lost, ends the rank: nobody would ever
call it again. So does a message that cannot be dealt with. Driven by rank.py; `say` may be called
from any thread.

A rank process: its roles' methods run on the main thread, whatever they need is there before.

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
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from rollmesh.core.errors import RollmeshError, WireError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import FAILED, OK
from rollmesh.tensors.handles import UNTAGGED, RTensor
from rollmesh.tensors.nested import transform
from rollmesh.tensors.plane import use
from rollmesh.trainer.controller.answers import (
    decode_values,
    encode_values,
    fill_handles,
    handles_of,
    without_padding,
)
from rollmesh.trainer.controller.dispatch import Arguments
from rollmesh.trainer.controller.rank_group import NO_STEP
from rollmesh.trainer.controller.rendezvous import RankContext, Rendezvous, RoleRegistry, give, take
from rollmesh.trainer.controller.spec import RankSpec, route_of
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime, held_tensors
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import (
    CallEnded,
    CallStaged,
    ControllerBeat,
    DropCall,
    EndRank,
    FormGroup,
    RankBeat,
    RankHello,
    RankLeft,
    RankMessage,
    RankReady,
    ReadTensors,
    RunCall,
    StageCall,
    TensorsTold,
)
from rollmesh.wire.sockets import Dialer, Doorbell, wait

log = get_logger()


class ChannelListener(Protocol):
    """Who is told, on the thread of the post."""

    def hear(self, message: AnyMessage, body: Buffer) -> None:
        """All that the controller says, a beat too."""

    def end_step(self, step: int) -> None:
        """All up to `step` is to be freed."""

    def lose(self, why: str) -> None:
        """There is no controller any more."""


class RankChannel:
    """See the module."""

    def __init__(self, spec: RankSpec, keys: Keys | None, listener: ChannelListener) -> None:
        """AddressError where the controller's address is none."""
        self._spec = spec
        self._listener = listener
        self._dialer = Dialer(spec.controller, route_of(spec), keys, is_secret=True)
        self._bell = Doorbell()
        self._outbox: deque[tuple[RankMessage, Buffer]] = deque()
        self._ended_step = NO_STEP
        self._num_heard = 0
        self._num_said = 0
        self._heard_s = self._beat_at_s = time.monotonic()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="post", daemon=True)

    def start(self) -> None:
        """Talk from now on."""
        self._thread.start()

    def say(self, message: RankMessage, body: Buffer = b"") -> None:
        """Tell the controller, in the order of calls; nobody, once we have closed."""
        if not self._is_closing.is_set():
            self._outbox.append((message, body))
            self._bell.ring()

    def close(self) -> None:
        """Say what is still to be said, and fall silent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._bell.ring()
        self._thread.join()
        self._dialer.close()
        self._bell.close()

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # door: a rank that hears nothing any more is no rank
            log.exception("post.failed", rank=self._spec.rank)
            self._listener.lose(f"its own thread failed: {type(error).__name__}: {error}")

    def _talk(self) -> None:
        while not self._is_closing.is_set():
            wait([self._dialer], self._bell, self._spec.beat_s)
            for packet in self._dialer.receive():
                self._take(packet)
            now_s = time.monotonic()
            if now_s >= self._beat_at_s:
                self._beat_at_s = now_s + self._spec.beat_s
                self._judge(now_s)
                # Behind what waits: it says how much came before it.
                self._say_all()
                self._send(RankBeat(self._spec.rank, self._ended_step, self._num_said))
            self._say_all()
        self._say_all()

    def _take(self, packet: Packet) -> None:
        self._heard_s = time.monotonic()
        message = packet.message
        ended_step = getattr(message, "ended_step", NO_STEP)
        if ended_step > self._ended_step:
            self._ended_step = ended_step
            self._listener.end_step(ended_step)
        if isinstance(message, ControllerBeat) and message.num_said != self._num_heard:
            num_lost = message.num_said - self._num_heard
            self._listener.lose(f"{num_lost} of the controller's messages were lost")
        self._num_heard += 1
        self._listener.hear(message, packet.body)

    def _judge(self, now_s: float) -> None:
        silent_s = now_s - self._heard_s
        if silent_s >= self._spec.silence_s:
            self._listener.lose(f"the controller is silent for {silent_s:.0f} s")

    def _say_all(self) -> None:
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _send(self, message: RankMessage, body: Buffer = b"") -> None:
        # One that was not taken is missed by the controller at the next beat.
        self._dialer.send(Packet(message, body=body))
        self._num_said += 1


EXPIRE_BEATS = 20
"""Beats of the controller between two looks at leases."""
ID_BYTES = 8


class _StagedCall(msgspec.Struct):
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
        self._post = RankChannel(spec, keys, self)
        try:
            self._household = TensorRuntime(spec.plane, keys)
            self._meeting = Rendezvous(spec)
        except RollmeshError as error:
            self._post.start()  # to nobody but a controller that hears why
            self._post.say(RankLeft(spec.rank, _said(error)))
            self._post.close()
            raise
        self._plane = self._household.plane
        use(self._plane)
        self._place: RankContext | None = None
        self._cast: RoleRegistry | None = None
        self._staged: dict[int, _StagedCall] = {}
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

    def _stage(self, message: StageCall, body: bytes) -> _StagedCall:
        assert self._cast is not None, "calls come when roles stand"
        role, name = message.role, message.method
        if not body:
            return _StagedCall(message, self._cast.method(role, name))
        values = decode_values(body)
        handles = handles_of(values)
        tensors = self._plane.localize(handles)
        args, kwargs, rows = fill_handles(values, tensors)
        method = self._cast.fitting(role, name, args, kwargs)
        return _StagedCall(message, method, body, handles, tensors, Arguments(args, kwargs), rows)

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
        rank, (stored, buffered) = self._spec.rank, held_tensors(self._plane)
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
            self._cast = RoleRegistry(self._spec.roles, place)
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

    def _answer(self, staged: _StagedCall) -> bytes:
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
        return encode_values(self._plane.remotize(_given_back(result, staged), staged.message.step))


def _given_back(result: Any, staged: _StagedCall) -> Any:
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
