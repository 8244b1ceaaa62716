"""Faults of a fleet that pipelines share, besides those of the network.

- All zero is a perfect world; each fault is counted when it occurs.
"""

import msgspec

from rollmesh.testing.mesh_sim.network import FaultChances


class FleetFaults(FaultChances, frozen=True, kw_only=True):
    """Probability of each fault; those of mesh_sim for nodes that a fleet does not have are
    ignored.
    """

    engine_hang: float = 0.0
    """Per second and engine: it answers nothing for a while, then is killed and restarted."""
    engine_crash: float = 0.0
    """Per second and engine."""
    killed: float = 0.0
    """Per second and pipeline: all of its processes die, and do not come back."""
    silent: float = 0.0
    """Per second and node: its agent sends nothing for a while."""
    lost: float = 0.0
    """Per second and trainer: it dies, and returns when its requests have been given up."""
    cut: float = 0.0
    """Per second and trainer: it is cut off from the scheduler for 20 s."""
    set_back: float = 0.0
    """Per start of a coordinator or trainer: its clock is an hour behind the one before it."""
    node_lost: float = 0.0
    """Per second and node: everything on it dies, and it returns later."""
    drained: float = 0.0
    """Per second and node: it is drained, and later that is undone."""
    verb_killed: float = 0.0
    """Per second and pipeline: a verb that waits for its answer is killed and repeated."""
    left: float = 0.0
    """Per second and pipeline: it is unregistered in the middle of its work."""
    withdrawn: float = 0.0
    """Per second and trainer: it withdraws a request, and then repeats it."""
    held_up: float = 0.0
    """Per second: messages for the scheduler gather and are taken in one turn."""


CHAOS = FleetFaults(
    drop=0.05,
    duplicate=0.05,
    slow=0.05,
    call_error=0.02,
    crash=0.02,
    freeze=0.02,
    killed_before_write=0.003,
    killed_after_write=0.006,
    engine_hang=0.004,
    engine_crash=0.004,
    killed=0.002,
    lost=0.003,
    cut=0.004,
    set_back=0.2,
    silent=0.005,
    node_lost=0.002,
)
WILD = msgspec.structs.replace(
    CHAOS,
    drained=0.004,
    verb_killed=0.02,
    left=0.001,
    withdrawn=0.02,
    held_up=0.2,
    jump=0.004,
    disk_full=0.002,
)
"""Probabilities of acts of people, and of disks and clocks."""
