"""The channel: it frees ended steps first, beats during calls, and notices lost messages."""

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from rollmesh.trainer.controller.rank import RankChannel
from rollmesh.trainer.controller.spec import RankSpec, Topology
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.ranks import (
    ControllerBeat,
    DropCall,
    EndRank,
    FormGroup,
    RankBeat,
    RankHello,
    RankMessage,
    ReadTensors,
    RunCall,
    StageCall,
)
from rollmesh.wire.sockets import Hub, wait

WAIT_S = 60.0
ROUTE = b"rank-0"


class Ear:
    """Record the received messages."""

    def __init__(self) -> None:
        self.fails_at = -1
        """The call at which `receive` raises."""
        self.heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def receive(self, message: AnyMessage, body: Buffer) -> None:
        if isinstance(message, DropCall) and message.call_id == self.fails_at:
            raise RuntimeError("one too many")
        self.heard.put(("hear", (message, bytes(body))))

    def end_step(self, step: int) -> None:
        self.heard.put(("end_step", step))

    def terminate(self, why: str) -> None:
        self.heard.put(("lose", why))

    def next(self) -> tuple[str, Any]:
        return self.heard.get(timeout=WAIT_S)


@contextmanager
def posted(silence_s: float = 60.0) -> Iterator[tuple[Hub, RankChannel, Ear]]:
    """A channel that has sent hello, and its controller's hub, which has received it."""
    ear = Ear()
    with closing(Hub("tcp://127.0.0.1:0")) as hub:
        spec = RankSpec(
            controller=hub.address,
            rank=0,
            topology=Topology(1),
            roles={},
            beat_s=0.02,
            silence_s=silence_s,
        )
        with closing(RankChannel(spec, None, ear)) as post:
            post.send(RankHello(0, 100))
            post.start()
            assert next(heard(hub)) == RankHello(0, 100)
            yield hub, post, ear


def heard(hub: Hub) -> Iterator[AnyMessage]:
    """Messages of the rank, as they arrive."""
    while True:
        wait([hub], None, WAIT_S)
        for _, packet in hub.receive():
            yield packet.message


def tell(hub: Hub, message: RankMessage, body: bytes = b"") -> None:
    assert hub.send(ROUTE, Packet(message, body=body))


@pytest.mark.parametrize(
    "message",
    [
        FormGroup(4),
        StageCall(4, 1, "actor", "train", 5),
        RunCall(4, 1),
        DropCall(4, 1),
        ReadTensors(4, 1),
        ControllerBeat(4, 0),
        EndRank(4, "done"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_whatever_is_heard_frees_what_has_ended_before_it_is_passed_on(
    message: RankMessage,
) -> None:
    with posted() as (hub, _, ear):
        tell(hub, message, b"body")
        assert ear.next() == ("end_step", 4)
        assert ear.next() == ("hear", (message, b"body"))


def test_an_unhandled_message_ends_the_rank_and_is_reported() -> None:
    with posted() as (hub, _, ear):
        ear.fails_at = 3
        for step in range(4):
            tell(hub, DropCall(-1, step))
        told = [ear.next() for _ in range(4)]
        assert [what for what, _ in told] == ["hear"] * 3 + ["lose"]
        assert told[-1][1] == "its own thread failed: RuntimeError: one too many"


def test_a_step_ends_once_and_an_older_one_never_again() -> None:
    with posted() as (hub, _, ear):
        for step in (4, 4, 3, 5):
            tell(hub, DropCall(step, 9))
        told = [ear.next() for _ in range(6)]
        assert [step for what, step in told if what == "end_step"] == [4, 5]


def test_beats_say_how_much_came_before_them() -> None:
    with posted() as (hub, post, _):
        post.send(RankHello(0, 101))
        num_before = 1
        for message in heard(hub):
            if isinstance(message, RankBeat):
                assert message.num_sent == num_before
                if num_before > 4:
                    break
            num_before += 1


def test_a_message_that_was_lost_is_noticed() -> None:
    with posted() as (hub, _, ear):
        tell(hub, ControllerBeat(-1, 0))
        assert ear.next()[0] == "hear"
        tell(hub, ControllerBeat(-1, 3))
        assert ear.next() == ("lose", "2 of the controller's messages were lost")


def test_a_controller_that_is_silent_is_lost() -> None:
    with posted(silence_s=0.2) as (_, _, ear):
        what, why = ear.next()
        assert what == "lose"
        assert why.startswith("the controller is silent for ")


def test_the_last_message_is_received_before_the_end() -> None:
    with posted() as (hub, post, _):
        for pid in range(1000, 1100):
            post.send(RankHello(0, pid))
        post.close()
        pids: list[int] = []
        for message in heard(hub):
            pids += [message.pid] if isinstance(message, RankHello) else []
            if len(pids) == 100:
                break
        assert pids == list(range(1000, 1100))
