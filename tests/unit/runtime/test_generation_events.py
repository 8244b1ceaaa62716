"""Sampled tokens with their version runs, and timeouts and resumption of the current attempt."""

from typing import Any

import pytest

from rollmesh.core.types import OutputGrammar, SamplingParams, VersionRun
from rollmesh.engine.backend import Finish
from rollmesh.runtime.generation.events import (
    MAX_ABORT_REPEAT_S,
    AbortAttempt,
    AttemptPhase,
    ChooseEngine,
    DropAttempt,
    EngineAttempt,
    EngineChosen,
    EngineLost,
    FleetMoved,
    ReaderJoined,
    SampledTokens,
    StartAttempt,
    UpdateBegun,
    is_resumable,
)
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.wire.machine import Ticked
from tests.unit.runtime.generation_driver import ENGINE, GenerationDriver, running
from tests.unit.runtime.random_engines import ABORT as CUT
from tests.unit.runtime.random_engines import PROMPT


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


def test_restated_runs_belong_to_the_engine_of_the_attempt() -> None:
    tokens = SampledTokens()
    for engine in ("http://a", "http://b"):
        tokens.begin_attempt(engine)
        tokens.append([1, 2], [-1.0, -1.0], 3)
    tokens.restate(2, (VersionRun(3, 1), VersionRun(4, 1)))
    assert tokens.policy_versions == [VersionRun(3, 2, 0), VersionRun(3, 1, 1), VersionRun(4, 1, 1)]


def test_restated_runs_replace_those_after_the_offset() -> None:
    tokens = sampled(1, 2, 2)
    tokens.restate(1, (VersionRun(1, 1), VersionRun(2, 1)))
    assert tokens.policy_versions == [VersionRun(1, 2), VersionRun(2, 1)]


def test_inconsistent_runs_are_ignored() -> None:
    tokens = sampled(1, 2)
    tokens.restate(0, (VersionRun(5, 1),))
    assert tokens.policy_versions == [VersionRun(1, 1), VersionRun(2, 1)]


def test_likeliest_tokens_are_cut_with_their_tokens() -> None:
    tokens = SampledTokens()
    tokens.append([1, 2], [-1.0, -2.0], 0, [((-1.0, 1),), ((-2.0, 2),)])
    tokens.truncate(1)
    assert tokens.top_logprobs == [((-1.0, 1),)]


ABORT = AbortAttempt(0, "r.0", "http://a")


def attempt(*, stream: bool = True) -> EngineAttempt:
    return EngineAttempt(StartAttempt(0, "r.0", "http://a", 100, "0", stream), ENGINE, 0, 0.0)


def test_the_silence_limit_of_a_plain_attempt_grows_with_its_tokens() -> None:
    assert attempt().is_silent(60.0, 60.0)
    assert not attempt(stream=False).is_silent(69.9, 60.0)
    assert attempt(stream=False).is_silent(70.0, 60.0)


def test_aborts_are_repeated_at_growing_bounded_intervals() -> None:
    aborted = attempt()
    assert aborted.abort(0.0, 0.0) == ABORT
    assert aborted.phase is AttemptPhase.ABORTING
    now_s = 0.0
    for wait_s in (0.0625, 0.125, MAX_ABORT_REPEAT_S, MAX_ABORT_REPEAT_S):
        assert not aborted.wants_repeat(now_s + wait_s - 0.001, 0.0625)
        now_s += wait_s
        assert aborted.wants_repeat(now_s, 0.0625)
        assert aborted.abort(0.0, now_s) == ABORT


def test_an_attempt_ignores_aborts_when_its_first_abort_is_long_ago() -> None:
    aborted = attempt()
    aborted.abort(1.0, 1.0)
    aborted.abort(5.0, 5.0)
    assert not aborted.is_deaf(5.9, 5.0)
    assert aborted.is_deaf(6.0, 5.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"grammar": OutputGrammar("regex", "a+")},
    ],
)
def test_settings_that_depend_on_earlier_output_cannot_be_resumed(fields: dict[str, Any]) -> None:
    assert not is_resumable(SamplingParams(max_tokens=1, **fields))


