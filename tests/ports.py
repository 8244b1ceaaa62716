"""Ports of this machine for processes that are told theirs, and have the same when they rise again.

Invariant: none that the system gives to who binds port 0 or dials (ip_local_port_range begins at
32768), so that no neighbour has it by chance before its process does. Driven by tests of processes
that are started by a settings file.
"""

import contextlib
import random

from rollmesh.core.errors import AddressError
from rollmesh.core.process import listen

FIRST, LAST = 20_000, 32_000


def free_ports(num: int) -> list[int]:
    """So many, of nobody now."""
    dice = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < num:
            port = dice.randrange(FIRST, LAST)
            with contextlib.suppress(AddressError):
                stack.enter_context(listen(f"127.0.0.1:{port}"))
                ports.append(port)
        return ports
