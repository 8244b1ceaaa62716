"""The controller's thread: it owns the socket, the clock and the processes, and steps the crew.

    NEW --start--> RUNS --close, let_go--> OVER
    NEW --close--> OVER        RUNS --the thread fails--> OVER

Invariants: whatever is asked gets its end, as a result or a RankError, also where the crew breaks,
the thread itself fails, or nobody steps it any more; what this thread does takes no time, so beats
go out. Driven by controller.py, from any thread.
"""

import concurrent.futures
import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollmesh.core.errors import RankError
from rollmesh.core.logs import get_logger
from rollmesh.trainer.controller.processes import RankProcesses
from rollmesh.trainer.controller.rank_group import (
    Action,
    CallAnswered,
    CallRaised,
    CallRequested,
    EndRequested,
    Event,
    RankExited,
    RankGroup,
    RankGroupSettings,
    RanksFormed,
    RanksLost,
    SendToRank,
    TensorReport,
    TensorsQueried,
)
from rollmesh.trainer.controller.spec import RankSpec, route_of
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.sockets import Doorbell, Hub, wait

log = get_logger()

TICK_S = 0.1
SECRET_BYTES = 16
END_S = 10.0
"""What ranks have to end by themselves."""

Bodies = tuple[Buffer, ...]
SpecOf = Callable[[str], Sequence[RankSpec]]
"""The ranks' specs, once the address is known that they dial."""


class RankHub:
    """See the module."""

    def __init__(
        self, bind: str, keys: Keys | None, settings: RankGroupSettings, specs: SpecOf
    ) -> None:
        """AddressError where `bind` is taken, or needs keys."""
        self._hub = Hub(bind, keys)
        self._specs = [
            msgspec.structs.replace(spec, secret=secrets.token_hex(SECRET_BYTES))
            for spec in specs(self._hub.peer_address)
        ]
        routes = [route_of(spec).encode() for spec in self._specs]
        self._crew = RankGroup(routes, settings, time.monotonic())
        self._has_logged_foreign = False
        self._events: deque[Event] = deque()
        self._bell = Doorbell()
        self._calls: dict[int, concurrent.futures.Future[Bodies]] = {}
        self._asks: dict[int, concurrent.futures.Future[TensorReport]] = {}
        self._numbers = itertools.count(1)
        self._processes = RankProcesses(self._on_exit)
        self.formed: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when all ranks are ready, or will never be."""
        self._over: RankError | None = None
        """Why nothing comes of what is asked now."""
        self._is_closing = threading.Event()
        self._close_once = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        """Start the ranks; RankError where that is over."""
        if self._over:
            raise self._over
        self._thread.start()

    def call(
        self, role: str, method: str, step: int, bodies: tuple[bytes, ...]
    ) -> "concurrent.futures.Future[Bodies]":
        """Make a call; `bodies` are those of the ranks."""
        call_id = next(self._numbers)
        future = self._calls[call_id] = concurrent.futures.Future()
        self._tell(CallRequested(call_id, role, method, step, bodies))
        return future

    def ask(self, ended_step: int, shard_ids: bytes) -> "concurrent.futures.Future[TensorReport]":
        """Ask of tensors."""
        ask_id = next(self._numbers)
        future = self._asks[ask_id] = concurrent.futures.Future()
        self._tell(TensorsQueried(ask_id, ended_step, shard_ids))
        return future

    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._processes.pids()

    def owners(self) -> set[str]:
        """Where the ranks' tensors are fetched from."""
        return self._crew.owners()

    @property
    def num_foreign(self) -> int:
        """Messages that came from no rank, and changed nothing."""
        return self._crew.num_foreign

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def close(self, reason: str) -> None:
        """End the ranks, in order, or by force where they do not end; once, whoever says it."""
        with self._close_once:
            if self._is_closing.is_set():
                return
            if self._thread.ident is not None:
                self._end_ranks(reason)
            self._is_closing.set()
            self._bell.ring()
            if self._thread.ident is not None:
                self._thread.join()
            self._over = self._over or RankError(reason)
            self._fail_all(self._over)
            self._hub.close()
            self._bell.close()

    def let_go(self) -> None:
        """Nobody has a controller any more that could be closed: end, and keep nobody waiting."""
        if self._is_closing.is_set():
            return
        if self._thread.is_alive():
            log.warning("controller.not_closed", pids=self.pids())
        # Whoever let go of it is not made to wait, be he in the midst of whatever.
        reason = "nobody has the controller any more"
        threading.Thread(target=self.close, args=(reason,), name="closing", daemon=True).start()

    def _end_ranks(self, reason: str) -> None:
        self._tell(EndRequested(reason))
        if not self._processes.wait(END_S):
            log.warning("ranks.killed", why=f"they did not end in {END_S:.0f} s")
            self._processes.kill()
            self._processes.wait(END_S)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._bell.ring()
        if self._over:
            self._fail_all(self._over)

    def _on_exit(self, rank: int, cause: str) -> None:
        self._tell(RankExited(rank, cause))

    def _run(self) -> None:
        # A child is told by the system that the thread is gone that started it: so it is this one.
        try:
            self._processes.start(self._specs)
            while not self._is_closing.is_set():
                wait([self._hub], self._bell, TICK_S)
                self._turn()
        except Exception as error:  # door: whoever waits for us is told
            log.exception("controller.failed")
            self._processes.kill()
            self._over = RankError(f"the controller's own thread failed: {error}")
            self._fail_all(self._over)

    def _turn(self) -> None:
        for route, packet in self._hub.receive():
            self._step(Received(route, packet.message, packet.body))
        if self._crew.num_foreign and not self._has_logged_foreign:
            self._has_logged_foreign = True
            log.warning("crew.foreign_message", remedy="only started ranks may dial this address")
        while self._events:
            self._step(self._events.popleft())
        self._step(Ticked())

    def _step(self, event: Event) -> None:
        for action in self._crew.step(event, time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case SendToRank(route, message, body):
                # One that is not taken is missed by the rank at the next beat.
                self._hub.send(route, Packet(message, body=body))
            case CallAnswered(call_id, bodies):
                self._calls.pop(call_id).set_result(bodies)
            case CallRaised(call_id, error):
                self._calls.pop(call_id).set_exception(error)
            case TensorReport(ask_id):
                self._asks.pop(ask_id).set_result(action)
            case RanksFormed():
                self.formed.set_result(None)
            case RanksLost(error):
                log.error("crew.broken", rank=error.rank, cause=error.cause)
                self._processes.kill()
                if not self.formed.done():
                    self.formed.set_exception(error)

    def _fail_all(self, error: RankError) -> None:
        """Calls fail; of tensors nobody says anything any more, and that stops nobody."""
        for call in [*self._calls.values()]:
            _fail(call, error)
        _fail(self.formed, error)
        nobody = tuple(range(len(self._specs)))
        for ask_id in [*self._asks]:
            ask = self._asks.pop(ask_id, None)
            if ask is not None:
                ask.set_result(TensorReport(ask_id, (), nobody))


def _fail(future: "concurrent.futures.Future[Any]", error: RankError) -> None:
    # Two threads may come to this at once, each for what it asked itself.
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_exception(error)
