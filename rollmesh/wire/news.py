"""News of groups: told together, a moment later, since none of it hurries.

    GroupMoved, GroupStarted, GroupDelivered --add--> newest of each group --take--> GroupNews
    GroupNews --spread--> the same as if each had come alone

A busy router would otherwise spend six of a group's seven messages on them. Invariants: news is
told at most `MOMENT_S` late; who receives does not see that it came together. Driven by the shells
of router and worker, who send it, and by sockets.py.
"""

import math

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import GroupDelivered, GroupMoved, GroupNews, GroupStarted

MOMENT_S = 0.01

Item = GroupMoved | GroupStarted | GroupDelivered


class News:
    """What has not been told, by peer."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """When to call `take`."""
        self._by_route: dict[bytes, dict[GroupId, Item]] = {}

    def add(self, route: bytes, item: Item, now_s: float) -> None:
        """The peer at `route` is to hear of it."""
        newest = self._by_route.get(route)
        if newest is None:
            newest = self._by_route[route] = {}
            self.due_s = min(self.due_s, now_s + MOMENT_S)
        newest[item.group_id] = item

    def take(self) -> list[Send]:
        """All of it, one message a peer."""
        told = []
        for route, newest in self._by_route.items():
            items = tuple(newest.values())
            told.append(Send(route, GroupNews(items) if len(items) > 1 else items[0]))
        self._by_route.clear()
        self.due_s = math.inf
        return told


def spread(packet: Packet) -> tuple[Packet, ...]:
    """What came with `packet`."""
    if type(packet.message) is not GroupNews:
        return (packet,)
    return tuple([Packet(each, packet.router) for each in packet.message.news])
