"""Rollouts on the workers that are awake."""

from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.rollouts import Rollouts
from rollmesh.scheduler.simulator.trace import Costs


class _Step:
    def __init__(self, per_worker: int) -> None:
        self.agenda = Agenda()
        self.ends_s: list[float] = []
        costs = Costs(reprefill_s=3.0, kv_tokens_per_s=10.0)
        self.rollouts = Rollouts(self.agenda, costs, per_worker, self._ended)

    def _ended(self) -> None:
        self.ends_s.append(self.agenda.now_s)

    def run(self, until_s: float = 1e9) -> None:
        self.agenda.run(until_s)


def test_the_least_loaded_worker_gets_the_next() -> None:
    step = _Step(per_worker=2)
    step.rollouts.woke(0)
    step.rollouts.woke(1)
    step.rollouts.start((10.0, 20.0))
    step.run(5.0)
    step.agenda.at(5.0, lambda: None)
    step.run(5.0)
    assert (step.rollouts.kv_tokens(0), step.rollouts.kv_tokens(1)) == (50, 50)


def test_rollouts_wait_for_a_place_and_for_the_first_worker() -> None:
    step = _Step(per_worker=1)
    step.rollouts.start((10.0, 20.0, 30.0))
    step.run(100.0)
    assert step.ends_s == []
    step.rollouts.woke(0)
    step.run()
    assert step.ends_s == [10.0, 30.0, 60.0]


def test_those_of_a_worker_that_sleeps_go_on_first_and_end_once() -> None:
    step = _Step(per_worker=1)
    step.rollouts.woke(0)
    step.rollouts.start((10.0, 50.0))
    step.agenda.at(4.0, lambda: step.rollouts.woke(1))
    step.agenda.at(6.0, lambda: step.ends_s.append(-step.rollouts.sleeps(0)))
    step.run()
    # evicted at 6 with 4 s left and 3 s to pay; engine 1 has the other from 4 to 54
    assert step.ends_s == [-1, 54.0, 54.0 + 4.0 + 3.0]
    assert step.rollouts.served_s == 10.0 + 50.0 + 3.0


def test_what_lost_its_place_is_before_what_never_had_one() -> None:
    step = _Step(per_worker=1)
    step.rollouts.woke(0)
    step.rollouts.start((10.0, 50.0))
    step.agenda.at(6.0, lambda: step.ends_s.append(-step.rollouts.sleeps(0)))
    step.agenda.at(7.0, lambda: step.rollouts.woke(0))
    step.run()
    assert step.ends_s == [-1, 14.0, 64.0]


def test_what_has_ended_is_no_loss() -> None:
    step = _Step(per_worker=2)
    step.agenda.at(2.0, lambda: step.rollouts.woke(0))
    step.agenda.at(2.0, lambda: step.rollouts.start((4.0, 50.0, 50.0)))
    step.agenda.at(10.0, lambda: step.ends_s.append(step.rollouts.kv_tokens(0)))
    step.run(10.0)
    assert step.ends_s == [6.0, (8.0 + 4.0) * 10]


def test_an_idle_worker_loses_nothing_by_its_sleep() -> None:
    step = _Step(per_worker=4)
    step.rollouts.woke(0)
    assert step.rollouts.kv_tokens(0) == 0
    assert step.rollouts.sleeps(0) == 0
