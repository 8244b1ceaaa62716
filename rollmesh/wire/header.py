"""The base of all messages: a tagged struct in a packet's header.

Encoded by position, so fields are only ever appended.
"""

from typing import Annotated

import msgspec

MAX_SECONDS = 1e15
Seconds = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
"""A time or a duration in a message. Values that are not finite fail to decode."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """A tagged message."""
