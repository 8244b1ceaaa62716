"""Scores of the probe prove the weights, other weights, ignored updates, or nothing yet.

Engines that were asleep are updated only if they do not become ready by themselves.
"""

import math

import pytest

from rollmesh.trainer.weights.publisher import UpdatePhase
from rollmesh.trainer.weights.verdicts import Probe, ProbeVerdict, WeightProof, judge, mean_gap
from rollmesh.wire.fleet import EnginePhase, SleepEngine, WakeEngine
from rollmesh.wire.machine import Received
from tests.unit.trainer.weights.publisher_world import A, B, Mesh, target

TOLERANCE = 0.1
NOISE = (0.02, -0.02)
"""Noise that a low-precision engine adds to exact log-probs."""
START = (-1.0, -2.0)


def shifted(by: float) -> tuple[float, ...]:
    """Return log-probs after a drift."""
    return tuple(each + by for each in START)


def scored(by: float, noise: tuple[float, ...] = NOISE) -> tuple[float, ...]:
    """Return the scores of an engine whose weights have drifted by `drift`."""
    return tuple(a + b for a, b in zip(shifted(by), noise, strict=True))


def probe(by: float, coarse: float | None = None) -> Probe:
    return Probe((1, 2, 3), shifted(by), () if coarse is None else shifted(coarse))


def first(noise: tuple[float, ...] = NOISE) -> WeightProof:
    """The proof after the first probe."""
    proof = judge(scored(0.0, noise), 1, probe(0.0, 0.0), None, TOLERANCE).proof
    assert proof
    return proof


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ((-1.0,), "scored 1 tokens of 2"),
        ((-1.0, math.nan), "its log-probs differ from the trainer's by nan on average"),
        ((-1.25, -2.25), "its log-probs differ from the trainer's by 0.25 on average"),
        ((-124.4567, -123.4567), "its log-probs differ from the trainer's by 122 on average"),
    ],
)
def test_scores_of_other_weights_are_wrong_and_prove_nothing(
    scores: tuple[float, ...], why: str
) -> None:
    verdict = judge(scores, 1, probe(0.0), None, TOLERANCE)
    assert verdict.wrong.startswith(why)
    assert verdict.proof is None


def test_gap_is_shown_with_three_significant_digits() -> None:
    verdict = judge(shifted(0.000123456), 1, probe(0.0), None, 1e-5)
    assert "by 0.000123 on average, more than 1e-05" in verdict.wrong


def test_first_probe_is_the_proof_and_measures_the_noise() -> None:
    assert first().policy_version == 1
    assert first().noise == pytest.approx(0.02)
    assert first((0.0, 0.0)).noise == pytest.approx(1e-5)


@pytest.mark.parametrize("drift", [1e-9, 1e-5, 0.019])
@pytest.mark.parametrize("moved", [False, True])
def test_drift_below_the_noise_proves_nothing(drift: float, *, moved: bool) -> None:
    proof = first()
    scores = scored(drift if moved else 0.0)
    assert judge(scores, 2, probe(drift), proof, TOLERANCE) == ProbeVerdict(proof)


def test_small_steps_of_an_engine_that_ignores_them_add_up() -> None:
    proof: WeightProof | None = first()
    for policy_version in range(2, 12):
        now = probe(0.001 * policy_version)
        verdict = judge(scored(0.0), policy_version, now, proof, TOLERANCE)
        assert verdict == ProbeVerdict(proof)
    verdict = judge(scored(0.0), 50, probe(0.05), proof, TOLERANCE)
    assert "moved by 0.05 since version 1, its own by 0" in verdict.stuck
    assert verdict.proof == proof


def test_engine_that_follows_is_proved_once_the_drift_passes_the_noise() -> None:
    verdict = judge(scored(0.03, (-0.01, 0.03)), 2, probe(0.03), first(), TOLERANCE)
    assert (verdict.wrong, verdict.stuck) == ("", "")
    assert verdict.proof
    assert verdict.proof.policy_version == 2
    assert verdict.proof.noise == pytest.approx(0.02)


def test_engine_that_moved_elsewhere_is_not_proved() -> None:
    proof = first()
    assert judge(scored(-0.03), 2, probe(0.03), proof, TOLERANCE) == ProbeVerdict(proof)


def test_coarse_weights_that_a_step_does_not_reach_may_score_as_before() -> None:
    proof = first()
    assert judge(scored(0.0), 2, probe(0.05, coarse=0.0), proof, TOLERANCE) == ProbeVerdict(proof)
    assert judge(scored(0.0), 2, probe(0.05, coarse=0.05), proof, TOLERANCE).stuck


def test_probes_of_another_text_are_not_compared() -> None:
    other = Probe((7, 8, 9), shifted(0.05))
    verdict = judge(scored(0.0), 2, other, first(), TOLERANCE)
    assert verdict.stuck == ""
    assert verdict.proof
    assert verdict.proof.policy_version == 2


def test_mean_gap_is_the_mean_of_absolute_differences() -> None:
    assert mean_gap((1.0, -1.0), (0.0, 1.0)) == 1.5


COORDINATOR = b"coordinator"


def published(policy_version: int) -> Mesh:
    """A mesh with a sleeping engine A, and B updated to the version."""
    mesh = Mesh(A, B)
    mesh.run(1.0)
    mesh.tend_fleet(Received(COORDINATOR, SleepEngine(1, A, 100.0)))
    mesh.publish(target(policy_version))
    mesh.run(2.0)
    mesh.was_called.clear()
    return mesh


def test_a_publication_does_not_wait_for_engines_that_sleep() -> None:
    mesh = published(1)
    [report] = mesh.reports
    assert report.updated == (B,)
    assert report.failed == ()
    assert mesh.phase(A) is EnginePhase.ASLEEP


def test_engine_that_wakes_with_the_published_weights_is_not_updated() -> None:
    mesh = published(1)
    mesh.engines[A].label = mesh.engines[A].weights = 1
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 1)))
    mesh.run(6.0)
    assert (mesh.phase(A), mesh.policy_version(A)) == (EnginePhase.READY, 1)
    assert mesh.was_called == []
    mesh.publish(target(2))
    mesh.run(3.0)
    assert set(mesh.reports[-1].updated) == {A, B}


def test_engine_that_wakes_with_older_weights_is_updated() -> None:
    mesh = published(1)
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 0)))
    mesh.run(6.0)
    assert (mesh.phase(A), mesh.policy_version(A)) == (EnginePhase.READY, 1)
    assert (A, UpdatePhase.LOADING) in mesh.was_called


def test_engine_that_wakes_with_older_weights_does_not_serve_after_a_newer_publication_ended() -> (
    None
):
    mesh = Mesh(A)
    mesh.run(1.0)
    mesh.publish(target(1))
    mesh.run(2.0)
    mesh.tend_fleet(Received(COORDINATOR, SleepEngine(1, A, 100.0)))
    mesh.publish(target(2))
    mesh.run(2.0)
    assert (mesh.reports[-1].policy_version, mesh.reports[-1].updated) == (2, ())
    # Its coordinator had loaded version 1 before the folder of version 2 was whole.
    mesh.tend_fleet(Received(COORDINATOR, WakeEngine(2, A, 1)))
    for _ in range(100):
        mesh.run(0.05)
        assert mesh.phase() is not EnginePhase.READY or mesh.policy_version() == 2
    assert mesh.phase() is EnginePhase.READY
