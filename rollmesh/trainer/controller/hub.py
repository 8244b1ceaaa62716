"""The controller's thread: owns the socket, the clock and the processes, and steps the RankGroup.

    NEW --start--> RUNS --close, abandon--> OVER
    NEW --close--> OVER        RUNS --the thread fails--> OVER

- Every request ends with a result or a RankError, also if a rank is lost, the thread fails, or the
  hub is closed.
- Nothing on this thread blocks, so beats are sent.
- Each rank process is a session of its own, so that the terminal's Ctrl-C reaches the controller
  only, and it dies with the thread that started it, which is this one.
"""

import concurrent.futures
import contextlib
import itertools
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from rollmesh.core.addresses import advertised
from rollmesh.core.child_process import ManagedProcess, describe_exit, open_output
from rollmesh.core.errors import RankError
from rollmesh.core.logs import get_logger
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
    RankGroupState,
    RankJoined,
    RanksFormed,
    RanksLost,
    SendToRank,
    TensorReport,
    TensorsQueried,
)
from rollmesh.trainer.controller.spec import RankSpec, device_type, route_of, to_argument
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import Received, Ticked
from rollmesh.wire.sockets import Hub, WakeSignal, wait

MODULE = "rollmesh.trainer.controller.rank"

OnExit = Callable[[int, str], None]
"""Called with a rank, and the cause of its end."""


class RankProcesses:
    """The processes of one controller."""

    def __init__(self, on_exit: OnExit) -> None:
        """`on_exit` is called on the thread that waits for the rank."""
        self._on_exit = on_exit
        self._children: list[ManagedProcess] = []
        self._threads: list[threading.Thread] = []

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start a process for each spec; raise OSError if the system refuses one."""
        for spec in specs:
            self._start(spec)

    def _start(self, spec: RankSpec) -> None:
        argv = [sys.executable, "-m", MODULE, "--spec", to_argument(spec)]
        with _output(spec) as output:
            child = ManagedProcess(argv, stdin=subprocess.PIPE, stdout=output, stderr=output)
        self._children.append(child)
        watch = threading.Thread(target=self._watch, args=(spec.rank, child), daemon=True)
        self._threads.append(watch)
        watch.start()
        assert child.stdin
        with contextlib.suppress(BrokenPipeError), child.stdin:  # it may have ended already
            child.stdin.write(f"{spec.secret}\n".encode())

    def kill(self) -> None:
        """Kill all processes."""
        for child in self._children:
            child.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended and were reported; return whether they have."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def _watch(self, rank: int, child: ManagedProcess) -> None:
        self._on_exit(rank, describe_exit(child.wait()))


def _output(spec: RankSpec) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """The file for a rank's output; without a run folder, the output of this process."""
    if not spec.folder:
        return contextlib.nullcontext()
    return open_output(Path(spec.folder) / "logs" / f"rank-{spec.rank}.out")


log = get_logger()

TICK_S = 0.1
REPORT_S = 5.0
"""Between two log lines about ranks that have not joined."""
SECRET_BYTES = 16
KILL_S = 10.0
"""Time for killed ranks to end."""

Bodies = tuple[Buffer, ...]
SpecOf = Callable[[str], Sequence[RankSpec]]
"""Returns the ranks' specs for the address that they dial."""


