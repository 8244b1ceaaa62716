"""What clients hear of moves."""

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.moves import MOMENT_S, Moves
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import GroupMoved, GroupsMoved, GroupState

ONE, TWO = GroupId("r1", 1), GroupId("r1", 2)


def moved(group_id: GroupId, state: GroupState) -> GroupMoved:
    return GroupMoved(group_id, state, 1, "w0")


def test_each_client_is_told_once_of_all_its_groups_and_of_each_the_newest() -> None:
    moves = Moves()
    moves.add(b"a", moved(ONE, GroupState.ASSIGNED), 5.0)
    moves.add(b"a", moved(TWO, GroupState.ASSIGNED), 5.001)
    moves.add(b"a", moved(ONE, GroupState.DONE), 5.002)
    moves.add(b"b", moved(ONE, GroupState.QUEUED), 5.003)
    both = (moved(ONE, GroupState.DONE), moved(TWO, GroupState.ASSIGNED))
    assert moves.take() == [
        Send(b"a", GroupsMoved(both)),
        Send(b"b", moved(ONE, GroupState.QUEUED)),
    ]
    assert moves.take() == []


def test_the_first_move_says_when_all_are_due() -> None:
    moves = Moves()
    moves.add(b"a", moved(ONE, GroupState.ASSIGNED), 5.0)
    moves.add(b"a", moved(TWO, GroupState.ASSIGNED), 5.0 + MOMENT_S / 2)
    assert moves.due_s == 5.0 + MOMENT_S
    moves.take()
    moves.add(b"a", moved(TWO, GroupState.DONE), 6.0)
    assert moves.due_s == 6.0 + MOMENT_S
