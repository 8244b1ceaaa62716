"""A mistyped name is answered with similar names."""

from rollmesh.core.text import close_names, instead_of

KNOWN = ("status", "demo", "drain", "dashboard")


def test_a_close_name_is_suggested() -> None:
    assert instead_of("statsu", KNOWN) == "did you mean 'status'?"
    assert instead_of("Status", KNOWN) == "did you mean 'status'?"


def test_several_close_names_are_suggested_with_the_closest_first() -> None:
    assert close_names("clip_lo", ["clip_low", "clip_high", "bind"])[0] == "clip_low"


def test_all_names_are_listed_where_none_is_close() -> None:
    assert instead_of("xyz", KNOWN) == "choose one of status, demo, drain, dashboard"
