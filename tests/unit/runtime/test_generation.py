"""The generation machine: attempts, resumption, parking, ends, and random schedules."""

from collections.abc import Sequence

import pytest

from rollmesh.core.errors import EngineRefused, EngineUnavailable
from rollmesh.core.types import OutputGrammar, VersionRun
from rollmesh.engine.backend import Finish
from rollmesh.runtime.generation.events import (
    AbortAttempt,
    AttemptSampled,
    AvoidEngine,
    ChooseEngine,
    DropAttempt,
    EngineAttemptFailed,
    EngineChosen,
    EngineFull,
    EngineLost,
    EngineMissed,
    FellBack,
    FleetMoved,
    ReaderJoined,
    ReaderLeft,
    ReportFault,
    Sealed,
    StartAttempt,
    StopHit,
    WakeReaders,
)
from rollmesh.runtime.generation.generation import GenerationMachine, GenerationState
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.testing.engine import STOP_TOKEN
from rollmesh.wire.machine import Ticked
from tests.unit.runtime.generation_driver import ENGINE, GenerationDriver, running
from tests.unit.runtime.random_engines import ABORT, PROMPT, GenerationWorld


def test_a_turn_that_stops_is_committed_with_its_tokens() -> None:
    driver = running()
    driver.sample(0, 1, 2)
    driver.sample(0, 3, STOP_TOKEN, finish=Finish("stop", STOP_TOKEN))
    machine = driver.machine
    assert machine.state is GenerationState.COMMITTED
    assert list(machine.sampled.token_ids) == [1, 2, 3, STOP_TOKEN]
    assert list(machine.sampled.logprobs) == [-1.0, -2.0, -3.0, 0.0]
    assert (machine.finish_reason, machine.matched_stop) == ("stop", STOP_TOKEN)
    assert driver.actions_of(WakeReaders)
    assert machine.is_settled


def test_an_unrequested_abort_is_resumed_from_the_exact_tokens() -> None:
    driver = running()
    driver.sample(0, 1, 2, 3)
    driver.sample(0, finish=ABORT)
    assert driver.actions_of(ChooseEngine)
    [start] = driver.step(EngineChosen("http://b", "i1", 1))
    assert start == StartAttempt(1, "r.1", "http://b", 7, "1", True)
    assert driver.machine.context() == [*PROMPT, 1, 2, 3]
    driver.sample(1, 4, finish=Finish("stop"), policy_version=1)
    assert driver.machine.finish_reason == "stop"
    sampled = driver.machine.sampled
    assert sampled.policy_versions == [VersionRun(0, 3, 0), VersionRun(1, 1, 1)]
    assert sampled.engines == ["http://a", "http://b"]


def test_a_turn_over_two_engines_of_one_version_has_two_runs() -> None:
    driver = running()
    for attempt, engine in enumerate([ENGINE, EngineChosen("http://b", "i1", 0), ENGINE]):
        if attempt:
            driver.step(engine)
        driver.sample(attempt, attempt + 1, finish=ABORT)
    sampled = driver.machine.sampled
    assert sampled.policy_versions == [
        VersionRun(0, 1, 0),
        VersionRun(0, 1, 1),
        VersionRun(0, 1, 0),
    ]
    assert sampled.engines == [ENGINE.url, "http://b"]


def test_the_finish_reason_is_length_only_when_all_tokens_have_arrived() -> None:
    driver = running(max_tokens=10)
    driver.sample(0, *range(1, 10), finish=ABORT)
    assert driver.machine.state is GenerationState.RUNNING
    driver.step(ENGINE)
    driver.sample(1, 10, finish=ABORT)
    assert driver.machine.finish_reason == "length"


def test_an_abort_after_a_stop_token_is_a_stop() -> None:
    driver = running()
    driver.sample(0, 1, STOP_TOKEN, finish=ABORT)
    assert driver.machine.finish_reason == "stop"


def test_tokens_over_max_tokens_are_cut() -> None:
    driver = running(max_tokens=10)
    driver.sample(0, *range(1, 15), finish=Finish("length"))
    assert len(driver.machine.sampled) == 10
    assert len(driver.machine.sampled.logprobs) == 10


