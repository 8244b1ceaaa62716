"""Group updates are batched for a moment; receivers get the same messages."""

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import MOMENT_S, GroupNewsBatcher, Send
from rollmesh.wire.messages import (
    ClientBeat,
    GroupDelivered,
    GroupMoved,
    GroupNews,
    GroupStarted,
    GroupState,
)
from rollmesh.wire.sockets import Dialer, Hub, wait

ONE, TWO = GroupId("r1", 1), GroupId("r1", 2)


def moved(group_id: GroupId, state: GroupState) -> GroupMoved:
    return GroupMoved(group_id, state, 1, "w0")


def test_each_peer_receives_the_newest_state_of_all_its_groups_once() -> None:
    news = GroupNewsBatcher()
    news.add(b"a", moved(ONE, GroupState.ASSIGNED), 5.0)
    news.add(b"a", moved(TWO, GroupState.ASSIGNED), 5.001)
    news.add(b"a", moved(ONE, GroupState.DONE), 5.002)
    news.add(b"b", GroupStarted(ONE, 1), 5.003)
    both = (moved(ONE, GroupState.DONE), moved(TWO, GroupState.ASSIGNED))
    assert news.take() == [Send(b"a", GroupNews(both)), Send(b"b", GroupStarted(ONE, 1))]
    assert news.take() == []


def test_the_first_update_sets_the_due_time_of_all() -> None:
    news = GroupNewsBatcher()
    news.add(b"a", moved(ONE, GroupState.ASSIGNED), 5.0)
    news.add(b"a", moved(TWO, GroupState.ASSIGNED), 5.0 + MOMENT_S / 2)
    assert news.due_s == 5.0 + MOMENT_S
    news.take()
    news.add(b"a", moved(TWO, GroupState.DONE), 6.0)
    assert news.due_s == 6.0 + MOMENT_S


def test_batched_updates_are_received_one_by_one_at_both_ends() -> None:
    hub = Hub("tcp://127.0.0.1:0")
    dialer = Dialer(hub.address, "w0")
    started, delivered = GroupStarted(ONE, 1), GroupDelivered(TWO, 1)
    dialer.send(Packet(GroupNews((started, delivered)), "i1"))
    dialer.send(Packet(ClientBeat("c1", 0)))
    at_hub: list[tuple[bytes, Packet]] = []
    while len(at_hub) < 3:
        wait([hub], None, 5.0)
        at_hub += hub.receive()
    assert [packet.message for _, packet in at_hub] == [started, delivered, ClientBeat("c1", 0)]
    assert {(route, packet.router) for route, packet in at_hub[:2]} == {(b"w0", "i1")}
    hub.send(b"w0", Packet(GroupNews((delivered, started)), "i2"))
    at_dialer: list[Packet] = []
    while len(at_dialer) < 2:
        wait([dialer], None, 5.0)
        at_dialer += dialer.receive()
    assert at_dialer == [Packet(delivered, "i2"), Packet(started, "i2")]
    dialer.close()
    hub.close()
