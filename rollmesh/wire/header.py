"""What every message is: a struct with a tag, which stands in a packet's header.

Invariant: encoded by position, so that fields are only ever appended. Driven by messages.py and
fleet.py, which hold the messages themselves.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """What stands in a header."""