def test_settings_that_apply_to_each_token_alone_can_be_resumed() -> None:
    params = SamplingParams(
        max_tokens=1, temperature=0.5, min_p=0.1, logit_bias=((1, 2.0),), seed=3, stop=("a",)
    )
    assert is_resumable(params)


def test_a_turn_leaves_an_engine_before_its_update_and_continues_elsewhere() -> None:
    driver = running()
    driver.sample(0, 1)
    assert driver.step(UpdateBegun("http://other")) == []
    assert driver.step(UpdateBegun(ENGINE.url)) == [AbortAttempt(0, "r.0", ENGINE.url)]
    assert driver.step(UpdateBegun(ENGINE.url)) == []
    driver.sample(0, 2, finish=CUT)
    assert driver.actions_of(ChooseEngine)
    [start] = driver.step(EngineChosen("http://b", "i1", 1))
    assert isinstance(start, StartAttempt)
    assert (start.url, driver.machine.context()) == ("http://b", [*PROMPT, 1, 2])


def test_an_abort_for_an_update_is_repeated_while_the_turns_time_is_paused() -> None:
    driver = running()
    driver.step(UpdateBegun(ENGINE.url))
    driver.step(FleetMoved(is_paused=True))
    assert driver.step(Ticked(), after_s=0.3) == [AbortAttempt(0, "r.0", ENGINE.url)]
    assert driver.step(Ticked(), after_s=1000.0) == [AbortAttempt(0, "r.0", ENGINE.url)]
    assert driver.machine.attempt_url == ENGINE.url


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_that_cannot_resume_ends_at_its_engine_before_the_update(stream: bool) -> None:
    driver = GenerationDriver(stream=stream, grammar=OutputGrammar("regex", "a+"))
    driver.step(ReaderJoined())
    driver.step(ENGINE)
    assert driver.step(UpdateBegun(ENGINE.url)) == []
    driver.sample(0, 1, 2, finish=Finish("stop"))
    assert driver.machine.state is GenerationState.COMMITTED
    assert driver.machine.num_legs == 1


def test_a_streamed_turn_that_cannot_resume_restarts_if_no_token_was_read() -> None:
    driver = running(grammar=OutputGrammar("regex", "a+"))
    driver.step(UpdateBegun(ENGINE.url))
    driver.sample(0, finish=CUT)
    assert driver.actions_of(ChooseEngine)
    assert driver.machine.state is GenerationState.RUNNING


def test_a_turn_that_updates_cut_repeatedly_is_not_given_up() -> None:
    driver = running()
    for attempt in range(100):
        driver.step(UpdateBegun(ENGINE.url))
        driver.sample(attempt, finish=CUT)
        assert driver.actions_of(ChooseEngine) == [ChooseEngine(0)]
        driver.step(ENGINE)
    driver.sample(100, 1, finish=Finish("stop"))
    assert driver.machine.state is GenerationState.COMMITTED


def test_an_attempt_uses_the_adapter_of_its_engine() -> None:
    driver = running()
    driver.sample(0, 1, finish=CUT)
    [start] = driver.step(EngineChosen("http://b", "i1", 1, "rollmesh-v1"))
    assert isinstance(start, StartAttempt)
    assert start.adapter == "rollmesh-v1"


def test_a_streamed_turn_that_cannot_resume_stays_at_an_engine_that_others_have_left() -> None:
    driver = running(grammar=OutputGrammar("regex", "a+"))
    driver.sample(0, 1)
    assert driver.step(EngineLost(ENGINE.url)) == []
    driver.sample(0, 2, finish=Finish("stop"))
    assert driver.machine.state is GenerationState.COMMITTED


def test_a_turn_that_cannot_resume_restarts_elsewhere_if_no_token_was_read() -> None:
    driver = GenerationDriver(stream=False, grammar=OutputGrammar("regex", "a+"))
    driver.step(ReaderJoined())
    driver.step(ENGINE)
    driver.step(EngineLost(ENGINE.url))
    assert driver.actions_of(DropAttempt)
    assert driver.actions_of(ChooseEngine)
