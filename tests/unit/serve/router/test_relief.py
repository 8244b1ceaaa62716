"""Relief: workers that are worn together leave one after the other."""

import msgspec
import pytest

from rollmesh.serve.router.membership import SUCCESSOR_S
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import RELIEVED, DrainWorker, WorkerLeft
from tests.unit.serve.router.story import Story, beat, only


@pytest.fixture
def story() -> Story:
    return Story()


class Fleet:
    """Workers that are worn; who is told to drain does, and stays until the test lets it go."""

    def __init__(self, story: Story, number: int) -> None:
        self.story = story
        self.states = {f"w{each}": "worn" for each in range(number)}
        for name in self.states:
            story.worker(name)

    def pass_by(self, seconds: float) -> list[str]:
        """Who is told to drain, in that time."""
        told: list[str] = []
        for _ in range(round(seconds / 0.5)):
            sends: list[Send] = []
            for name, state in self.states.items():
                self.story.says(name, msgspec.structs.replace(beat(name), state=state))
            sends = self.story.passes(0.5)
            drained = [name for name in self.states if only(sends, DrainWorker, name)]
            assert {each.reason for each in only(sends, DrainWorker)} <= {RELIEVED}
            self.states.update(dict.fromkeys(drained, "draining"))
            told += drained
        return told

    def leaves(self, name: str) -> None:
        del self.states[name]
        self.story.says(name, WorkerLeft(name, "recycled: 60 rollouts"))


def test_one_that_is_alone_leaves_at_once(story: Story) -> None:
    assert Fleet(story, 1).pass_by(1) == ["w0"]


def test_of_two_the_second_waits_for_the_successor_of_the_first(story: Story) -> None:
    fleet = Fleet(story, 2)
    assert fleet.pass_by(10) == ["w0"]
    fleet.leaves("w0")
    assert fleet.pass_by(SUCCESSOR_S / 2) == []
    story.worker("w0", pid=2)
    fleet.states["w0"] = "serving"
    assert fleet.pass_by(1) == ["w1"]


def test_the_second_leaves_too_where_no_successor_comes(story: Story) -> None:
    fleet = Fleet(story, 2)
    fleet.pass_by(1)
    fleet.leaves("w0")
    assert fleet.pass_by(SUCCESSOR_S - 2) == []
    assert fleet.pass_by(4) == ["w1"]


def test_of_many_a_quarter_leaves_at_a_time(story: Story) -> None:
    assert len(Fleet(story, 12).pass_by(10)) == 3


def test_a_worker_of_another_environment_cannot_stand_in(story: Story) -> None:
    fleet = Fleet(story, 2)
    worker = fleet.story.group_scheduler.membership.workers.get("w1")
    assert worker
    other = msgspec.structs.replace(worker.hello, env="other")
    story.says("w1", msgspec.structs.replace(other, pid=7, started_s=7.0))
    assert fleet.pass_by(1) == ["w0", "w1"]
