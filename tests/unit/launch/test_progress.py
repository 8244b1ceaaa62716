"""The terminal's figures, from rows and samples."""

import msgspec
import pytest

from rollmesh.launch.progress import Rates, RunProgress, cpu_shares, rates
from rollmesh.launch.telemetry import ProcessSample, Telemetry


def row(step: int, **more: object) -> bytes:
    return msgspec.json.encode({"time_s": 100.0 + 2 * step, "step": step, **more})


def telemetry(time_s: float, calls: int, cpu_s: float = 0.0, worker: str = "w") -> Telemetry:
    worker_row = {"worker_id": worker, "in_flight": 5, "num_calls": calls, "num_tokens": 2 * calls}
    return Telemetry(time_s, [ProcessSample("router", 7, 100, cpu_s)], {"workers": [worker_row]})


def test_no_figures_are_shown_before_the_first_step() -> None:
    progress = RunProgress(num_steps=10)
    progress.add([row(-1, reward_untrained=0.66, success_untrained=0.5)])
    assert (progress.reward_untrained, progress.success_untrained) == (0.66, 0.5)
    assert (progress.num_done, progress.reward(), progress.success()) == (0, None, None)
    assert progress.seconds_left() is None
    assert progress.ages() == {}


def test_reward_and_success_are_means_of_the_last_ten_steps() -> None:
    progress = RunProgress(num_steps=100)
    progress.add(row(step, reward=step / 50, success=step / 100) for step in range(30))
    assert progress.reward() == pytest.approx(0.49)
    assert progress.success() == pytest.approx(0.245)
    assert progress.num_done == 30


def test_success_is_not_shown_after_a_step_without_it() -> None:
    progress = RunProgress(num_steps=100)
    progress.add([row(0, reward=1.0, success=1.0), row(1, reward=0.5)])
    assert (progress.reward(), progress.success()) == (0.75, None)


def test_the_remaining_time_follows_the_pace() -> None:
    progress = RunProgress(num_steps=100)
    progress.add(row(step, success=0.5) for step in range(30))
    assert progress.seconds_left() == 2.0 * 70


def test_ages_are_shares_of_the_whole_run() -> None:
    progress = RunProgress(num_steps=10)
    progress.add([row(0, success=1.0, age_histogram={"0": 4})])
    progress.add([row(1, success=1.0, age_histogram={"1": 3, "0": 1})])
    assert progress.ages() == {"0": 0.625, "1": 0.375}


def test_a_line_that_does_not_parse_is_counted() -> None:
    progress = RunProgress(num_steps=10)
    progress.add([b"{", row(0, success=1.0)])
    assert (progress.num_bad_lines, progress.num_done) == (1, 1)


def test_rates_are_gains_per_second() -> None:
    got = rates(telemetry(10.0, calls=100), telemetry(12.0, calls=300))
    assert got == Rates(num_in_flight=5, calls_per_s=100.0, tokens_per_s=200.0)


def test_a_restarted_or_new_worker_counts_nothing_yet() -> None:
    assert rates(telemetry(10.0, calls=100), telemetry(12.0, calls=3)).calls_per_s == 0.0
    assert rates(telemetry(10.0, 100, worker="a"), telemetry(12.0, 300)).calls_per_s == 0.0


def test_a_silent_router_gives_no_rates() -> None:
    silent = Telemetry(10.0, [], None)
    assert rates(silent, telemetry(12.0, calls=3)) == Rates(num_in_flight=5)
    assert rates(telemetry(9.0, calls=3), silent) == Rates()


def test_cpu_is_the_share_of_a_core_between_samples() -> None:
    before, after = telemetry(10.0, 0, cpu_s=4.0), telemetry(12.0, 0, cpu_s=5.0)
    assert cpu_shares(before, after) == {7: 0.5}
    assert cpu_shares(Telemetry(0.0, [], None), after) == {}


def test_repeated_steps_count_once() -> None:
    progress = RunProgress(num_steps=10)
    progress.add([row(step, success=0.5, age_histogram={"0": 4}) for step in range(5)])
    progress.start_over()
    progress.add([row(step, success=1.0, age_histogram={"1": 4}) for step in range(2)])
    assert (progress.num_done, progress.success(), progress.ages()) == (2, 1.0, {"1": 1.0})


def test_equal_groups_are_the_mean_share_of_the_last_ten_steps() -> None:
    progress = RunProgress(num_steps=100)
    assert progress.equal_groups() is None
    progress.add(row(step, success=0.5, frac_equal_groups=float(step < 15)) for step in range(20))
    assert progress.equal_groups() == 0.5