def test_the_last_reader_to_leave_parks_the_turn_and_a_new_one_resumes_it() -> None:
    driver = running()
    driver.sample(0, 1)
    assert driver.step(ReaderLeft()) == [AbortAttempt(0, "r.0", ENGINE.url)]
    assert driver.machine.state is GenerationState.PARKED
    driver.sample(0, 2, finish=ABORT)
    assert driver.actions_of(ChooseEngine) == []
    assert driver.step(ReaderJoined(), after_s=29.0) == [ChooseEngine(0)]
    assert driver.machine.context() == [*PROMPT, 1, 2]


def test_one_of_two_readers_may_leave() -> None:
    driver = running()
    driver.step(ReaderJoined())
    assert driver.step(ReaderLeft()) == []
    assert driver.machine.state is GenerationState.RUNNING


def test_a_reader_that_returns_before_the_abort_has_taken_effect_waits_for_it() -> None:
    driver = running()
    driver.step(ReaderLeft())
    assert driver.step(ReaderJoined()) == []
    driver.sample(0, 1, finish=ABORT)
    assert driver.actions_of(ChooseEngine)


def test_an_abort_is_repeated_until_the_stream_ends() -> None:
    driver = running()
    driver.step(ReaderLeft())
    for _ in range(4):
        assert driver.step(Ticked(), after_s=0.3) == [AbortAttempt(0, "r.0", ENGINE.url)]
    driver.sample(0, finish=ABORT)
    assert driver.step(Ticked(), after_s=0.3) == []


def test_an_attempt_that_ignores_its_abort_is_dropped() -> None:
    driver = running()
    driver.step(ReaderLeft())
    driver.step(Ticked(), after_s=5.0)
    assert driver.actions_of(DropAttempt) == [DropAttempt(0)]
    assert driver.machine.attempt_url is None


def test_a_parked_turn_that_finishes_before_its_abort_is_committed() -> None:
    driver = running()
    driver.step(ReaderLeft())
    driver.sample(0, 1, finish=Finish("stop", 1))
    assert driver.machine.state is GenerationState.COMMITTED


def test_a_parked_turn_is_void_when_the_retry_window_is_over() -> None:
    driver = running()
    driver.step(ReaderLeft())
    driver.sample(0, finish=ABORT)
    driver.step(Ticked(), after_s=30.0)
    assert driver.machine.state is GenerationState.VOID
    assert driver.machine.is_settled


def test_a_seal_wakes_readers_and_accepts_no_more_tokens() -> None:
    driver = running()
    driver.sample(0, 1)
    driver.step(Sealed("the rollout ended"))
    assert driver.actions_of(WakeReaders)
    assert driver.actions_of(AbortAttempt)
    driver.sample(0, 2, finish=ABORT)
    assert list(driver.machine.sampled.token_ids) == [1]
    assert str(driver.machine.error) == "the rollout ended"
    assert driver.machine.is_settled


def test_a_seal_does_not_change_a_committed_turn() -> None:
    driver = running()
    driver.sample(0, 1, finish=Finish("stop", 1))
    assert driver.step(Sealed("late")) == []
    assert driver.machine.state is GenerationState.COMMITTED


def test_a_failed_attempt_is_reported_and_resumed_elsewhere() -> None:
    driver = running()
    driver.sample(0, 1)
    driver.step(EngineAttemptFailed(0, "connection reset"))
    assert driver.actions_of(ReportFault) == [ReportFault(ENGINE.url, "i1", "connection reset")]
    assert driver.actions_of(ChooseEngine)


def test_a_refused_attempt_ends_the_turn_with_the_engines_message() -> None:
    driver = running()
    driver.step(EngineAttemptFailed(0, "prompt too long", kind="refused"))
    assert driver.machine.state is GenerationState.VOID
    assert isinstance(driver.machine.error, EngineRefused)
    assert driver.actions_of(WakeReaders)


