"""Events and actions of state machines that are messages, and the batching of group news.

- A machine has `step(event, now_s) -> list[action]` without clock or socket. Its shell wraps
  incoming messages as Received, sends a Ticked at least every half heartbeat, and performs each
  Send.
- Bodies and buffers pass through a machine unopened. The simulator runs the same machines.
- GroupMoved, GroupStarted and GroupDelivered are sent at most `MOMENT_S` late, the newest of each
  group in one GroupNews; the receiver sees them as single messages. They would otherwise be six of
  a group's seven messages.
"""

import math
from typing import Final

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.messages import AnyMessage, GroupDelivered, GroupMoved, GroupNews, GroupStarted

ROUTER: Final = b""
"""Route of a Dialer's only peer, if that is the router."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message arrived from the peer at `route`."""

    route: bytes
    message: AnyMessage
    body: Buffer = b""
    router: str = ""
    """The envelope's router incarnation."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to the peer at `route`; it may be lost."""

    route: bytes
    message: AnyMessage
    body: Buffer = b""


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


MOMENT_S = 0.01

Item = GroupMoved | GroupStarted | GroupDelivered


class GroupNewsBatcher:
    """Unsent group news by peer."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """When to call `take`."""
        self._by_route: dict[bytes, dict[GroupId, Item]] = {}

    def add(self, route: bytes, item: Item, now_s: float) -> None:
        """Add news for the peer at `route`."""
        newest = self._by_route.get(route)
        if newest is None:
            newest = self._by_route[route] = {}
            self.due_s = min(self.due_s, now_s + MOMENT_S)
        newest[item.group_id] = item

    def take(self) -> list[Send]:
        """Return and clear all news, one message for each peer."""
        sends = []
        for route, newest in self._by_route.items():
            items = tuple(newest.values())
            sends.append(Send(route, GroupNews(items) if len(items) > 1 else items[0]))
        self._by_route.clear()
        self.due_s = math.inf
        return sends


def unpack_news(packet: Packet) -> tuple[Packet, ...]:
    """Return the single messages in `packet`."""
    if type(packet.message) is not GroupNews:
        return (packet,)
    return tuple([Packet(each, packet.router) for each in packet.message.news])
