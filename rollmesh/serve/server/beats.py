"""The beat thread: tells the router that this worker lives, even while its event loop is held.

Owns a Dialer of its own. Each probe asks the loop to answer; one that takes longer than `STALL_S`
is a stall, and the function on the loop's stack at that moment is named in the next beat and in the
log. Invariants: nothing here waits for the loop; what it reads of the worker are plain numbers; no
fault of one turn ends the thread. Driven by its own thread, from `start` to `close`.
"""

import asyncio
import threading
import time
from collections.abc import Callable

import msgspec

from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import rss_bytes
from rollmesh.core.types import ErrorPlace
from rollmesh.serve.server.stack import whereabouts
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import RouterHello, WorkerBeat
from rollmesh.wire.sockets import Dialer

log = get_logger()

STARTED_S = time.time()
"""Of this process: read once, since hello and beats must say the same, whatever the clock does."""
_PROCESS = new_id("p")
STALL_S = 0.05
PROBE_S = 0.1


def identity(worker_id: str) -> str:
    """What the sockets of this process are called.

    Its own: zmq gives a name to who came last, and who had it before hears nothing more, though its
    connection stands; so two workers of one id would be deaf in turn, and for good.
    """
    return f"{worker_id}.{_PROCESS}"


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker says of itself."""

    state: str
    num_running: int
    accepting: bool
    unacked_bytes: int
    num_finished: int
    num_failed: int
    last_error: str
    num_calls: int
    num_tokens: int
    num_left_behind: int
    waits_for: str
    held_bytes: int
    last_place: ErrorPlace | None = None
    last_task_id: str = ""
    isolation: str = ""


class BeatSettings(msgspec.Struct, frozen=True):
    """Who beats, where to and how often."""

    worker_id: str
    router: str
    beat_s: float


class _Owed(msgspec.Struct):
    """A sign that the loop was asked for."""

    sign: threading.Event
    asked_s: float
    is_logged: bool = False


class Beats:
    """See the module. `hear` is called on the loop with a RouterHello that came here."""

    def __init__(
        self,
        settings: BeatSettings,
        keys: Keys | None,
        vitals: Callable[[], Vitals],
        hear: Callable[[Packet], None],
    ) -> None:
        self._settings = settings
        self._vitals = vitals
        self._hear = hear
        self._dialer = Dialer(settings.router, f"{identity(settings.worker_id)}.beat", keys)
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._lag_s = 0.0
        self._stalled_in = ""
        self._owed: _Owed | None = None
        self._last_fault = ""
        """Of this thread; said once, since it may come with each turn."""
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch `loop`, which runs on the calling thread."""
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._thread.start()

    def close(self) -> None:
        """End the thread and its socket."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._dialer.close()

    def _run(self) -> None:
        next_beat_s = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() >= next_beat_s:
                next_beat_s = time.monotonic() + self._settings.beat_s
                self._try(self._beat)
            self._try(self._listen)
            self._try(self._probe)
            self._closing.wait(min(PROBE_S, max(0.0, next_beat_s - time.monotonic())))

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # door: a worker that lives must not be lost for one fault here
            if str(error) != self._last_fault:
                self._last_fault = str(error)
                log.exception("beat.failed")

    def _beat(self) -> None:
        vitals = self._vitals()
        beat = WorkerBeat(
            worker_id=self._settings.worker_id,
            loop_lag_s=self._lag_s,
            rss_bytes=rss_bytes(),
            stalled_in=self._stalled_in,
            started_s=STARTED_S,
            **msgspec.structs.asdict(vitals),
        )
        self._lag_s, self._stalled_in = 0.0, ""
        self._dialer.send(Packet(beat))

    def _listen(self) -> None:
        for packet in self._dialer.receive():
            if isinstance(packet.message, RouterHello):
                self._call(self._hear, packet)

    def _probe(self) -> None:
        """Ask the loop for a sign, unless it still owes one; note how long it takes."""
        if self._owed is None:
            owed = _Owed(threading.Event(), time.monotonic())
            if not self._call(owed.sign.set):
                return
            self._owed = owed
        answered = self._owed.sign.wait(STALL_S)
        self._lag_s = max(self._lag_s, time.monotonic() - self._owed.asked_s)
        if not answered:
            self._stalled_in = whereabouts(self._loop_thread)
            if not self._owed.is_logged:
                log.warning("loop.stalled", stalled_in=self._stalled_in)
                self._owed.is_logged = True
            return
        if self._owed.is_logged:
            log.warning("loop.freed", lag_s=round(self._lag_s, 3))
        self._owed = None

    def _call(self, function: Callable[..., object], *args: object) -> bool:
        """Run `function` on the loop; False if the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True
