"""Tells the router what launch sees first: that a worker's process has ended.

Owns a Dialer, which finds the next router too, since that has the address of the last. Invariants:
it waits for nobody; a word that is lost with a router is not repeated, since the next one learns
from the workers themselves who lives. Driven by the supervisor.
"""

import os
from pathlib import Path

from rollmesh.core.logs import get_logger
from rollmesh.launch.keys import keys_of
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role
from rollmesh.wire.messages import WorkerExited
from rollmesh.wire.sockets import Dialer

log = get_logger()


class Herald:
    """See the module; it dials when there is something to tell."""

    def __init__(self, keys: Path | None = None) -> None:
        """`keys` is the run's key folder, if it has one."""
        self._dialer: Dialer | None = None
        self._keys = keys

    def tell(self, router: str, exited: WorkerExited) -> None:
        """Say it to the router at this address."""
        if self._dialer is None:
            self._dialer = Dialer(
                router, f"launch.{os.getpid()}", keys_of(self._keys, Role.OPERATOR)
            )
        if not self._dialer.send(Packet(exited)):
            log.warning("exit.untold", worker_id=exited.worker_id, cause=exited.cause)

    def close(self) -> None:
        """Drop the connection."""
        if self._dialer:
            self._dialer.close()
