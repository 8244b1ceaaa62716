"""A rank process: runs the methods of its roles on the main thread, for its controller.

    main thread      meets the other ranks, makes the roles, runs one call after the other
    fetch thread     fetches the arguments of coming calls, in their order
    channel thread   owns the socket: sends and receives, beats, frees ended steps, computes nothing
    count thread     clears shards and reports what is held; it may have to wait for owners

    a call here: staged by the fetch thread > run by the main thread > forgotten
                                            > dropped

- A failure in a role, a fetch or a message fails that call, with the reason. Nothing is held of a
  call that has ended.
- Beats are sent, and ended steps freed, however long a call runs.
- A rank ends with its controller: after `silence_s` of silence, after a lost message, or after a
  message that it cannot handle.
"""

import argparse
import faulthandler
import gc
import os
import queue
import socket
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import torch

from rollmesh.core.addresses import is_loopback, with_host
from rollmesh.core.errors import RollmeshError, WireError
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import FAILED, OK, RECYCLED, die_with_parent
from rollmesh.core.redaction import redact_output
from rollmesh.core.text import printable
from rollmesh.serve.client.client import address_here
from rollmesh.tensors.handles import UNTAGGED, RTensor, transform
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
from rollmesh.trainer.controller.rendezvous import (
    RankContext,
    Rendezvous,
    RoleRegistry,
    broadcast_arguments,
    receive_arguments,
)
from rollmesh.trainer.controller.spec import RankSpec, device_type, from_argument, route_of
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime, held_tensors
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Keys, Role, read_keys
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import (
    LATE,
    AbortRank,
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
    TensorsReported,
)
from rollmesh.wire.sockets import SERVER_KEY, Dialer, WakeSignal, wait

log = get_logger()


class ChannelListener(Protocol):
    """Receiver of a channel's events, on its thread."""

    def receive(self, message: AnyMessage, body: Buffer) -> None:
        """Handle any message of the controller, also a beat."""

    def end_step(self, step: int) -> None:
        """Free everything up to `step`."""

    def terminate(self, why: str) -> None:
        """Handle the loss of the controller."""


class RankChannel:
    """The connection to the controller; `send` may be called from any thread."""

    def __init__(self, spec: RankSpec, keys: Keys | None, listener: ChannelListener) -> None:
        """Raise AddressError for a bad address of the controller."""
        self._spec = spec
        self._listener = listener
        self._dialer = Dialer(spec.controller, route_of(spec), keys, is_secret=True)
        self._bell = WakeSignal()
        self._outbox: deque[tuple[RankMessage, Buffer]] = deque()
        self._ended_step = NO_STEP
        self._num_received = 0
        self._num_sent = 0
        self._received_s = self._beat_at_s = time.monotonic()
        self._report_at_s = self._received_s + REPORT_S
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: RankMessage, body: Buffer = b"") -> None:
        """Send to the controller, in the order of calls; drop the message after `close`."""
        if not self._is_closing.is_set():
            self._outbox.append((message, body))
            self._bell.ring()

    def close(self) -> None:
        """Send what is queued, then stop."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._bell.ring()
        self._thread.join()
        self._dialer.close()
        self._bell.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # door: a rank cannot continue without its channel
            log.exception("channel.failed", rank=self._spec.rank)
            self._listener.terminate(f"its own thread failed: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            wait([self._dialer], self._bell, self._spec.beat_s)
            for packet in self._dialer.receive():
                self._take(packet)
            now_s = time.monotonic()
            if now_s >= self._beat_at_s:
                self._beat_at_s = now_s + self._spec.beat_s
                self._check_silence(now_s)
                # After the queue: a beat has the number of messages before it.
                self._send_queued()
                self._send(RankBeat(self._spec.rank, self._ended_step, self._num_sent))
            self._send_queued()
        self._send_queued()

    def _take(self, packet: Packet) -> None:
        self._received_s = time.monotonic()
        message = packet.message
        ended_step = getattr(message, "ended_step", NO_STEP)
        if ended_step > self._ended_step:
            self._ended_step = ended_step
            self._listener.end_step(ended_step)
        if isinstance(message, ControllerBeat) and message.num_sent != self._num_received:
            num_lost = message.num_sent - self._num_received
            self._listener.terminate(f"{num_lost} of the controller's messages were lost")
        self._num_received += 1
        self._listener.receive(message, packet.body)

    def _check_silence(self, now_s: float) -> None:
        silent_s = now_s - self._received_s
        if not self._num_received and self._spec.is_external:
            if now_s >= self._report_at_s:
                self._report_at_s = now_s + REPORT_S
                log.info("rank.waiting", why=f"no trainer at {self._dialer.address} yet")
        elif silent_s >= self._spec.silence_s:
            self._listener.terminate(
                f"the controller at {self._dialer.address} is silent for {silent_s:.0f} s"
            )

    def _send_queued(self) -> None:
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _send(self, message: RankMessage, body: Buffer = b"") -> None:
        # The controller detects a message that was not sent at the next beat.
        self._dialer.send(Packet(message, body=body))
        self._num_sent += 1


REPORT_S = 10.0
"""Between two log lines of a rank that waits for the trainer."""
EXPIRE_BEATS = 20
"""Beats of the controller between two checks of leases."""
ID_BYTES = 8


class _StagedCall(msgspec.Struct):
    """A call whose arguments are here, or will be broadcast by the head of this group."""

    message: StageCall
    method: Callable[..., Any]
    body: bytes = b""
    handles: Sequence[RTensor] = ()
    tensors: Sequence[torch.Tensor] = ()
    """Tensors of the handles."""
    arguments: Arguments | None = None
    rows: tuple[int, int] | None = None
    """Number of rows, and number without padding."""

    def own_tags(self) -> dict[int, RTensor]:
        """Handles that the call's step has taken, by the id() of their tensor."""
        step = self.message.step
        if step == UNTAGGED:
            return {}
        pairs = zip(self.handles, self.tensors, strict=True)
        return {id(tensor): handle for handle, tensor in pairs if handle.step == step}


