"""What one publication carries: where a policy version's weights lie, and where their file goes.

    LAID in memory by each rank  --written beside, then renamed-->  WHOLE as a folder

Plain values, so that ranks can tell the publisher. Invariant: the bytes of a part are the weights
of its version from the moment that it is told of until the publication is over; then its rank may
lay the next there. Driven by the policy, which lays, and by shipping.py, which carries.
"""

import msgspec

from rollmesh.engine.in_memory import Part


class Cargo(msgspec.Struct, frozen=True):
    """The weights of one policy version."""

    policy_version: int
    folder: str
    """Absolute; whole once the file is written, and until a later version has replaced it."""
    parts: tuple[Part, ...] = ()
    """None where the folder is whole as it is: adapters, and models whose files transformers has
    to convert."""
