"""What a pipeline did before tells when it asks again."""

import math

from rollmesh.scheduler.planning.habits import Habits


def step(habits: Habits, begun_s: float, phases: tuple[float, ...]) -> None:
    """It ends its demand, has a grant after each of these times, and asks 100 s after its end."""
    habits.ended(begun_s)
    for number, after_s in enumerate(phases):
        habits.granted(f"c{number}", 1, begun_s + after_s)
    habits.signalled(64, begun_s + 100.0)


def test_the_newest_mark_says_when_as_the_last_time() -> None:
    habits = Habits()
    step(habits, 0.0, (20.0, 60.0))
    habits.ended(1000.0)
    assert habits.expected_s == 1100.0
    habits.granted("c0", 1, 1050.0)
    assert habits.expected_s == 1130.0, "it waited for its GPUs, and is that much later"
    habits.granted("c1", 1, 1090.0)
    assert (habits.marked_s, habits.expected_s, habits.estimate) == (1090.0, 1130.0, 64)


def test_nothing_is_expected_by_a_mark_that_is_new() -> None:
    habits = Habits()
    assert habits.expected_s == math.inf
    habits.ended(0.0)
    assert habits.expected_s == math.inf
    habits.signalled(64, 50.0)
    habits.ended(100.0)
    habits.granted("c0", 1, 110.0)
    assert habits.expected_s == math.inf
    habits.broken_off()
    assert habits.marked_s is None


def test_what_is_granted_while_it_generates_tells_nothing() -> None:
    habits = Habits()
    habits.granted("c0", 1, 5.0)
    assert habits.marks == {}
    habits.ended(10.0)
    habits.granted("c0", 1, 20.0)
    habits.granted("c0", 1, 30.0)
    habits.signalled(64, 40.0)
    assert habits.until_s == {"ended": 30.0, "c0/1": 20.0}, "the first of a kind counts"