def test_an_engine_that_fails_after_a_token_or_without_images_is_at_fault() -> None:
    seeing, plain = running(images=("https://here/a.png",)), running()
    seeing.sample(0, 1)
    for driver in (seeing, plain):
        driver.step(EngineAttemptFailed(0, "cut", "broke"))
        assert driver.actions_of(ReportFault)
        assert driver.machine.state is GenerationState.RUNNING


def test_waiting_for_an_engine_times_out_and_pauses_do_not_count() -> None:
    driver = GenerationDriver()
    driver.step(ReaderJoined())
    driver.step(FleetMoved(is_paused=True))
    driver.step(Ticked(), after_s=1000.0)
    assert driver.machine.state is GenerationState.RUNNING
    driver.step(FleetMoved(is_paused=False))
    driver.step(Ticked(), after_s=119.0)
    assert driver.actions_of(ChooseEngine)
    assert driver.step(EngineMissed("http://a: joining, connection refused")) == []
    driver.step(Ticked(), after_s=1.0)
    assert isinstance(driver.machine.error, EngineUnavailable)
    assert "no engine is ready (last: http://a: joining, conn" in str(driver.machine.error)


def test_a_turn_queued_for_its_engine_is_not_silent_and_meets_no_deadline() -> None:
    driver = GenerationDriver()
    driver.step(ReaderJoined())
    driver.step(Ticked())
    assert driver.step(EngineFull()) == []
    assert driver.step(Ticked(), after_s=1000.0) == []
    assert driver.machine.is_queued
    assert driver.step(FleetMoved(is_paused=False)) == [ChooseEngine(0)]
    driver.step(EngineFull())
    [start] = driver.step(ENGINE)
    assert isinstance(start, StartAttempt)
    assert not driver.machine.is_queued


def test_a_turn_abandoned_in_the_queue_is_parked_and_expires() -> None:
    driver = GenerationDriver()
    driver.step(ReaderJoined())
    driver.step(EngineFull())
    driver.step(ReaderLeft())
    assert not driver.machine.is_queued
    driver.step(Ticked(), after_s=1000.0)
    assert driver.machine.state is GenerationState.VOID


def test_waiting_for_newer_weights_than_are_served_times_out_with_that_reason() -> None:
    driver = GenerationDriver()
    driver.step(ReaderJoined())
    driver.step(Ticked())
    assert driver.step(EngineMissed("http://a: ready, with policy version 3", is_behind=True)) == []
    driver.step(Ticked(), after_s=120.0)
    assert isinstance(driver.machine.error, EngineUnavailable)
    message = "no engine has weights as new as this session has seen (last: http://a: ready, with"
    assert message in str(driver.machine.error)


def free(policy_version: int) -> GenerationDriver:
    """Return a turn of a session that has seen version 5, at an engine without a publisher."""
    driver = GenerationDriver(min_policy_version=5)
    driver.step(ReaderJoined())
    driver.step(EngineChosen("http://a", "i1", policy_version, has_publisher=False))
    return driver


def test_without_a_publisher_tokens_are_kept_and_a_fall_back_is_reported_once() -> None:
    driver = free(policy_version=6)
    driver.sample(0, 1, 2, policy_version=4)
    assert driver.actions_of(FellBack) == [FellBack("http://a", 5, 4)]
    driver.sample(0, 3, policy_version=4)
    assert not driver.actions_of(FellBack)
    driver.sample(0, STOP_TOKEN, finish=Finish("stop", STOP_TOKEN), policy_version=4)
    assert driver.machine.num_legs == 1
    assert driver.machine.sampled.policy_versions == [VersionRun(4, 4, 0)]


def test_without_a_publisher_unnumbered_tokens_are_kept_and_not_compared() -> None:
    driver = free(policy_version=6)
    driver.sample(0, 1, policy_version=-1)
    assert driver.actions_of(FellBack) == []
    assert driver.machine.min_policy_version == 5
    assert driver.machine.sampled.policy_versions == [VersionRun(-1, 1, 0)]


def test_the_timeout_of_a_turn_names_the_unnumbered_weights_of_its_engine() -> None:
    driver = GenerationDriver(min_policy_version=5)
    driver.step(ReaderJoined())
    for attempt in range(17):
        driver.step(EngineChosen("http://a", "i1", 5))
        driver.sample(attempt, 1, policy_version=-1)
        driver.step(Ticked(), after_s=1.0)
    message = "(last: http://a: samples with unnumbered weights, the fleet table has 5)"
    assert message in str(driver.machine.error)


