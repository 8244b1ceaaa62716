"""Asks to fence an engine: repeated, answered once, given up."""

from rollmesh.trainer.meter.fencing import GIVE_UP_S, REPEAT_S, FenceAsked, FenceTold, Fencing
from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

ASKED = FenceAsked("http://a", 3, "off by 0.5")


def answer(ask_id: int, error: str = "") -> Received:
    return Received(ROUTER, FleetAnswered(ask_id, not error, error, 1, ()))


def test_ask_is_repeated_until_the_router_answers_and_told_of_once() -> None:
    fencing = Fencing()
    sent = [Send(ROUTER, FenceEngine(-1, "http://a", 3, "off by 0.5"))]
    assert fencing.step(ASKED, 0.0) == sent
    assert fencing.step(Ticked(), REPEAT_S / 2) == []
    assert fencing.step(Ticked(), REPEAT_S) == sent
    assert fencing.step(Ticked(), REPEAT_S * 1.5) == []
    assert fencing.step(answer(-1, "the last engine"), 1.0) == [FenceTold(ASKED, "the last engine")]
    assert fencing.step(answer(-1), 1.1) == []
    assert fencing.step(Ticked(), 2.0) == []


def test_answers_to_the_publisher_are_none_to_us() -> None:
    fencing = Fencing()
    fencing.step(ASKED, 0.0)
    assert fencing.step(answer(1), 0.1) == []
    assert fencing.step(answer(-1), 0.2) == [FenceTold(ASKED, "")]


def test_router_that_never_answers_is_given_up_on() -> None:
    fencing = Fencing()
    fencing.step(ASKED, 0.0)
    fencing.step(FenceAsked("http://b", 3, "too"), 5.0)
    assert fencing.step(Ticked(), GIVE_UP_S)[0] == FenceTold(ASKED, "the router does not answer")
    [again] = fencing.step(Ticked(), GIVE_UP_S + REPEAT_S)
    assert isinstance(again, Send)
    assert again.message == FenceEngine(-2, "http://b", 3, "too")
