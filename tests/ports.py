"""Ports of this machine for processes that get them by settings, and keep them across a restart.

The system assigns none of them to a process that binds port 0 or connects (ip_local_port_range
begins at 32768), so that no other process takes one by chance.
"""

import contextlib
import random

from rollmesh.core.errors import AddressError
from rollmesh.core.process import listen

FIRST, LAST = 20_000, 32_000


def free_ports(num: int) -> list[int]:
    """Return `num` ports without a listener."""
    dice = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < num:
            port = dice.randrange(FIRST, LAST)
            with contextlib.suppress(AddressError):
                stack.enter_context(listen(f"127.0.0.1:{port}"))
                ports.append(port)
        return ports
