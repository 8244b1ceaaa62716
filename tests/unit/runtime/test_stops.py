"""Stop strings over token boundaries, chunks and legs."""

from collections.abc import Sequence

from rollmesh.runtime.generation_events import StopHit
from rollmesh.runtime.tool_calls import StopStrings


class Letters:
    """Token n is the n-th letter of the alphabet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def ids(text: str) -> list[int]:
    return [ord(char) - ord("a") for char in text]


def matcher(*stops: str) -> StopStrings:
    return StopStrings(stops, Letters())


def test_hit_names_the_token_that_completes_the_stop() -> None:
    assert matcher("end").push(ids("theendofit")) == StopHit(6, "end")


def test_stop_may_begin_in_one_push_and_end_in_another() -> None:
    stops = matcher("stop")
    assert stops.push(ids("xxst")) is None
    assert stops.push(ids("o")) is None
    assert stops.push(ids("pyy")) == StopHit(6, "stop")


def test_earliest_completion_wins_among_several_stops() -> None:
    assert matcher("bcd", "bc").push(ids("abcd")) == StopHit(3, "bc")


def test_no_stop_string_never_hits() -> None:
    assert matcher("").push(ids("abc")) is None
    assert matcher("zz").push(ids("abcz")) is None


def test_one_letter_stop_hits_although_nothing_is_remembered() -> None:
    stops = matcher("z")
    assert stops.push(ids("abc")) is None
    assert stops.push(ids("z")) == StopHit(4, "z")
