"""The order of what happens in simulated time."""

from rollmesh.scheduler.simulator.agenda import Agenda


def test_moments_come_in_order_and_what_is_last_after_all_else_of_its_moment() -> None:
    agenda, seen = Agenda(), list[str]()
    agenda.at(2.0, lambda: seen.append("plan"), last=True)
    agenda.at(2.0, lambda: agenda.at(2.0, lambda: seen.append("later")))
    agenda.at(2.0, lambda: seen.append("b"))
    agenda.after(1.0, lambda: seen.append("a"))
    agenda.run(5.0)
    assert seen == ["a", "b", "later", "plan"]
    assert agenda.now_s == 2.0


def test_what_is_after_the_end_does_not_happen() -> None:
    agenda, seen = Agenda(), list[str]()
    agenda.at(3.0, lambda: seen.append("a"))
    agenda.run(2.9)
    assert seen == []
    agenda.run(3.0)
    assert seen == ["a"]
