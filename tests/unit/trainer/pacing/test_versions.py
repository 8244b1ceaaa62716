"""A token's age is known from the step of its version, for as long as ages need it."""

import pytest

from rollmesh.trainer.pacing.lifecycle import (
    SPARE_VERSIONS,
    VersionSteps,
    spans_versions,
    versions_of,
)
from tests.unit.trainer.pacing.test_ready_queue import sampled_by


@pytest.fixture
def versions() -> VersionSteps:
    """Publications skip steps, and a recovery names the weights after four steps once more."""
    found = VersionSteps(max_staleness=2)
    found.add({1: 2, 2: 4, 5: 4})
    return found


def test_before_all_publications_there_is_the_version_that_engines_began_with() -> None:
    assert dict(VersionSteps(max_staleness=2).steps) == {0: 0}


def test_an_age_is_of_the_oldest_trained_token_and_counts_steps(versions: VersionSteps) -> None:
    samples = [sampled_by(2, 5), sampled_by(1, 2)]
    assert versions.age(samples, 6) == 6 - 2
    assert versions.age(samples[:1], 6) == 6 - 4
    assert versions.oldest_step({1, 5}) == 2
    assert versions.newest_step({1, 5}) == 4


def test_of_weights_with_two_names_the_newer_one_counts(versions: VersionSteps) -> None:
    assert [versions.named(step) for step in (0, 2, 3, 4)] == [0, 1, None, 5]


def test_past_the_bound_are_all_that_fewer_steps_had_made(versions: VersionSteps) -> None:
    before = {step: versions.made_before(step) for step in (0, 1, 2, 3, 4, 5)}
    assert before[0] == frozenset()
    assert before[1] == before[2] == {0}
    assert before[3] == before[4] == {0, 1}
    assert before[5] == {0, 1, 2, 5}


def test_an_unpublished_version_is_of_another_run(versions: VersionSteps) -> None:
    assert versions.foreign({0, 2, 5}) == set()
    assert versions.foreign({2, 3, 9}) == {3, 9}


def test_where_no_version_is_known_there_is_no_age(versions: VersionSteps) -> None:
    assert versions.age_of((1, 9), 6) == 4
    assert versions.age_of((9,), 6) is None
    assert versions.age_of((), 6) is None


def test_the_oldest_are_forgotten_and_never_one_that_may_train() -> None:
    versions = VersionSteps(max_staleness=2)
    newest = 3 * SPARE_VERSIONS
    for step in range(newest + 1):
        versions.add({step: step})
    assert len(versions.steps) == 2 + SPARE_VERSIONS
    assert list(versions.steps) == list(range(newest - SPARE_VERSIONS - 1, newest + 1))


def test_versions_are_of_trained_tokens_alone() -> None:
    assert versions_of([sampled_by(3, 4), sampled_by(4, 6)]) == {3, 4, 6}
    assert versions_of([]) == frozenset()
    assert [spans_versions(sampled_by(*each)) for each in ((3, 4), (3, 3))] == [True, False]
