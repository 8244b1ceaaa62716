"""An engine is at fault if its gaps are large and another engine's are not, over enough samples.

A request to fence an engine is repeated until the router answers, or given up.
"""

import pytest

from rollmesh.serve.client.samples import SampledRun
from rollmesh.trainer.reports.exactness import (
    GIVE_UP_S,
    MEMORY_STEPS,
    MIN_SAMPLES,
    REPEAT_S,
    FaultyEngineDetector,
    FenceRequested,
    FenceResult,
    Fencing,
    GapFindings,
    RunGap,
    find_gaps,
)
from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from tests.unit.trainer.samples import new_sample

A, B, C = "http://a", "http://b", "http://c"
HELD, BOUND = 7, 0.1
MeasuredRun = tuple[SampledRun, float]


def run(
    engine: str, policy_version: int = HELD, dialect: str = "chat", cause: str = ""
) -> SampledRun:
    return SampledRun(1, policy_version, engine, dialect, cause)


def found(*measured: MeasuredRun, held: int = HELD) -> GapFindings:
    """Return the findings of samples with one token each, whose gaps are given."""
    samples = [new_sample([1, 1], [0, 1], runs=(each,)) for each, _ in measured]
    return find_gaps(
        samples,
        [[RunGap(1, gap, gap, bounded=gap, num_past=0)] for _, gap in measured],
        held,
        BOUND,
    )


def blamed(*measured: MeasuredRun) -> list[str]:
    """Return the engines that are at fault after one step."""
    return [fault.engine for fault in FaultyEngineDetector().judge(found(*measured))]


def test_engine_is_at_fault_if_another_is_not() -> None:
    [fault] = FaultyEngineDetector().judge(found(*[(run(B), 0.5)] * 4, *[(run(A), 0.01)] * 4))
    assert (fault.engine, fault.policy_version) == (B, HELD)
    assert fault.why == (
        "4 of its 4 samples have log-probs that are off by up to 0.5, "
        f"but none of 4 such samples of {A}"
    )


def test_two_faulty_engines_are_found_with_one_good_engine() -> None:
    measured = [
        (run(engine), gap) for engine, gap in ((A, 0.5), (B, 0.0), (C, 0.7)) for _ in range(4)
    ]
    assert blamed(*measured) == [A, C]


@pytest.mark.parametrize(
    ("liars", "honest"),
    [
        ([(run(B), 0.5)] * 4, []),  # no other engine
        ([(run(B), 0.5)] * 4, [(run(A), 0.5)] * 4),  # all are off: the trainer's own fault
        ([(run(B), 0.5)] * (MIN_SAMPLES - 1), [(run(A), 0.0)] * 8),  # too few
        ([(run(B), 0.5)] * 4, [(run(A), 0.0)] * (MIN_SAMPLES - 1)),
        ([(run(B), 0.5)] * 2 + [(run(B, cause="rewind"), 0.0)] * 3, [(run(A), 0.0)] * 8),  # few
        ([(run(""), 0.5)] * 4, [(run(A), 0.0)] * 8),  # no recorded engine
        ([(run(B), 0.5)] * 4, [(run(""), 0.0)] * 8),
        ([(run(B, dialect="responses"), 0.5)] * 4, [(run(A), 0.0)] * 8),  # another dialect
        ([(run(B, cause="template"), 0.5)] * 4, [(run(A), 0.0)] * 8),
        ([(run(B, policy_version=6), 0.5)] * 4, [(run(A), 0.0)] * 8),  # drift
    ],
)
def test_no_engine_is_blamed_without_enough_evidence(
    liars: list[MeasuredRun], honest: list[MeasuredRun]
) -> None:
    assert blamed(*liars, *honest) == []


def test_turn_over_two_engines_blames_only_the_faulty_one() -> None:
    samples = [new_sample([1, 1, 1], [0, 1, 1], seq, runs=(run(A), run(B))) for seq in range(4)]
    findings = find_gaps(
        samples,
        [
            [
                RunGap(1, 0.0, 0.0, bounded=0.0, num_past=0),
                RunGap(1, 0.5, 0.5, bounded=0.5, num_past=0),
            ]
        ]
        * 4,
        HELD,
        BOUND,
    )
    assert findings.masked == [0, 1, 2, 3]
    assert [fault.engine for fault in FaultyEngineDetector().judge(findings)] == [B]


def test_evidence_adds_up_over_steps_and_restarts_after_a_fault() -> None:
    suspicion, faults = FaultyEngineDetector(), []
    for step in range(3 * MIN_SAMPLES):
        measured = (run(A, step), 0.0), (run(B, step), 0.5)
        faults.append(
            [fault.policy_version for fault in suspicion.judge(found(*measured, held=step))]
        )
    blamed_at = [step for step, each in enumerate(faults) if each == [step]]
    assert blamed_at == [3, 7, 11]
    assert sum(map(len, faults)) == len(blamed_at)


def test_repaired_engine_is_not_blamed_for_its_past() -> None:
    suspicion = FaultyEngineDetector()
    suspicion.judge(found(*[(run(A), 0.0)] * 4, *[(run(B), 0.5)] * 3))
    assert suspicion.judge(found((run(B), 0.0))) == []
    assert suspicion.judge(found((run(B), 0.5))) == []
    assert suspicion.judge(found(*[(run(B), 0.5)] * 3)) != []


def test_old_evidence_is_ignored() -> None:
    for num_between, is_known in ((MEMORY_STEPS - 1, True), (MEMORY_STEPS, False)):
        suspicion = FaultyEngineDetector()
        suspicion.judge(found(*[(run(A), 0.0)] * 4))
        for _ in range(num_between):
            suspicion.judge(found())
        assert bool(suspicion.judge(found(*[(run(B), 0.5)] * 4))) == is_known


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
