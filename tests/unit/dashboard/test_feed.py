"""A listener starts from the state, misses nothing, and cannot make the page's memory grow."""

from rollmesh.dashboard.feed import MAX_WAITING, Feed, Frames
from rollmesh.dashboard.reader import PageEvent


def taken(frames: Frames) -> list[str]:
    """The names of the events that wait."""
    got = []
    while not frames.empty():
        data = frames.get_nowait()
        got.append(
            "end" if data is None else data.split(b"\n")[0].removeprefix(b"event: ").decode()
        )
    return got


def a_feed() -> Feed:
    return Feed(lambda: PageEvent("state", {"rows": 3}))


def test_a_listener_starts_with_the_state_and_then_gets_what_is_published() -> None:
    feed = a_feed()
    feed.publish([PageEvent("steps", 0)])
    with feed.subscribe() as frames:
        feed.publish([PageEvent("steps", 1), PageEvent("run", 2)])
        assert taken(frames) == ["state", "steps", "run"]


def test_a_frame_is_a_server_sent_event() -> None:
    with a_feed().subscribe() as frames:
        assert frames.get_nowait() == b'event: state\ndata: {"rows":3}\n\n'


def test_a_listener_that_falls_behind_is_given_a_fresh_state() -> None:
    feed = a_feed()
    with feed.subscribe() as frames:
        for _ in range(10 * MAX_WAITING):
            feed.publish([PageEvent("steps", 1)])
        assert frames.qsize() <= MAX_WAITING
        got = taken(frames)
        assert got[0] == "state"
        assert set(got[1:]) <= {"steps"}


def test_a_listener_that_left_is_forgotten() -> None:
    feed = a_feed()
    with feed.subscribe() as frames:
        taken(frames)
    feed.publish([PageEvent("steps", 1)])
    assert taken(frames) == []


def test_closing_ends_every_stream_also_later_ones() -> None:
    feed = a_feed()
    with feed.subscribe() as frames:
        feed.close()
        assert taken(frames) == ["end"]
    with feed.subscribe() as late:
        assert taken(late) == ["end"]
