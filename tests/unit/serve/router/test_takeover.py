"""One line says what became of the work that an earlier router had."""

from rollmesh.serve.router.group_table import Takeover, TakeoverOutcome
from rollmesh.wire.messages import GroupState, HeldGroup
from tests.unit.serve.router.story import SETTLED_S, Story, ask, group, hello, running

NONE = {f"num_{fate}": 0 for fate in TakeoverOutcome}
LONG_S = 9.0
"""Until all is found, and told."""


def told(story: Story) -> dict[str, int] | None:
    return story.group_scheduler.table.takeover.tell(story.now_s)


def test_a_line_is_due_when_nothing_more_was_found_for_a_while() -> None:
    takeover = Takeover(wait_s=3.0)
    takeover.note(group(1), TakeoverOutcome.KEPT, 1.0)
    takeover.note(group(2), TakeoverOutcome.AGAIN, 1.0)
    takeover.note(group(2), TakeoverOutcome.KEPT, 2.0)
    assert takeover.tell(4.9) is None
    assert takeover.tell(5.0) == {**NONE, "num_kept": 2}
    assert takeover.tell(9.0) is None
    takeover.note(group(3), TakeoverOutcome.AGAIN, 9.0)
    assert takeover.tell(12.0) == {**NONE, "num_run_again": 1}


def test_a_router_that_found_nothing_says_nothing(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    story.passes(LONG_S, "w0", "c")
    assert told(story) is None


def test_worker_that_was_lost_for_a_while_is_no_takeover(story: Story) -> None:
    running(story)
    story.passes(LONG_S, "c")
    assert story.state(1) is GroupState.QUEUED
    story.says("w0", hello("w0", HeldGroup(group(1), 1, False)))
    assert story.state(1) is GroupState.RUNNING
    story.passes(LONG_S, "w0", "c")
    assert told(story) is None


def test_claim_that_comes_late_is_kept_and_not_run_again(story: Story) -> None:
    story.asks(ask(1, attempts=1))
    story.passes(SETTLED_S, "c")
    story.worker("w0", HeldGroup(group(1), 1, False))
    story.passes(LONG_S, "w0", "c")
    assert told(story) == {**NONE, "num_kept": 1}


def test_what_each_group_came_to_is_counted_once(story: Story) -> None:
    for seq, attempts in ((1, 1), (2, 1), (3, 3)):
        story.asks(ask(seq, attempts=attempts))
    held = (
        HeldGroup(group(seq), 1, finished) for seq, finished in ((1, False), (4, False), (5, True))
    )
    story.worker("w0", *held)
    story.worker("w1", HeldGroup(group(6), 1, False))
    story.asks(ask(6, attempts=1))
    story.passes(LONG_S, "w0", "w1", "c")
    # 1 and 6 were found by both, nobody claims 2 and 3, nobody asks for 4; 5 goes to its sink.
    assert told(story) == {
        "num_kept": 2,
        "num_run_again": 1,
        "num_dropped_unasked": 1,
        "num_dropped_exhausted": 1,
    }