class RankProcess:
    """The process; `receive`, `end_step` and `terminate` are called by its channel."""

    def __init__(self, spec: RankSpec, keys: Keys | None) -> None:
        host = address_here(spec.controller.partition(SERVER_KEY)[0])
        self._spec = spec
        self._host = socket.gethostname() + ("" if is_loopback(host) else f" ({host})")
        self._channel = RankChannel(spec, keys, self)
        try:
            bind = spec.plane.bind or with_host("tcp://:0", host)
            plane = msgspec.structs.replace(spec.plane, bind=bind)
            self._tensor_runtime = TensorRuntime(plane, keys)
            self._rendezvous = Rendezvous(spec, host)
        except RollmeshError as error:
            self._channel.start()  # only to report the reason
            self._channel.send(RankLeft(spec.rank, _one_line(error)))
            self._channel.close()
            raise
        self._plane = self._tensor_runtime.plane
        use(self._plane)
        self._context: RankContext | None = None
        self._roles: RoleRegistry | None = None
        self._staged: dict[int, _StagedCall] = {}
        """In the order in which they will run."""
        self._to_stage: queue.SimpleQueue[tuple[StageCall, bytes]] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[ReadTensors, bytes]] = queue.SimpleQueue()
        self._to_run: queue.SimpleQueue[FormGroup | RunCall | EndRank] = queue.SimpleQueue()
        self._num_beats = 0
        threading.Thread(target=self._fetch, name="fetch", daemon=True).start()
        threading.Thread(target=self._count, name="count", daemon=True).start()

    def run(self) -> int:
        """Serve until the controller ends the rank; return the exit code."""
        self._channel.send(self._hello())
        self._channel.start()
        code = OK
        while not isinstance(message := self._to_run.get(), EndRank):
            if isinstance(message, RunCall):
                self._run(message.call_id)
            elif not self._form(message.store):
                code = FAILED
                break
        self._staged.clear()
        self._rendezvous.leave()
        if code == OK:
            self._channel.send(RankLeft(self._spec.rank, "ended by the controller"))
        self._channel.close()
        self._tensor_runtime.close()
        return code

    def _hello(self) -> RankHello:
        return RankHello(
            self._spec.rank,
            os.getpid(),
            host=self._host,
            device=device_type(self._spec.device),
            plan=self._spec.digest,
            store=self._rendezvous.address,
        )

    # on the channel thread

    def receive(self, message: AnyMessage, body: Buffer) -> None:
        """Pass a message to its thread."""
        match message:
            case StageCall():
                self._to_stage.put((message, bytes(body)))
            case FormGroup() | RunCall() | EndRank():
                self._to_run.put(message)
            case DropCall(call_id=call_id):
                self._staged.pop(call_id, None)
            case ReadTensors():
                self._to_read.put((message, bytes(body)))
            case AbortRank(reason=reason):
                self.terminate(reason)
            case ControllerBeat():
                self._renew()

    def end_step(self, step: int) -> None:
        """Free tensors of steps up to `step`."""
        self._plane.end_step(step)

    def terminate(self, why: str) -> NoReturn:
        """End the process at once: the main thread may be in a collective that never ends."""
        log.error("rank.ended", rank=self._spec.rank, why=why)
        if self._spec.is_external:
            sys.stderr.write(f"rollmesh: rank {self._spec.rank} ends: {printable(why)}\n")
            sys.stderr.flush()
        self._tensor_runtime.abandon()
        os._exit(RECYCLED if why == LATE else FAILED)

    def _renew(self) -> None:
        """Renew leases: the controller is alive, so tensors of this rank are needed."""
        store = self._plane.store
        assert store is not None
        store.renew()
        self._num_beats += 1
        if not self._num_beats % EXPIRE_BEATS:
            store.expire()

    # on the fetch thread

    def _fetch(self) -> None:
        while True:
            message, body = self._to_stage.get()
            error = ""
            try:
                self._staged[message.call_id] = self._stage(message, body)
            except Exception as failure:  # noqa: BLE001 - door: the failure is sent to the controller
                error = _one_line(failure)
            self._channel.send(CallStaged(self._spec.rank, message.call_id, error))

    def _stage(self, message: StageCall, body: bytes) -> _StagedCall:
        assert self._roles is not None, "calls arrive after the roles are made"
        role, name = message.role, message.method
        if not body:
            return _StagedCall(message, self._roles.method(role, name))
        values = decode_values(body)
        handles = handles_of(values)
        tensors = self._plane.localize(handles)
        args, kwargs, rows = fill_handles(values, tensors)
        method = self._roles.fitting(role, name, args, kwargs)
        return _StagedCall(message, method, body, handles, tensors, Arguments(args, kwargs), rows)

    # on the count thread

    def _count(self) -> None:
        while True:
            message, body = self._to_read.get()
            self._channel.send(self._report_tensors(message, body))

    def _report_tensors(self, message: ReadTensors, body: bytes) -> TensorsReported:
        error, num_cleared = "", 0
        try:
            num_cleared = self._cleared(body)
            self._tensor_runtime.settle()
        except Exception as failure:  # noqa: BLE001 - door: the failure is sent to the controller
            error = _one_line(failure)
        rank, (stored, buffered) = self._spec.rank, held_tensors(self._plane)
        return TensorsReported(
            rank, message.ask_id, message.ended_step, num_cleared, stored, buffered, error
        )

    def _cleared(self, body: bytes) -> int:
        if len(body) % ID_BYTES:
            raise WireError(f"{len(body)} bytes are not a list of ids")
        shard_ids = array("Q")
        shard_ids.frombytes(body)
        return self._plane.clear(shard_ids.tolist()) if shard_ids else 0

    # on the main thread

    def _form(self, store: str) -> bool:
        """Meet the other ranks and make the roles; return whether that succeeded."""
        try:
            context = self._context = self._rendezvous.join(store)
            torch.set_num_threads(self._spec.num_threads)
            self._roles = RoleRegistry(self._spec.roles, context)
        except Exception as failure:  # door: a role's maker may raise anything
            log.exception("rank.not_ready", rank=self._spec.rank)
            self._channel.send(RankLeft(self._spec.rank, _one_line(failure)))
            return False
        gc.freeze()  # torch alone is 400,000 objects, which no collection needs to visit
        self._channel.send(RankReady(self._spec.rank, self._tensor_runtime.address))
        return True

    def _run(self, call_id: int) -> None:
        if list(self._staged)[:1] != [call_id]:  # a copy: other threads add and remove
            self.terminate("a message was lost: an earlier call has not run yet")
        staged = self._staged.pop(call_id)
        body, error = b"", ""
        try:
            body = self._answer(staged)
        except Exception as failure:  # door: a role's method may raise anything
            error = _one_line(failure)
            log.exception("call.failed", rank=self._spec.rank, method=staged.message.method)
        # Before the answer is sent: the controller may count at once what is still held.
        del staged
        self._channel.send(CallEnded(self._spec.rank, call_id, error), body)

    def _answer(self, staged: _StagedCall) -> bytes:
        assert self._context is not None
        arguments = staged.arguments
        if self._spec.topology.tensor_parallel > 1:
            if arguments is None:
                args, kwargs, _ = receive_arguments(self._context)
                arguments = Arguments(args, kwargs)
            else:
                broadcast_arguments(staged.body, staged.tensors, self._context)
        assert arguments is not None
        result = staged.method(*arguments.args, **arguments.kwargs)
        if not self._context.is_head:
            return b""
        if staged.rows is not None:
            result = without_padding(result, *staged.rows)
        return encode_values(
            self._plane.remotize(_with_known_handles(result, staged), staged.message.step)
        )


