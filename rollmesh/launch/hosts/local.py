"""This machine as a host: children of launch itself, which die with it."""

import socket
from collections.abc import Mapping
from pathlib import Path

from rollmesh.launch.child import ChildProcess
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder


class LocalHost:
    """Starts children of this process."""

    def __init__(self, logs: Path, sockets: Mapping[str, socket.socket]) -> None:
        """Children write to `logs/ROLE.out`; `sockets` by role are those that they serve on."""
        self._logs = logs
        self._sockets = sockets

    def start(self, order: ChildOrder, hooks: ChildCallbacks) -> ChildProcess:
        listening = self._sockets.get(order.role)
        return ChildProcess(order, self._logs / f"{order.role}.out", listening, hooks)

    async def close(self) -> None:
        for each in self._sockets.values():
            each.close()
