"""A rank's talk with its controller: one thread that owns the socket and computes nothing.

Invariants: a message from the controller is heard, and a beat goes out, however long a step takes;
whatever is heard frees what it says has ended, before anything else is done about it. A controller
that is silent for `silence_s`, or of which a message was lost, ends the rank: nobody would ever
call it again. So does a message that cannot be dealt with. Driven by rank.py; `say` may be called
from any thread.
"""

import threading
import time
from collections import deque
from typing import Protocol

from rollmesh.core.logs import get_logger
from rollmesh.trainer.controller.crew import NO_STEP
from rollmesh.trainer.controller.spec import RankSpec, route_of
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import ControllerBeat, RankBeat, RankMessage
from rollmesh.wire.sockets import Dialer, Doorbell, wait

log = get_logger()


class Listener(Protocol):
    """Who is told, on the thread of the post."""

    def hear(self, message: AnyMessage, body: Buffer) -> None:
        """All that the controller says, a beat too."""

    def end_step(self, step: int) -> None:
        """All up to `step` is to be freed."""

    def lose(self, why: str) -> None:
        """There is no controller any more."""


class Post:
    """See the module."""

    def __init__(self, spec: RankSpec, keys: Keys | None, listener: Listener) -> None:
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
