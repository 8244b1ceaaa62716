"""Sampled tokens and the runs of versions they came from."""

from rollmesh.core.types import VersionRun
from rollmesh.runtime.generation_events import SampledTokens


def sampled(*versions: int) -> SampledTokens:
    tokens = SampledTokens()
    for at, policy_version in enumerate(versions):
        tokens.append([at], [-1.0], policy_version)
    return tokens


def test_neighbouring_tokens_of_one_version_are_one_run() -> None:
    assert sampled(1, 1, 2).policy_versions == [VersionRun(1, 2), VersionRun(2, 1)]


def test_truncation_cuts_runs_and_arrays_alike() -> None:
    tokens = sampled(1, 1, 2, 2)
    tokens.truncate(3)
    assert list(tokens.token_ids) == [0, 1, 2]
    assert len(tokens.logprobs) == 3
    assert tokens.policy_versions == [VersionRun(1, 2), VersionRun(2, 1)]
    tokens.truncate(0)
    assert tokens.policy_versions == []


def test_tokens_of_one_version_and_two_engines_are_two_runs() -> None:
    tokens = SampledTokens()
    for engine in ("http://a", "http://b", "http://a"):
        tokens.begin_attempt(engine)
        tokens.append([1, 2], [-1.0, -1.0], 3)
    assert tokens.engines == ["http://a", "http://b"]
    assert tokens.policy_versions == [VersionRun(3, 2, 0), VersionRun(3, 2, 1), VersionRun(3, 2, 0)]
    tokens.truncate(3)
    assert tokens.policy_versions == [VersionRun(3, 2, 0), VersionRun(3, 1, 1)]


def test_restated_runs_are_of_the_engine_whose_leg_it_is() -> None:
    tokens = SampledTokens()
    for engine in ("http://a", "http://b"):
        tokens.begin_attempt(engine)
        tokens.append([1, 2], [-1.0, -1.0], 3)
    tokens.restate(2, (VersionRun(3, 1), VersionRun(4, 1)))
    assert tokens.policy_versions == [VersionRun(3, 2, 0), VersionRun(3, 1, 1), VersionRun(4, 1, 1)]


def test_restated_runs_replace_those_behind_the_offset() -> None:
    tokens = sampled(1, 2, 2)
    tokens.restate(1, (VersionRun(1, 1), VersionRun(2, 1)))
    assert tokens.policy_versions == [VersionRun(1, 2), VersionRun(2, 1)]


def test_runs_that_do_not_add_up_are_not_believed() -> None:
    tokens = sampled(1, 2)
    tokens.restate(0, (VersionRun(5, 1),))
    assert tokens.policy_versions == [VersionRun(1, 1), VersionRun(2, 1)]


def test_likeliest_tokens_are_cut_with_their_tokens() -> None:
    tokens = SampledTokens()
    tokens.append([1, 2], [-1.0, -2.0], 0, [((-1.0, 1),), ((-2.0, 2),)])
    tokens.truncate(1)
    assert tokens.top_logprobs == [((-1.0, 1),)]