class RankHub:
    """The shell of a RankGroup; its methods may be called from any thread."""

    def __init__(
        self,
        bind: str,
        keys: Keys | None,
        settings: RankGroupSettings,
        specs: SpecOf,
        num_local: int | None = None,
    ) -> None:
        """Start the first `num_local` ranks here (default: all); the others join from elsewhere.

        Raise AddressError if `bind` is taken, or needs keys.
        """
        self._hub = Hub(bind, keys)
        self.address = self._hub.address_for_peers(advertised(self._hub.address))
        """Address that ranks dial."""
        all_specs = specs(self.address)
        self._num_ranks = len(all_specs)
        self._specs = [
            msgspec.structs.replace(spec, secret=secrets.token_hex(SECRET_BYTES))
            for spec in all_specs[:num_local]
        ]
        routes = [route_of(spec).encode() for spec in self._specs]
        routes += [b""] * (self._num_ranks - len(routes))
        self._exit_s = settings.exit_s
        first = all_specs[0]
        self._group = RankGroup(
            routes, settings, time.monotonic(), first.digest, device_type(first.device)
        )
        self._report_at_s = time.monotonic() + REPORT_S
        self._has_logged_foreign = False
        self._events: deque[Event] = deque()
        self._bell = WakeSignal()
        self._calls: dict[int, concurrent.futures.Future[Bodies]] = {}
        self._queries: dict[int, concurrent.futures.Future[TensorReport]] = {}
        self._numbers = itertools.count(1)
        self._processes = RankProcesses(self._on_exit)
        self.formed: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when all ranks are ready, or cannot be."""
        self._over: RankError | None = None
        """The reason why requests fail now."""
        self._is_closing = threading.Event()
        self._close_once = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        """Start the ranks; raise RankError after the end."""
        if self._over:
            raise self._over
        self._thread.start()

    def call(
        self, role: str, method: str, step: int, bodies: tuple[bytes, ...]
    ) -> "concurrent.futures.Future[Bodies]":
        """Call a method at all ranks; `bodies` has one for each."""
        call_id = next(self._numbers)
        future = self._calls[call_id] = concurrent.futures.Future()
        self._enqueue(CallRequested(call_id, role, method, step, bodies))
        return future

    def query_tensors(
        self, ended_step: int, shard_ids: bytes
    ) -> "concurrent.futures.Future[TensorReport]":
        """Have all ranks free ended steps and `shard_ids`, and report what they hold."""
        ask_id = next(self._numbers)
        future = self._queries[ask_id] = concurrent.futures.Future()
        self._enqueue(TensorsQueried(ask_id, ended_step, shard_ids))
        return future

    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._processes.pids()

    def owners(self) -> set[str]:
        """Addresses from which the ranks' tensors are fetched."""
        return self._group.owners()

    @property
    def num_foreign(self) -> int:
        """Messages that came from no rank, and changed nothing."""
        return self._group.num_foreign

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def close(self, reason: str) -> None:
        """End the ranks in order, or kill them if they do not end; only the first call acts."""
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

    def abandon(self) -> None:
        """Close in the background, after the controller was dropped without `close`."""
        if self._is_closing.is_set():
            return
        if self._thread.is_alive():
            log.warning("controller.not_closed", pids=self.pids())
        # In the background: the thread that dropped the last reference may hold locks.
        reason = "the controller was dropped"
        threading.Thread(target=self.close, args=(reason,), name="closing", daemon=True).start()

    def _end_ranks(self, reason: str) -> None:
        self._enqueue(EndRequested(reason))
        if not self._processes.wait(self._exit_s):
            log.warning("ranks.killed", why=f"they did not end in {self._exit_s:g} s")
            self._processes.kill()
            self._processes.wait(KILL_S)

    def _enqueue(self, event: Event) -> None:
        self._events.append(event)
        self._bell.ring()
        if self._over:
            self._fail_all(self._over)

    def _on_exit(self, rank: int, cause: str) -> None:
        self._enqueue(RankExited(rank, cause))

    def _run(self) -> None:
        # Children die with the thread that started them, so it must be this one.
        try:
            self._processes.start(self._specs)
            while not self._is_closing.is_set():
                wait([self._hub], self._bell, TICK_S)
                self._turn()
        except Exception as error:  # door: all waiting callers get the error
            log.exception("controller.failed")
            self._processes.kill()
            self._over = RankError(f"the controller's own thread failed: {error}")
            self._fail_all(self._over)

    def _turn(self) -> None:
        for route, packet in self._hub.receive():
            self._step(Received(route, packet.message, packet.body))
        if self._group.num_foreign and not self._has_logged_foreign:
            self._has_logged_foreign = True
            log.warning("crew.foreign_message", remedy="only started ranks may dial this address")
        while self._events:
            self._step(self._events.popleft())
        self._step(Ticked())
        if time.monotonic() >= self._report_at_s:
            self._report_at_s += REPORT_S
            self._report_missing()

    def _report_missing(self) -> None:
        """Log which ranks have not joined, if some are started elsewhere."""
        missing = self._group.missing()
        is_forming = self._group.state is RankGroupState.FORMING
        if is_forming and missing and len(self._specs) < self._num_ranks:
            num_joined = self._num_ranks - len(missing)
            log.info(
                "ranks.waiting",
                why=f"waiting for ranks: {num_joined} of {self._num_ranks} have joined; missing "
                + ", ".join(map(str, missing)),
                address=self._hub.address,
            )

    def _step(self, event: Event) -> None:
        for action in self._group.step(event, time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case SendToRank(route, message, body):
                # The rank detects a message that was not sent at the next beat.
                self._hub.send(route, Packet(message, body=body))
            case CallAnswered(call_id, bodies):
                self._calls.pop(call_id).set_result(bodies)
            case CallRaised(call_id, error):
                self._calls.pop(call_id).set_exception(error)
            case TensorReport(ask_id):
                self._queries.pop(ask_id).set_result(action)
            case RanksFormed():
                self.formed.set_result(None)
            case RankJoined(rank, host, ""):
                log.info("rank.joined", rank=rank, host=host)
            case RankJoined(rank, host, refusal):
                log.warning("rank.refused", rank=rank, host=host, why=refusal)
            case RanksLost(error):
                log.error("ranks.lost", rank=error.rank, host=error.host, cause=error.cause)
                self._processes.kill()
                if not self.formed.done():
                    self.formed.set_exception(error)

    def _fail_all(self, error: RankError) -> None:
        """Fail all calls, and end tensor queries with every rank missing."""
        for call in [*self._calls.values()]:
            _fail(call, error)
        _fail(self.formed, error)
        all_missing = tuple(range(self._num_ranks))
        for ask_id in [*self._queries]:
            query_tensors = self._queries.pop(ask_id, None)
            if query_tensors is not None:
                query_tensors.set_result(TensorReport(ask_id, (), all_missing))


def _fail(future: "concurrent.futures.Future[Any]", error: RankError) -> None:
    # Two threads may do this at once, each for its own request.
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        future.set_exception(error)