def test_a_turn_with_weights_of_an_ended_run_ends_at_once() -> None:
    driver = GenerationDriver()
    actions = driver.step(EngineMissed("version 18 was of another run", is_for_good=True))
    assert WakeReaders() in actions
    assert isinstance(driver.machine.error, EngineUnavailable)
    assert "another run" in str(driver.machine.error)
    assert driver.step(EngineMissed("the same", is_for_good=True)) == []


def test_a_silent_attempt_is_dropped_and_resumed() -> None:
    driver = running()
    driver.sample(0, 1)
    assert driver.step(Ticked(), after_s=89.0) == []
    driver.step(Ticked(), after_s=1.0)
    assert driver.actions_of(DropAttempt)
    assert driver.actions_of(ReportFault)
    assert driver.actions_of(ChooseEngine)


def test_a_plain_attempt_has_a_longer_silence_limit() -> None:
    driver = GenerationDriver(stream=False, max_tokens=1000)
    driver.step(ReaderJoined())
    driver.step(ENGINE)
    assert driver.step(Ticked(), after_s=189.0) == []
    driver.step(Ticked(), after_s=1.0)
    assert driver.actions_of(DropAttempt)


def test_a_lost_engine_drops_its_attempt_without_a_report() -> None:
    driver = running()
    driver.sample(0, 1)
    assert driver.step(EngineLost("http://other")) == []
    driver.step(EngineLost(ENGINE.url))
    assert driver.actions == [DropAttempt(0), ChooseEngine(0)]
    assert driver.sample(0, 2) == []
    assert list(driver.machine.sampled.token_ids) == [1]


def test_a_turn_never_continues_with_older_weights() -> None:
    driver = running()
    driver.sample(0, 1, policy_version=3, finish=ABORT)
    assert driver.actions[-1] == ChooseEngine(3)
    assert driver.step(EngineChosen("http://b", "i1", 2)) == []
    driver.step(EngineChosen("http://b", "i1", 3))
    driver.sample(1, 2, policy_version=2)
    assert driver.actions_of(DropAttempt)
    assert driver.actions_of(ReportFault)
    assert list(driver.machine.sampled.token_ids) == [1]


def test_a_first_turn_is_not_sampled_by_an_engine_that_restarted_with_older_weights() -> None:
    # The engine was chosen for its version, and restarted while the request was in its backlog.
    driver = GenerationDriver()
    driver.step(ReaderJoined())
    driver.step(EngineChosen(ENGINE.url, "i1", 7))
    # Or another run uses the engine: that is no fault, and a new choice shows it.
    driver.sample(0, 1, policy_version=0)
    assert driver.actions[1:] == [DropAttempt(0), AvoidEngine(ENGINE.url), ChooseEngine(0)]
    assert list(driver.machine.sampled.token_ids) == []


def test_the_version_runs_that_an_engine_reports_replace_those_of_the_attempt() -> None:
    driver = running()
    driver.sample(0, 1, finish=ABORT)
    driver.step(ENGINE)
    driver.sample(1, 2, 3, policy_version=1)
    runs = (VersionRun(0, 1), VersionRun(1, 2))
    driver.step(AttemptSampled(1, [4], [-4.0], 1, Finish("stop", 4), runs))
    assert driver.machine.sampled.policy_versions == [VersionRun(0, 2, 0), VersionRun(1, 2, 0)]


def test_a_plain_turn_with_penalties_restarts_because_it_cannot_resume() -> None:
    driver = GenerationDriver(stream=False, frequency_penalty=0.5)
    driver.step(ReaderJoined())
    driver.step(ENGINE)
    driver.sample(0, 1, 2, finish=ABORT)
    assert driver.actions_of(ChooseEngine)
    assert driver.machine.context() == PROMPT
    assert driver.machine.sampled.policy_versions == []


