"""What step machines are told and what they ask for, where that is a message.

A machine has `step(event, now_s) -> list[action]` and neither clock nor socket. Its shell wraps
what a socket brought as Received, calls at least every half beat with Ticked, and carries out each
Send. Bodies and buffers pass through a machine unopened. The same machines run in the simulator.
"""

from typing import Final

import msgspec

from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import AnyMessage

ROUTER: Final = b""
"""The route of a Dialer's only peer, where that is the router."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message came in from the peer at `route`."""

    route: bytes
    message: AnyMessage
    body: Buffer = b""
    router: str = ""
    """The envelope's router incarnation."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send `message` to the peer at `route`; a send is a hint, it may be lost."""

    route: bytes
    message: AnyMessage
    body: Buffer = b""


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""
