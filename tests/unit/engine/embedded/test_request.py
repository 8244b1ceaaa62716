"""The end of a request, and the tokens that it must compute."""

import pytest

from rollmesh.engine.embedded.request import ABORTED, FinishReason, RequestPhase
from tests.unit.engine.embedded.driving import ask


def test_a_stop_token_wins_over_the_length() -> None:
    request = ask([1, 2], new=1, stop_token_ids=frozenset({5}))
    request.append(5, -0.5, "0")
    assert request.finish(5) == FinishReason("stop", matched=5)


def test_the_length_ends_a_request() -> None:
    request = ask([1, 2], new=2)
    request.append(3, -0.5, "0")
    assert request.finish(3) is None
    request.append(3, -0.5, "0")
    assert request.finish(3) == FinishReason("length", length=2)


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (FinishReason("stop", matched=5), {"type": "stop", "matched": 5}),
        (FinishReason("length", length=2), {"type": "length", "length": 2}),
        (
            ABORTED,
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        ),
    ],
)
def test_reasons_have_sglangs_shape(finish: FinishReason, expected: dict[str, object]) -> None:
    assert finish.as_json() == expected


def test_versions_are_spans_of_output_tokens() -> None:
    request = ask([1], new=3)
    for token, policy_version in ((4, "0"), (5, "0"), (6, "1")):
        request.append(token, -1.0, policy_version)
    assert [(span.policy_version, span.start) for span in request.versions] == [("0", 0), ("1", 2)]


def test_a_retraction_during_scoring_discards_the_scores() -> None:
    request = ask([1, 2, 3, 4], logprob_start=0)
    request.phase = RequestPhase.RUNNING
    request.prompt_logprobs = [-1.0]
    request.retract()
    assert request.prompt_logprobs == []
    assert request.num_reusable == 0
    request.prompt_logprobs = [-1.0, -2.0, -3.0]
    request.retract()
    assert request.prompt_logprobs == [-1.0, -2.0, -3.0]
    assert request.num_reusable == 3, "a completed score may be reused"
