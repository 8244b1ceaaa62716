"""Requests to the router to fence engines that exactness.py found faulty. Pure.

    requested --the router's answer, or none for GIVE_UP_S--> reported

- Each request is reported once. It is repeated until then; the router answers repeats alike.
- Ids count down from -1, because the publisher's count up on the same connection and each receives
  all answers.
"""

import msgspec

from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

REPEAT_S = 0.5
GIVE_UP_S = 10.0
"""By then the engine has other weights, or soon will have."""


class FenceRequested(msgspec.Struct, frozen=True):
    """Fence the engine at `url` until it has been updated."""

    url: str
    policy_version: int
    """The version for which it was found faulty."""
    detail: str


class FenceResult(msgspec.Struct, frozen=True):
    """The result of a request."""

    request: FenceRequested
    error: str
    """Why the engine is not fenced; '' if it is."""


class _OpenRequest(msgspec.Struct):
    request: FenceRequested
    ask: FenceEngine
    asked_s: float
    sent_s: float


class Fencing:
    """The machine of open fence requests."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenRequest] = {}
        self._num_requests = 0

    def step(
        self, event: FenceRequested | Received | Ticked, now_s: float
    ) -> list[Send | FenceResult]:
        """Process one event; answers to other requests are ignored."""
        match event:
            case FenceRequested():
                self._num_requests += 1
                ask = FenceEngine(
                    -self._num_requests, event.url, event.policy_version, event.detail
                )
                self._open[ask.ask_id] = _OpenRequest(event, ask, now_s, now_s)
                return [Send(ROUTER, ask)]
            case Received(message=FleetAnswered() as answer):
                ended = self._open.pop(answer.ask_id, None)
                return [FenceResult(ended.request, answer.error)] if ended else []
        return self._tend(now_s)

    def _tend(self, now_s: float) -> list[Send | FenceResult]:
        actions: list[Send | FenceResult] = []
        for each in list(self._open.values()):
            if now_s >= each.asked_s + GIVE_UP_S:
                del self._open[each.ask.ask_id]
                actions.append(FenceResult(each.request, "the router did not answer"))
            elif now_s >= each.sent_s + REPEAT_S:
                each.sent_s = now_s
                actions.append(Send(ROUTER, each.ask))
        return actions
