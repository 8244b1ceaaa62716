"""Gaps are counted by origin, samples are masked, and what masked ones have in common is named."""

import math

import numpy as np
import pytest

from rollmesh.serve.client.samples import Sample, SampledRun
from rollmesh.trainer.reports.exactness import (
    MAX_ORIGINS,
    ExactnessTotals,
    GapFindings,
    Gaps,
    Origin,
    RunGap,
    find_gaps,
    measure,
)
from tests.unit.trainer.samples import new_sample

A, B = "http://a", "http://b"
HELD, BOUND = 7, 0.1


def run(
    engine: str,
    num_tokens: int = 1,
    policy_version: int = HELD,
    dialect: str = "chat",
    cause: str = "",
) -> SampledRun:
    return SampledRun(num_tokens, policy_version, engine, dialect, cause)


def sample(*runs: SampledRun) -> Sample:
    num_tokens = sum(each.num_tokens for each in runs)
    return new_sample([1] * (num_tokens + 1), [0] + [1] * num_tokens, runs=runs)


TOKEN_BOUND = 1.0


def run_gap(num_tokens: int, total: float, largest: float) -> RunGap:
    """Gaps of a run whose tokens are all off by about the same."""
    is_past = not largest <= TOKEN_BOUND
    bounded = TOKEN_BOUND * num_tokens if is_past else total
    return RunGap(num_tokens, total, largest, bounded, num_tokens if is_past else 0)


def found(*measured: tuple[SampledRun, float], held: int | None = HELD) -> GapFindings:
    """Findings of samples with one run each, whose tokens are all off by the same."""
    samples = [sample(each) for each, _ in measured]
    gaps = [[run_gap(each.num_tokens, gap * each.num_tokens, gap)] for each, gap in measured]
    return find_gaps(samples, gaps, held, BOUND)


def test_gaps_are_summed_run_by_run() -> None:
    gaps = np.array([0.5, 1.5, 1.0, 4.0, 0.25], np.float32)
    silent = new_sample([1, 1, 1], [0, 1, 1], runs=())
    one, other = measure(gaps, [sample(run(A, 2), run(B, 1)), silent], TOKEN_BOUND)
    assert one == [RunGap(2, 2.0, 1.5, 1.5, 1), RunGap(1, 1.0, 1.0, 1.0, 0)]
    assert other == [RunGap(2, 4.25, 4.0, 1.25, 1)]
    assert measure(gaps[:0], [], TOKEN_BOUND) == []


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_gap_that_is_not_finite_counts_as_the_token_bound(gap: float) -> None:
    gaps = np.array([0.5, gap], np.float32)
    [[only_run]] = measure(gaps, [sample(run(A, 2))], TOKEN_BOUND)
    assert (only_run.bounded, only_run.num_past) == (1.5, 1)
    assert not math.isfinite(only_run.largest)


def test_runs_that_do_not_add_up_to_the_tokens_are_an_error() -> None:
    with pytest.raises(AssertionError):
        measure(np.zeros(3, np.float32), [sample(run(A, 2))], TOKEN_BOUND)


def test_exact_gaps_and_drift_are_separate_and_counted_by_origin() -> None:
    one = sample(run(A, 2), run(B, 1), run(A, 3), run(A, 5, policy_version=6, cause="rewind"))
    gaps: Gaps = [run_gap(2, 0.02, 0.015), run_gap(1, 0.03, 0.03), run_gap(3, 0.04, 0.02)]
    findings = find_gaps([one], [[*gaps, run_gap(5, 4.0, 1.0)]], HELD, BOUND)
    assert [(r["kind"], r["engine"], r["policy_version"]) for r in findings.rows()] == [
        ("exact", A, 7),
        ("exact", B, 7),
        ("drift", A, 6),
    ]
    of_a, of_b, drift = findings.rows()
    assert (of_a["num_tokens"], of_a["mean_gap"], of_a["max_gap"]) == (5, 0.012, 0.02)
    assert (of_b["num_tokens"], of_b["max_gap"]) == (1, 0.03)
    assert (drift["dialect"], drift["fork_cause"], drift["mean_gap"]) == ("chat", "rewind", 0.8)
    assert [row["num_samples"] for row in findings.rows()] == [1, 1, 1]
    assert findings.masked == []