def test_a_streamed_turn_with_penalties_fails_instead_of_resuming_wrongly() -> None:
    driver = running(frequency_penalty=0.5)
    driver.sample(0, 1, finish=ABORT)
    assert isinstance(driver.machine.error, EngineUnavailable)


def test_a_streamed_turn_with_a_grammar_fails_instead_of_resuming_wrongly() -> None:
    driver = running(grammar=OutputGrammar("regex", "a+"))
    driver.sample(0, 1, finish=ABORT)
    assert driver.machine.state is GenerationState.VOID
    assert isinstance(driver.machine.error, EngineUnavailable)
    assert driver.actions_of(WakeReaders)


def test_a_streamed_turn_that_cannot_resume_restarts_for_a_retry_that_saw_no_token() -> None:
    driver = running(grammar=OutputGrammar("regex", "a+"))
    driver.sample(0, 1)
    driver.step(ReaderLeft())
    driver.sample(0, 2, finish=ABORT)
    assert driver.machine.state is GenerationState.PARKED
    assert driver.step(ReaderJoined()) == [ChooseEngine(0)]
    assert driver.machine.context() == PROMPT


def test_an_engine_with_a_full_queue_is_avoided_and_retried_and_not_at_fault() -> None:
    driver = running()
    driver.step(EngineAttemptFailed(0, "queue full", "overloaded"))
    assert driver.actions == [AvoidEngine(ENGINE.url), ChooseEngine(0)]
    driver.step(EngineChosen("http://b", "i1", 0))
    driver.sample(1, 1, finish=Finish("stop"))
    assert driver.machine.state is GenerationState.COMMITTED


def test_likeliest_tokens_are_kept_over_attempts_and_cut_at_max_tokens() -> None:
    driver = running(max_tokens=10)
    tops = [((-0.5, token),) for token in range(12)]
    driver.step(AttemptSampled(0, [1, 2], [0.0, 0.0], 0, ABORT, (), tops[:2]))
    driver.step(ENGINE)
    driver.step(AttemptSampled(1, range(10), [0.0] * 10, 0, Finish("length"), (), tops[2:]))
    assert driver.machine.sampled.top_logprobs == tops[:10]


class EndsAt:
    """A matcher with a hit at the n-th token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.seen = 0

    def push(self, token_ids: Sequence[int]) -> StopHit | None:
        self.seen += len(token_ids)
        return StopHit(self.num_tokens, "END") if self.seen >= self.num_tokens else None


def test_a_stop_string_across_attempts_ends_the_turn_and_aborts_the_attempt() -> None:
    driver = GenerationDriver(stop=("END",))
    request = driver.machine.request
    machine = GenerationMachine(request, GenerationSettings(), "r", 0.0, lambda: EndsAt(3))
    driver.machine = machine
    driver.step(ReaderJoined())
    driver.step(ENGINE)
    driver.sample(0, 1, 2, finish=ABORT)
    driver.step(ENGINE)
    driver.sample(1, 3, 4)
    assert list(machine.sampled.token_ids) == [1, 2, 3]
    assert (machine.finish_reason, machine.matched_stop) == ("stop", "END")
    assert driver.actions_of(AbortAttempt)
    assert machine.attempt_url == ENGINE.url
    driver.sample(1, 5, finish=ABORT)
    assert machine.is_settled
    assert list(machine.sampled.token_ids) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(150))
def test_random_schedules_lose_and_duplicate_no_token(seed: int) -> None:
    world = GenerationWorld(seed)
    world.step(Ticked())
    for _ in range(120):
        world.disturb()
        world.check_chain()
    world.step(FleetMoved(is_paused=False))
    if world.machine.state in (GenerationState.RUNNING, GenerationState.PARKED):
        world.step(ReaderJoined())
    for _ in range(200):
        world.now_s += 0.3
        world.progress()
    machine = world.machine
    world.check_chain()
    assert machine.is_settled
    assert machine.state is not GenerationState.VOID
    if machine.finish_reason == "length":
        assert len(machine.sampled) == 30
    else:
        assert machine.finish_reason == "stop"
        assert machine.sampled.token_ids[-1] == STOP_TOKEN
