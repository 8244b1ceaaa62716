"""The session's sampling policy over the agent's request, and retry limits and errors of a
generation.
"""

import msgspec

from rollmesh.core.errors import EngineError, EngineOverloaded, EngineUnavailable
from rollmesh.core.types import EVAL_SAMPLING, SamplingParams, SamplingPolicy
from rollmesh.runtime.chat import RequestedSampling
from rollmesh.runtime.generation.events import (
    AvoidEngine,
    EngineAttemptFailed,
    EngineChosen,
    ReaderLeft,
    ReportFault,
)
from rollmesh.runtime.generation.generation import GenerationState
from rollmesh.runtime.generation.sampling import (
    MAX_QUOTED_CHARS,
    GenerationSettings,
    RetryState,
    derive_seed,
    resolve,
)
from rollmesh.testing.engine import ScriptedEngine, endless_token
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from rollmesh.wire.machine import Ticked
from tests.unit.runtime.generation_driver import ENGINE, running
from tests.unit.runtime.random_engines import ABORT
from tests.unit.runtime.sampler_driver import TO_THE_END, SamplerDriver

ASK = RequestedSampling(temperature=0.0, top_p=0.5, seed=1, frequency_penalty=1.0, max_tokens=9)


def params(
    policy: SamplingPolicy, ask: RequestedSampling, room_tokens: int = 100
) -> SamplingParams:
    return resolve(policy, ask, room_tokens=room_tokens, derived_seed=77, stop_token_ids=(2,))


def test_training_overrides_settings_that_would_make_siblings_equal() -> None:
    got = params(SamplingPolicy(), ASK)
    assert (got.temperature, got.top_p, got.seed, got.frequency_penalty) == (1.0, 1.0, 77, 0.0)
    assert got.max_tokens == 9
    assert got.stop_token_ids == (2,)


def test_evaluation_uses_the_agents_settings() -> None:
    got = params(EVAL_SAMPLING, ASK)
    assert (got.temperature, got.top_p, got.seed, got.frequency_penalty) == (0.0, 0.5, 1, 1.0)
    assert params(EVAL_SAMPLING, RequestedSampling()).seed == 77


def test_top_p_0_is_greedy_and_top_k_0_is_no_limit() -> None:
    """Agents of other servers send both; SGLang answers 400 to each."""
    greedy = params(EVAL_SAMPLING, RequestedSampling(temperature=0.7, top_p=0.0, top_k=5))
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 5)
    free = params(EVAL_SAMPLING, RequestedSampling(temperature=0.7, top_p=0.9, top_k=0))
    assert (free.temperature, free.top_p, free.top_k) == (0.7, 0.9, -1)


def test_max_tokens_never_exceeds_the_context() -> None:
    assert (
        params(SamplingPolicy(), RequestedSampling(max_tokens=500), room_tokens=40).max_tokens == 40
    )
    assert params(SamplingPolicy(), RequestedSampling()).max_tokens == 100


def test_seeds_differ_by_ask_rollout_and_generation_and_fit_63_bits() -> None:
    seeds = {derive_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


def test_params_are_sent_unchanged() -> None:
    got = params(SamplingPolicy(), ASK)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(got), type=SamplingParams) == got


A, B = ("http://a", "i1"), ("http://b", "i1")
SICK_S = GenerationSettings().sick_s
ERROR = "http://a: HTTP 500: oops"


def patience() -> RetryState:
    return RetryState(GenerationSettings())


def fault(of: RetryState, incarnation: tuple[str, str], now_s: float) -> EngineError | None:
    return of.on_fault(incarnation, ERROR, now_s) or of.on_cut(False, now_s)


def test_a_single_engine_that_keeps_failing_ends_the_turn_with_its_error() -> None:
    mine = patience()
    assert [fault(mine, A, now_s) for now_s in (5.0, 5.0, 5.0 + SICK_S - 0.1)] == [None] * 3
    error = fault(mine, A, 5.0 + SICK_S)
    assert f"(last: {ERROR})" in str(error)
    assert "/healthz" in str(error)


def test_a_new_or_restarted_engine_is_tried() -> None:
    mine = patience()
    assert [fault(mine, A, now_s) for now_s in (0.0, 1.0)] == [None, None]
    assert fault(mine, B, 10.0) is None
    assert fault(mine, ("http://a", "i2"), 20.0) is None
    assert fault(mine, B, 20.0) is not None


def test_a_sampled_token_resets_the_fault_count() -> None:
    mine = patience()
    fault(mine, A, 0.0)
    mine.on_cut(True, 10.0)
    assert fault(mine, A, 10.0) is None
    assert fault(mine, A, 10.0 + SICK_S) is not None


def test_cuts_without_a_fault_are_tolerated_for_long() -> None:
    mine = patience()
    errors = [mine.on_cut(False, 10.0 * n) for n in range(17)]
    assert errors[:16] == [None] * 16
    assert "no engine made progress" in str(errors[16])


