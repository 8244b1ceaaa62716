"""The policies: who generates, and with how many workers.

Owns their names. Invariant: a policy adds to the draft and knows nothing but what is in it. Driven
by plan.py; the service's settings and the simulator name one.
"""

from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.planning.plan import Policy
from rollmesh.scheduler.planning.policies.fair import Fair
from rollmesh.scheduler.planning.policies.gap_ratio import GapRatio
from rollmesh.scheduler.planning.policies.static import Static

POLICIES: dict[str, type[Fair | GapRatio | Static]] = {
    each.name: each for each in (Fair, GapRatio, Static)
}


def by_name(name: str) -> Policy:
    """With its settings as they are by default."""
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]()
