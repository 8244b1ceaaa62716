"""The current leg's patience, and what can be resumed."""

from typing import Any

import pytest

from rollmesh.core.types import Grammar, SamplingParams
from rollmesh.runtime.generation_events import AbortLeg, StartLeg
from rollmesh.runtime.leg import MAX_ABORT_REPEAT_S, Leg, LegPhase, is_resumable

ABORT = AbortLeg(0, "r.0", "http://a")


def leg(*, stream: bool = True) -> Leg:
    return Leg(StartLeg(0, "r.0", "http://a", 100, "0", stream), "i1", 0, 0.0)


def test_plain_leg_may_be_silent_for_as_long_as_its_tokens_take() -> None:
    assert leg().is_silent(60.0, 60.0)
    assert not leg(stream=False).is_silent(69.9, 60.0)
    assert leg(stream=False).is_silent(70.0, 60.0)


def test_aborts_are_repeated_ever_later_within_bounds() -> None:
    aborted = leg()
    assert aborted.abort(0.0) == ABORT
    assert aborted.phase is LegPhase.ABORTING
    now_s = 0.0
    for wait_s in (0.0625, 0.125, MAX_ABORT_REPEAT_S, MAX_ABORT_REPEAT_S):
        assert not aborted.wants_repeat(now_s + wait_s - 0.001, 0.0625)
        now_s += wait_s
        assert aborted.wants_repeat(now_s, 0.0625)
        assert aborted.abort(now_s) == ABORT


def test_leg_is_deaf_when_its_first_abort_is_long_ago() -> None:
    aborted = leg()
    aborted.abort(1.0)
    aborted.abort(5.0)
    assert not aborted.is_deaf(5.9, 5.0)
    assert aborted.is_deaf(6.0, 5.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"grammar": Grammar("regex", "a+")},
    ],
)
def test_what_counts_its_own_output_cannot_be_resumed(fields: dict[str, Any]) -> None:
    assert not is_resumable(SamplingParams(max_tokens=1, **fields))


def test_what_looks_at_each_place_alone_can_be_resumed() -> None:
    params = SamplingParams(
        max_tokens=1, temperature=0.5, min_p=0.1, logit_bias=((1, 2.0),), seed=3, stop=("a",)
    )
    assert is_resumable(params)
