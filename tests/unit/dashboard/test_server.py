"""The dashboard's server: read-only, for loopback only, bounded per browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from rollmesh.core.clock import SystemClock
from rollmesh.dashboard.reader import PageEvent, RunReader
from rollmesh.dashboard.server import MAX_WAITING, DashboardApp, EventFeed, Frames
from rollmesh.testing.run_folder import FakeRun


def taken(frames: Frames) -> list[str]:
    """Names of the queued events."""
    got = []
    while not frames.empty():
        data = frames.get_nowait()
        got.append(
            "end" if data is None else data.split(b"\n")[0].removeprefix(b"event: ").decode()
        )
    return got


def a_feed() -> EventFeed:
    return EventFeed(lambda: PageEvent("state", {"rows": 3}))


def test_a_listener_starts_with_the_state_and_then_gets_what_is_published() -> None:
    feed = a_feed()
    feed.publish([PageEvent("steps", 0)])
    with feed.subscribe() as frames:
        feed.publish([PageEvent("steps", 1), PageEvent("run", 2)])
        assert taken(frames) == ["state", "steps", "run"]


def test_a_frame_is_a_server_sent_event() -> None:
    with a_feed().subscribe() as frames:
        assert frames.get_nowait() == b'event: state\ndata: {"rows":3}\n\n'


def test_a_listener_that_falls_behind_gets_a_fresh_state() -> None:
    feed = a_feed()
    with feed.subscribe() as frames:
        for _ in range(10 * MAX_WAITING):
            feed.publish([PageEvent("steps", 1)])
        assert frames.qsize() <= MAX_WAITING
        got = taken(frames)
        assert got[0] == "state"
        assert set(got[1:]) <= {"steps"}


def test_a_closed_listener_is_forgotten() -> None:
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


SCRIPT = "<script>document.title = 'owned'</script>"


class Site(msgspec.Struct):
    run: FakeRun
    pages: DashboardApp
    reader: RunReader
    session: ClientSession


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    run = FakeRun(tmp_path / "demo")
    run.add_steps(3)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    pages = DashboardApp(reader, SystemClock())
    server = TestServer(pages.app())
    await server.start_server()
    async with ClientSession(base_url=server.make_url("/")) as session:
        yield Site(run, pages, reader, session)
    pages.feed.close()
    await server.close()


async def test_the_page_and_its_files_are_served(site: Site) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/static/app.js", "javascript"),
        ("/static/vendor/uplot/LICENSE", ""),
    ):
        reply = await site.session.get(path)
        assert reply.status == 200
        assert kind in reply.headers["Content-Type"]
        assert "default-src 'self'" in reply.headers["Content-Security-Policy"]


async def test_every_file_that_the_page_names_exists(site: Site) -> None:
    html = await (await site.session.get("/")).text()
    named = [part.split('"')[0] for part in html.split('="/static/')[1:]]
    assert len(named) >= 5
    for name in named:
        assert (await site.session.get(f"/static/{name}")).status == 200


async def test_the_state_is_json(site: Site) -> None:
    state = await (await site.session.get("/api/state")).json()
    assert [row["step"] for row in state["steps"]] == [0, 1, 2]


async def test_trajectories_are_listed_newest_first_up_to_a_limit(site: Site) -> None:
    listed = await (await site.session.get("/api/trajectories?limit=2")).json()
    assert [summary["step"] for summary in listed] == [2, 1]
    assert "messages" not in listed[0]


async def test_a_limit_that_is_not_a_number_is_refused(site: Site) -> None:
    reply = await site.session.get("/api/trajectories?limit=-1")
    assert reply.status == 400
    assert "limit=-1" in (await reply.json())["error"]


async def test_a_trajectory_has_a_piece_of_text_for_every_token(site: Site) -> None:
    rollout_id = site.reader.trajectories(1)[0].rollout_id
    document = await (await site.session.get(f"/api/trajectories/{rollout_id}")).json()
    [sample], [pieces] = document["trajectory"]["samples"], document["pieces"]
    assert document["trajectory"]["rollout_id"] == rollout_id
    assert len(pieces) == len(sample["token_ids"])
    assert "".join(pieces).startswith("<|im_start|>user\nGuess my number")


async def test_an_unknown_trajectory_is_not_found(site: Site) -> None:
    reply = await site.session.get("/api/trajectories/r0/99/99")
    assert reply.status == 404
    assert "r0/99/99" in (await reply.json())["error"]


async def test_rollout_text_is_served_as_json_only(site: Site) -> None:
    rollout_id = site.run.add_rollout(messages=[{"role": "user", "content": SCRIPT}])
    site.reader.poll(site.run.now_s)
    reply = await site.session.get(f"/api/trajectories/{rollout_id}")
    assert reply.content_type == "application/json"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert (await reply.json())["trajectory"]["messages"][0]["content"] == SCRIPT


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
async def test_a_request_for_another_host_is_refused(site: Site, host: str) -> None:
    reply = await site.session.get("/api/state", headers={"Host": host})
    assert reply.status == 403


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8265", "[::1]"])
async def test_a_request_by_a_loopback_name_is_served(site: Site, host: str) -> None:
    reply = await site.session.get("/api/state", headers={"Host": host})
    assert reply.status == 200


async def test_events_begin_with_the_state_and_follow_the_run(site: Site) -> None:
    reply = await site.session.get("/events")
    assert reply.content_type == "text/event-stream"
    assert await reply.content.readline() == b"event: state\n"
    await reply.content.readuntil(b"\n\n")
    site.run.add_steps(1)
    site.pages.feed.publish(site.reader.poll(site.run.now_s))
    assert await reply.content.readline() == b"event: steps\n"
    reply.close()