def test_a_sample_is_masked_for_exact_gaps_alone() -> None:
    good, past, older = (run(A), 0.1), (run(A), 0.11), (run(A, policy_version=6), 9.0)
    assert found(good, past, older).masked == [1]
    assert found(good, past, older, held=None).masked == []
    assert found(good, past, older, held=6).masked == [2]


def is_masked(*gaps: float) -> bool:
    """Return whether a sample whose tokens are off by that much is masked."""
    one = sample(*[run(A) for _ in gaps])
    return find_gaps([one], [[run_gap(1, gap, gap) for gap in gaps]], HELD, BOUND).masked == [0]


def test_sample_is_masked_by_its_mean_gap_not_by_one_token() -> None:
    assert not is_masked(0.15, 0.04)
    assert is_masked(0.15, 0.06)
    assert not is_masked(50.0, *[0.0] * 30)
    assert is_masked(50.0, *[0.0] * 3)


def test_tokens_of_older_weights_do_not_lower_the_mean_gap() -> None:
    one = sample(run(A), run(A, 9, policy_version=6))
    findings = find_gaps([one], [[run_gap(1, 0.2, 0.2), run_gap(9, 0.0, 0.0)]], HELD, BOUND)
    assert findings.masked == [0]


def test_masked_sample_counts_only_for_origins_past_the_bound() -> None:
    one, other = sample(run(A), run(B)), sample(run(A), run(B, 9))
    gaps = [
        [run_gap(1, 0.0, 0.0), run_gap(1, 0.5, 0.5)],
        [run_gap(1, 0.2, 0.2), run_gap(9, 0.0, 0.0)],
    ]
    findings = find_gaps([one, other], gaps, HELD, BOUND)
    assert findings.masked == [0]  # the other is within the bound as a whole
    masked = {origin.engine: cell.num_masked for origin, cell in findings.exact.items()}
    assert masked == {A: 0, B: 1}


def test_unmeasured_sample_is_ignored() -> None:
    findings = find_gaps(
        [sample(run(A)), sample(run(A))], [[], [run_gap(1, 0.0, 0.0)]], HELD, BOUND
    )
    assert [cell.num_tokens for cell in findings.exact.values()] == [1]
    assert findings.masked == []


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_recording_of_older_weights_that_is_not_finite_masks_no_sample(gap: float) -> None:
    findings = found((run(A, policy_version=6), gap), (run(A), 0.0))
    assert findings.masked == []
    assert [cell.num_past for cell in findings.drift.values()] == [1]


def test_nan_gap_is_past_the_bound() -> None:
    findings = found((run(A), math.nan), (run(A), 0.0))
    assert findings.masked == [0]
    assert math.isnan(findings.exact[Origin(HELD, A, "chat", "")].largest)
    assert math.isnan(findings.max_gap)


def test_common_origin_of_masked_samples_is_named() -> None:
    strange = [(run(A, dialect="responses"), 0.5), (run(B, dialect="responses"), 0.5)]
    assert found(*strange, (run(A), 0.0), (run(B), 0.0)).only == {"dialect": "responses"}
    assert found(*strange).only == {}  # all are
    forked = [(run(A, cause="template"), 0.5), (run(A), 0.0)]
    assert found(*forked).only == {"fork_cause": "template"}
    assert found((run(A), 0.0)).only == {}
    findings = found((run(A), 0.0), (run(B), 0.5), (run(B), 0.4))
    assert (findings.only, findings.max_gap) == ({"engine": B}, 0.5)


def test_totals_of_a_run_add_up_and_are_bounded() -> None:
    book = ExactnessTotals()
    book.add(found((run(A), 0.5), (run(A, policy_version=6), 3.0)))
    book.add(found((run(A, policy_version=8), 0.1), held=8))
    [row] = book.rows()
    assert row["engine"] == A
    assert (row["num_tokens"], row["max_gap"], row["num_masked"]) == (2, 0.5, 1)
    assert row["mean_gap"] == pytest.approx(0.3)
    for at in range(MAX_ORIGINS + 5):
        book.add(found((run(f"http://{at}"), 0.0)))
    assert len(book.rows()) == MAX_ORIGINS + 1
    assert sum(row["num_tokens"] for row in book.rows()) == MAX_ORIGINS + 7
