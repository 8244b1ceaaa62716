"""Having an engine fenced that exactness.py found out: the ask to the router, until it answers.

    asked --the router's word, or none for GIVE_UP_S--> told

Invariants: each ask is told of once; it is sent again until then, which the fleet answers alike.
Ids count down from -1: the publisher's go up on the same connection, and each hears all answers.
Pure; driven by publish.py and by the simulator.
"""

import msgspec

from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

REPEAT_S = 0.5
GIVE_UP_S = 10.0
"""By then the engine has other weights, or soon will have."""


class FenceAsked(msgspec.Struct, frozen=True):
    """Have nobody sample at `url` until it has been updated."""

    url: str
    policy_version: int
    """Under which it was found out."""
    detail: str


class FenceTold(msgspec.Struct, frozen=True):
    """What became of it."""

    asked: FenceAsked
    error: str
    """Why it is not fenced; '' where it is."""


class _Open(msgspec.Struct):
    asked: FenceAsked
    ask: FenceEngine
    asked_s: float
    sent_s: float


class Fencing:
    """See the module."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._num_asks = 0

    def step(self, event: FenceAsked | Received | Ticked, now_s: float) -> list[Send | FenceTold]:
        """Take one event; what is not about an open ask of ours changes nothing."""
        match event:
            case FenceAsked():
                self._num_asks += 1
                told = event.url, event.policy_version, event.detail
                ask = FenceEngine(-self._num_asks, *told)
                self._open[ask.ask_id] = _Open(event, ask, now_s, now_s)
                return [Send(ROUTER, ask)]
            case Received(message=FleetAnswered() as answer):
                ended = self._open.pop(answer.ask_id, None)
                return [FenceTold(ended.asked, answer.error)] if ended else []
        return self._tend(now_s)

    def _tend(self, now_s: float) -> list[Send | FenceTold]:
        actions: list[Send | FenceTold] = []
        for each in list(self._open.values()):
            if now_s >= each.asked_s + GIVE_UP_S:
                del self._open[each.ask.ask_id]
                actions.append(FenceTold(each.asked, "the router does not answer"))
            elif now_s >= each.sent_s + REPEAT_S:
                each.sent_s = now_s
                actions.append(Send(ROUTER, each.ask))
        return actions
