"""Requests to fence an engine are repeated, answered once, and given up."""

from rollmesh.trainer.reports.exactness import (
    GIVE_UP_S,
    REPEAT_S,
    FenceRequested,
    FenceResult,
    Fencing,
)
from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

ASKED = FenceRequested("http://a", 3, "off by 0.5")


def answer(ask_id: int, error: str = "") -> Received:
    return Received(ROUTER, FleetAnswered(ask_id, not error, error, 1, ()))


def test_request_is_repeated_until_the_router_answers_and_reported_once() -> None:
    fencing = Fencing()
    sent = [Send(ROUTER, FenceEngine(-1, "http://a", 3, "off by 0.5"))]
    assert fencing.step(ASKED, 0.0) == sent
    assert fencing.step(Ticked(), REPEAT_S / 2) == []
    assert fencing.step(Ticked(), REPEAT_S) == sent
    assert fencing.step(Ticked(), REPEAT_S * 1.5) == []
    assert fencing.step(answer(-1, "the last engine"), 1.0) == [
        FenceResult(ASKED, "the last engine")
    ]
    assert fencing.step(answer(-1), 1.1) == []
    assert fencing.step(Ticked(), 2.0) == []


def test_answers_to_the_publisher_are_ignored() -> None:
    fencing = Fencing()
    fencing.step(ASKED, 0.0)
    assert fencing.step(answer(1), 0.1) == []
    assert fencing.step(answer(-1), 0.2) == [FenceResult(ASKED, "")]


def test_request_is_given_up_if_the_router_never_answers() -> None:
    fencing = Fencing()
    fencing.step(ASKED, 0.0)
    fencing.step(FenceRequested("http://b", 3, "too"), 5.0)
    assert fencing.step(Ticked(), GIVE_UP_S)[0] == FenceResult(ASKED, "the router did not answer")
    [again] = fencing.step(Ticked(), GIVE_UP_S + REPEAT_S)
    assert isinstance(again, Send)
    assert again.message == FenceEngine(-2, "http://b", 3, "too")
