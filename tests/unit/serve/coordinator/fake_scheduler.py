"""A scheduler that tests of GPU requesters drive by hand."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import (
    HooksWired,
    NotifyReleaseGpus,
    NotifyReleaseThenRequestGpus,
    RequestGpus,
    SchedulerHello,
    TicketMoved,
    TicketState,
)
from rollmesh.wire.sockets import Hub, wait

M = TypeVar("M")


class FakeScheduler:
    """A scheduler's socket that sends only what a test sends through it, and answers greetings."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0", incarnation: str = "s1") -> None:
        self.hub = Hub(bind)
        self.incarnation = incarnation
        self.received: list[AnyMessage] = []
        self.known: set[AnyMessage] = set()
        self.route = b""

    def expect(self, kind: type[M], *, is_again: bool = False) -> M:
        """Return the next message of this type that is new, or, with `is_again`, that is a
        repetition.
        """
        for _ in range(300):
            while self.received:
                message = self.received.pop(0)
                if isinstance(message, kind) and (message in self.known) is is_again:
                    self.known.add(message)
                    return message
            wait([self.hub], None, 0.1)
            for route, packet in self.hub.receive():
                self.route = route
                self.received.append(packet.message)
                if isinstance(packet.message, HooksWired):
                    self.send(SchedulerHello(self.incarnation))
        raise AssertionError(f"no {kind.__name__}")

    def send(self, message: AnyMessage) -> None:
        self.hub.send(self.route, Packet(message))

    def send_granted(self, key: str, gpus: tuple[int, ...]) -> None:
        self.send(TicketMoved(key, TicketState.GRANTED, gpus))

    @contextmanager
    def granting(self, *clusters: str) -> Iterator[list[AnyMessage]]:
        """Grant requests for these clusters and confirm releases in a thread; yield the received
        messages without repetitions.
        """
        messages: list[AnyMessage] = []
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                wait([self.hub], None, 0.05)
                for route, packet in self.hub.receive():
                    self.route = route
                    self._answer(packet.message, clusters, messages)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield messages
        finally:
            is_over.set()
            thread.join()

    def _answer(
        self, message: AnyMessage, clusters: tuple[str, ...], messages: list[AnyMessage]
    ) -> None:
        match message:
            case HooksWired():
                self.send(SchedulerHello(self.incarnation))
                return
            case RequestGpus() | NotifyReleaseThenRequestGpus() if message.cluster in clusters:
                self.send_granted(message.key, (0,))
            case NotifyReleaseGpus(key):
                self.send(TicketMoved(key, TicketState.RELEASED))
        if message not in messages:
            messages.append(message)
