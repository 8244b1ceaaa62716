"""A request is resent with one key until it is answered, but not forever."""

import threading

import pytest

from rollmesh.core.errors import AddressError
from rollmesh.scheduler.admission.transport import ask_scheduler
from rollmesh.wire.frames import Packet
from rollmesh.wire.scheduling import ReadScheduler, SchedulerAnswered
from rollmesh.wire.sockets import Hub, wait

PROMPT_S = 30.0


def test_a_request_is_resent_with_its_key_until_it_is_answered() -> None:
    hub, asked = Hub("tcp://127.0.0.1:0"), list[ReadScheduler]()

    def answer_the_third() -> None:
        while len(asked) < 3:
            wait([hub], None, 0.1)
            for route, packet in hub.receive():
                assert isinstance(packet.message, ReadScheduler)
                asked.append(packet.message)
                key, body = ("another", b"") if len(asked) < 3 else (packet.message.key, b"seen")
                hub.send(route, Packet(SchedulerAnswered(key, True), body=body))

    answering = threading.Thread(target=answer_the_third, daemon=True)
    answering.start()
    answer = ask_scheduler(hub.address, ReadScheduler("k"), patience_s=PROMPT_S)
    answering.join(PROMPT_S)
    hub.close()
    assert (answer.ok, bytes(answer.body)) == (True, b"seen")
    assert set(asked) == {ReadScheduler("k")}


def test_an_unreachable_scheduler_is_one_line_with_its_address() -> None:
    hub = Hub("tcp://127.0.0.1:0")
    hub.close()
    with pytest.raises(AddressError, match=rf"{hub.address}: no answer within 0.2 s"):
        ask_scheduler(hub.address, ReadScheduler("k"), patience_s=0.2)
