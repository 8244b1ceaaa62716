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


class RecordingListener:
    """Record the received messages."""

    def __init__(self) -> None:
        self.fails_at = -1
        """The call at which `receive` raises."""
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def receive(self, message: AnyMessage, body: Buffer) -> None:
        if isinstance(message, DropCall) and message.call_id == self.fails_at:
            raise RuntimeError("one too many")
        self.events.put(("receive", (message, bytes(body))))

    def end_step(self, step: int) -> None:
        self.events.put(("end_step", step))

    def terminate(self, why: str) -> None:
        self.events.put(("terminate", why))

    def next(self) -> tuple[str, Any]:
        return self.events.get(timeout=WAIT_S)


@contextmanager
def connected_channel(
    silence_s: float = 60.0,
) -> Iterator[tuple[Hub, RankChannel, RecordingListener]]:
    """A channel that has sent hello, and its controller's hub, which has received it."""
    listener = RecordingListener()
    with closing(Hub("tcp://127.0.0.1:0")) as hub:
        spec = RankSpec(
            controller=hub.address,
            rank=0,
            topology=Topology(1),
            roles={},
            beat_s=0.02,
            silence_s=silence_s,
        )
        with closing(RankChannel(spec, None, listener)) as post:
            post.send(RankHello(0, 100))
            post.start()
            assert next(messages_of(hub)) == RankHello(0, 100)
            yield hub, post, listener


def messages_of(hub: Hub) -> Iterator[AnyMessage]:
    """Messages of the rank, as they arrive."""
    while True:
        wait([hub], None, WAIT_S)
        for _, packet in hub.receive():
            yield packet.message


def send(hub: Hub, message: RankMessage, body: bytes = b"") -> None:
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
def test_each_message_frees_ended_steps_before_it_is_handled(
    message: RankMessage,
) -> None:
    with connected_channel() as (hub, _, listener):
        send(hub, message, b"body")
        assert listener.next() == ("end_step", 4)
        assert listener.next() == ("receive", (message, b"body"))


def test_an_unhandled_message_ends_the_rank_and_is_reported() -> None:
    with connected_channel() as (hub, _, listener):
        listener.fails_at = 3
        for step in range(4):
            send(hub, DropCall(-1, step))
        events = [listener.next() for _ in range(4)]
        assert [what for what, _ in events] == ["receive"] * 3 + ["terminate"]
        assert events[-1][1] == "its own thread failed: RuntimeError: one too many"


def test_a_step_ends_once_and_an_older_one_never_again() -> None:
    with connected_channel() as (hub, _, listener):
        for step in (4, 4, 3, 5):
            send(hub, DropCall(step, 9))
        events = [listener.next() for _ in range(6)]
        assert [step for what, step in events if what == "end_step"] == [4, 5]


def test_beats_count_the_messages_before_them() -> None:
    with connected_channel() as (hub, post, _):
        post.send(RankHello(0, 101))
        num_before = 1
        for message in messages_of(hub):
            if isinstance(message, RankBeat):
                assert message.num_sent == num_before
                if num_before > 4:
                    break
            num_before += 1


def test_lost_message_is_detected() -> None:
    with connected_channel() as (hub, _, listener):
        send(hub, ControllerBeat(-1, 0))
        assert listener.next()[0] == "receive"
        send(hub, ControllerBeat(-1, 3))
        assert listener.next() == ("terminate", "2 of the controller's messages were lost")


def test_a_controller_that_is_silent_is_lost() -> None:
    with connected_channel(silence_s=0.2) as (_, _, listener):
        what, why = listener.next()
        assert what == "terminate"
        assert why.startswith("the controller at tcp://127.0.0.1:")


def test_the_last_message_is_received_before_the_end() -> None:
    with connected_channel() as (hub, post, _):
        for pid in range(1000, 1100):
            post.send(RankHello(0, pid))
        post.close()
        pids: list[int] = []
        for message in messages_of(hub):
            pids += [message.pid] if isinstance(message, RankHello) else []
            if len(pids) == 100:
                break
        assert pids == list(range(1000, 1100))
