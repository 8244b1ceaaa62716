"""A run's part in a fleet of GPUs that other runs share.

Owns what a process must know to find it. Invariant: it names the part, and who knows what is in it;
how much that is at a time is the scheduler's word alone. Driven by the verbs, launch and the
trainer.
"""

import msgspec


class Share(msgspec.Struct, frozen=True):
    """See the module."""

    scheduler: str
    """tcp:// address of who knows the shares."""
    pipeline_id: str
    """What the run is called there."""
