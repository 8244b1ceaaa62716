"""One process is told from another by all that is known of both."""

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import MAX_ENDS, EndedIncarnations, Incarnation

LIFE = Incarnation("w0", 7, 5.0, "here")


@pytest.mark.parametrize(
    ("other", "may_be"),
    [
        (Incarnation("w0"), True),
        (Incarnation("w0", 7), True),
        (Incarnation("w0", 0, 5.0), True),
        (Incarnation("w0", 7, 5.0), True),
        (Incarnation("w1", 7, 5.0, "here"), False),
        (Incarnation("w0", 8, 5.0, "here"), False),
        (Incarnation("w0", 7, 6.0), False),
        (Incarnation("w0", 7, 5.0, "there"), False),
    ],
)
def test_two_are_one_unless_something_known_tells_them_apart(
    other: Incarnation, may_be: bool
) -> None:
    assert LIFE.may_be(other) is may_be
    assert other.may_be(LIFE) is may_be


def test_an_end_is_found_by_what_others_know_of_it() -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(LIFE, (GroupId("r1", 1),), now_s=0.0)
    for incarnation, is_found in (
        (Incarnation("w0", 7), True),
        (Incarnation("w0", 7, 6.0), False),
        (Incarnation("w0"), False),
    ):
        assert (ends.find(incarnation) is not None) is is_found


@pytest.mark.parametrize(
    ("incarnation", "now_s", "is_covered"),
    [
        (LIFE, 9.0, True),
        (LIFE, 10.0, False),
        (Incarnation("w0", 7, 4.0), 9.0, True),
        (Incarnation("w0", 7, 6.0), 9.0, False),
        (Incarnation("w0", 8, 5.0), 9.0, False),
    ],
)
def test_what_was_said_before_an_end_is_covered_by_it_for_a_while(
    incarnation: Incarnation, now_s: float, is_covered: bool
) -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(LIFE, (), now_s=0.0)
    assert ends.cover(incarnation, now_s) is is_covered


def test_an_end_whose_start_nobody_knows_covers_all_of_its_pid() -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(Incarnation("w0", 7), (), now_s=0.0)
    assert ends.cover(LIFE, 1.0)


def test_the_oldest_ends_are_forgotten() -> None:
    ends = EndedIncarnations(remember_s=1e9)
    for pid in range(1, MAX_ENDS + 2):
        ends.add(Incarnation("w0", pid), (), now_s=0.0)
    assert ends.find(Incarnation("w0", 1)) is None
    assert ends.find(Incarnation("w0", 2))
