"""What every message is: a struct with a tag, which stands in a packet's header.

Invariant: encoded by position, so that fields are only ever appended. Driven by messages.py and
fleet.py, which hold the messages themselves.
"""

from typing import Annotated

import msgspec

MAX_SECONDS = 1e15
Seconds = Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
"""A time or a duration in a message. What is not finite does not decode."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """What stands in a header."""
