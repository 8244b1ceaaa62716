"""What ended is remembered for a while, and failures for longer."""

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_table import FAILURE_NOTES, MAX_NOTES, Tombstones
from rollmesh.wire.messages import GroupFailed, GroupMoved, GroupState


def done(seq: int) -> GroupMoved:
    return GroupMoved(GroupId("r1", seq), GroupState.DONE, 1, "")


def test_notes_of_the_past_are_bounded() -> None:
    tombstones = Tombstones(note_s=3.0)
    for seq in range(MAX_NOTES + 10):
        tombstones.add(done(seq), 1, 0.0)
    kept = [seq for seq in range(MAX_NOTES + 10) if GroupId("r1", seq) in tombstones]
    assert kept == list(range(10, MAX_NOTES + 10))
    tombstones.tear(3.0)
    assert not any(GroupId("r1", seq) in tombstones for seq in kept)


def test_failures_are_remembered_for_longer() -> None:
    tombstones = Tombstones(note_s=3.0)
    tombstones.add(done(1), 1, 0.0)
    tombstones.add(GroupFailed(GroupId("r1", 2), "quarantined: it killed"), 3, 0.0)
    tombstones.tear(3.0)
    assert [GroupId("r1", seq) in tombstones for seq in (1, 2)] == [False, True]
    tombstones.tear(3.0 * FAILURE_NOTES)
    assert GroupId("r1", 2) not in tombstones