def _with_known_handles(result: Any, staged: _StagedCall) -> Any:
    """Replace returned arguments by their own handles, so that they are not stored again.

    Only for handles that the call's step has taken: these live exactly as long as the answer.
    """
    known = staged.own_tags()
    return transform(result, torch.Tensor, lambda found: [known.get(id(t), t) for t in found])


def _one_line(failure: Exception) -> str:
    """The error as one line."""
    first = next(iter(str(failure).splitlines()), "")
    return (
        first
        if isinstance(failure, RollmeshError) and first
        else f"{type(failure).__name__}: {first}"
    )


def main() -> int:
    """Run the rank; return its exit code."""
    redact_output(with_stdout=True)
    die_with_parent()
    faulthandler.enable()  # a write to fetched, read-only memory is reported with its line
    parser = argparse.ArgumentParser(prog="rollmesh.trainer.controller.rank")
    parser.add_argument("--spec", required=True)
    spec = from_argument(parser.parse_args().spec)
    if spec.reads_secret:
        spec = msgspec.structs.replace(spec, secret=sys.stdin.readline().strip())
    setup(f"rank-{spec.rank}", Path(spec.folder) if spec.folder else None)
    return RankProcess(spec, read_keys(role=Role.PUBLISHER)).run()


if __name__ == "__main__":
    sys.exit(main())
