"""Engines at fault: beside a witness, with enough to go by, over steps that know little each."""

import pytest

from rollmesh.serve.client.samples import SampledRun
from rollmesh.trainer.meter.exactness import Findings, RunGap, find
from rollmesh.trainer.meter.suspicion import MEMORY_STEPS, MIN_SAMPLES, Suspicion
from tests.unit.trainer.samples import new_sample

A, B, C = "http://a", "http://b", "http://c"
HELD, BOUND = 7, 0.1
Told = tuple[SampledRun, float]


def run(
    engine: str, policy_version: int = HELD, dialect: str = "chat", cause: str = ""
) -> SampledRun:
    return SampledRun(1, policy_version, engine, dialect, cause)


def found(*told: Told, held: int = HELD) -> Findings:
    """Of samples of one token each, which is off by so much."""
    samples = [new_sample([1, 1], [0, 1], runs=(each,)) for each, _ in told]
    return find(
        samples, [[RunGap(1, gap, gap, bounded=gap, num_past=0)] for _, gap in told], held, BOUND
    )


def blamed(*told: Told) -> list[str]:
    """In a first step."""
    return [fault.engine for fault in Suspicion().judge(found(*told))]


def test_an_engine_is_at_fault_beside_one_that_is_not() -> None:
    [fault] = Suspicion().judge(found(*[(run(B), 0.5)] * 4, *[(run(A), 0.01)] * 4))
    assert (fault.engine, fault.policy_version) == (B, HELD)
    assert fault.why == (
        f"4 of its 4 samples have log-probs that are off by up to 0.5, and none of 4 alike of {A}"
    )


def test_two_engines_at_fault_are_both_found_by_one_that_is_not() -> None:
    told = [(run(engine), gap) for engine, gap in ((A, 0.5), (B, 0.0), (C, 0.7)) for _ in range(4)]
    assert blamed(*told) == [A, C]


@pytest.mark.parametrize(
    ("liars", "honest"),
    [
        ([(run(B), 0.5)] * 4, []),  # nobody to compare with
        ([(run(B), 0.5)] * 4, [(run(A), 0.5)] * 4),  # all alike: the trainer's own fault
        ([(run(B), 0.5)] * (MIN_SAMPLES - 1), [(run(A), 0.0)] * 8),  # too few
        ([(run(B), 0.5)] * 4, [(run(A), 0.0)] * (MIN_SAMPLES - 1)),
        ([(run(B), 0.5)] * 2 + [(run(B, cause="rewind"), 0.0)] * 3, [(run(A), 0.0)] * 8),  # few
        ([(run(""), 0.5)] * 4, [(run(A), 0.0)] * 8),  # nobody knows who
        ([(run(B), 0.5)] * 4, [(run(""), 0.0)] * 8),
        ([(run(B, dialect="responses"), 0.5)] * 4, [(run(A), 0.0)] * 8),  # not alike
        ([(run(B, cause="template"), 0.5)] * 4, [(run(A), 0.0)] * 8),
        ([(run(B, policy_version=6), 0.5)] * 4, [(run(A), 0.0)] * 8),  # drift
    ],
)
def test_no_engine_is_blamed_without_enough_to_go_by(liars: list[Told], honest: list[Told]) -> None:
    assert blamed(*liars, *honest) == []


def test_a_turn_over_two_engines_blames_the_one_whose_tokens_are_off() -> None:
    samples = [new_sample([1, 1, 1], [0, 1, 1], seq, runs=(run(A), run(B))) for seq in range(4)]
    findings = find(
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
    assert [fault.engine for fault in Suspicion().judge(findings)] == [B]


def test_steps_that_know_little_add_up_and_the_blamed_begins_anew() -> None:
    suspicion, faults = Suspicion(), []
    for step in range(3 * MIN_SAMPLES):
        told = (run(A, step), 0.0), (run(B, step), 0.5)
        faults.append([fault.policy_version for fault in suspicion.judge(found(*told, held=step))])
    blamed_at = [step for step, each in enumerate(faults) if each == [step]]
    assert blamed_at == [3, 7, 11]
    assert sum(map(len, faults)) == len(blamed_at)


def test_an_engine_that_is_sound_again_is_not_blamed_for_what_it_was() -> None:
    suspicion = Suspicion()
    suspicion.judge(found(*[(run(A), 0.0)] * 4, *[(run(B), 0.5)] * 3))
    assert suspicion.judge(found((run(B), 0.0))) == []
    assert suspicion.judge(found((run(B), 0.5))) == []
    assert suspicion.judge(found(*[(run(B), 0.5)] * 3)) != []


def test_what_was_known_long_ago_is_no_witness() -> None:
    for num_between, is_known in ((MEMORY_STEPS - 1, True), (MEMORY_STEPS, False)):
        suspicion = Suspicion()
        suspicion.judge(found(*[(run(A), 0.0)] * 4))
        for _ in range(num_between):
            suspicion.judge(found())
        assert bool(suspicion.judge(found(*[(run(B), 0.5)] * 4))) == is_known