def test_full_queues_are_overload_unless_tokens_or_faults_come_between() -> None:
    mine = patience()
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    mine.on_tokens()
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    fault(mine, A, 0.0)
    assert [mine.on_full_queue("full") for _ in range(8)] == [None] * 8
    assert isinstance(mine.on_full_queue("full"), EngineOverloaded)


def test_the_reason_why_no_engine_is_available_is_bounded_in_length() -> None:
    mine = patience()
    assert "no engine is ready" in str(mine.without_engine())
    fault(mine, A, 0.0)
    assert f"no engine is ready (last: {ERROR})" in str(mine.without_engine())
    mine.on_missing("http://a: joining, connection refused" + "x" * 1000)
    error = str(mine.without_engine())
    assert "(last: http://a: joining, connection refused" in error
    assert len(error) < MAX_QUOTED_CHARS + 150
    mine.on_missing("")
    assert "connection refused" in str(mine.without_engine())


# through the machine


def test_attempts_without_tokens_back_off_and_end() -> None:
    driver = running()
    for attempt in range(17):
        assert driver.machine.error is None
        driver.sample(attempt, finish=ABORT)
        driver.step(Ticked(), after_s=1.0)
        driver.step(ENGINE)
    assert driver.machine.state is GenerationState.VOID
    assert isinstance(driver.machine.error, EngineUnavailable)


def test_a_turn_at_a_single_failing_engine_ends_with_its_error() -> None:
    driver = running()
    for attempt in range(3):
        assert driver.machine.error is None
        driver.step(EngineAttemptFailed(attempt, "http://a: HTTP 500: oops", "broke"))
        assert driver.actions_of(ReportFault)
        driver.step(Ticked(), after_s=1.0)
        driver.step(ENGINE)
    assert driver.machine.state is GenerationState.VOID
    assert "last: http://a: HTTP 500: oops" in str(driver.machine.error)


def test_an_engine_is_not_given_up_after_parking_or_a_restart() -> None:
    driver = running()
    driver.step(EngineAttemptFailed(0, "cut"))
    driver.step(EngineChosen(ENGINE.url, "i2", 0), after_s=60.0)
    driver.step(EngineAttemptFailed(1, "cut"))
    assert driver.machine.error is None
    driver.step(Ticked(), after_s=60.0)
    driver.step(ENGINE)
    driver.step(ReaderLeft())
    driver.step(EngineAttemptFailed(2, "cut"))
    assert driver.machine.state is GenerationState.PARKED


def test_a_request_whose_images_break_engines_ends_without_fencing_them() -> None:
    driver = running(images=("https://nowhere/a.png",))
    for attempt in range(2):
        driver.step(EngineAttemptFailed(attempt, "HTTP 500: oops", "broke"))
        assert driver.actions_of(AvoidEngine)
        driver.step(Ticked(), after_s=1.0)
        driver.step(ENGINE)
    driver.step(EngineAttemptFailed(2, "HTTP 500: oops", "broke"))
    assert driver.actions_of(ReportFault) == []
    assert driver.machine.state is GenerationState.VOID
    assert "HTTP 500: oops" in str(driver.machine.error)


def test_a_resumed_attempt_that_fails_at_its_images_fences_no_engine_either() -> None:
    """An address may have become invalid, or the model has sampled an image placeholder."""
    driver = running(images=("https://gone/a.png",))
    driver.sample(0, 1, finish=ABORT)
    for attempt in range(1, 4):
        driver.step(Ticked(), after_s=1.0)
        driver.step(ENGINE)
        driver.step(EngineAttemptFailed(attempt, "HTTP 500: oops", "broke"))
        assert driver.actions_of(ReportFault) == []
    assert "HTTP 500: oops" in str(driver.machine.error)


def test_queues_that_stay_full_end_the_turn_as_overload_within_bounds() -> None:
    driver = running()
    for attempt in range(9):
        assert driver.machine.error is None
        driver.step(EngineAttemptFailed(attempt, "http://a: the queue is full", "overloaded"))
        driver.step(Ticked(), after_s=1.0)
        driver.step(ENGINE)
    assert isinstance(driver.machine.error, EngineOverloaded)
    assert str(driver.machine.error) == "http://a: the queue is full"
    assert driver.now_s < 10.0


async def test_a_turn_of_a_session_of_another_run_is_not_delayed() -> None:
    async with ScriptedEngine(endless_token) as engine:
        driver = SamplerDriver(engine)
        row = EngineRow(engine.url, "i1", EnginePhase.READY, int(engine.weight_version))
        driver.view.update(FleetChanged(driver.epoch + 1, (row,), row.policy_version), "router")
        generation = driver.start(min_policy_version=row.policy_version + 1)
        await generation.wait(TO_THE_END)
        assert isinstance(generation.error, EngineUnavailable)
        assert "was of another run" in str(generation.error)
        await driver.sampler.close()
