"""The router's side thread: its HTTP face and the probes of engines, apart from the hot loop.

Invariants: nothing here waits for the hot loop or makes it wait: probes answer into a mailbox and
ring its bell; every probe asked for is answered. Driven by process.py.
"""

import asyncio
import collections
import socket

from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import Exposition, Source
from rollmesh.engine.fleet import ContinueEngine, EngineProbed, ProbeEngine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.probe import PROBE_SHORTAGE_WAIT_S, probe_engine
from rollmesh.serve.face import Board, Face
from rollmesh.serve.router.status import Status
from rollmesh.wire.sockets import Doorbell

log = get_logger()


class SideThread:
    """See the module."""

    def __init__(
        self,
        listening: socket.socket,
        board: Board[Status],
        bell: Doorbell,
        figures: Source | None = None,
    ) -> None:
        """Serves on `listening` from `start` on, and `figures` with the board's; AddressError if
        that needs a token."""
        exposition = Exposition("router")
        if figures:
            exposition.add(figures)
        setting = "router.http_bind"
        self._face = Face(listening, board, exposition, setting=setting, until=self._probe)
        self._bell = bell
        self._answers: collections.deque[EngineProbed] = collections.deque()
        self._asks: asyncio.Queue[ProbeEngine | ContinueEngine | None] = asyncio.Queue()

    def start(self) -> None:
        """Returns when the HTTP face serves."""
        self._face.start()

    def probe(self, ask: ProbeEngine | ContinueEngine) -> None:
        """Do it; the answer will be in `take_answers`, and the bell is rung."""
        self._face.call(self._asks.put_nowait, ask)

    def take_answers(self) -> list[EngineProbed]:
        """The answers since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._face.call(self._asks.put_nowait, None)
        self._face.close()

    async def _probe(self) -> None:
        http = HttpClient(shortage_wait_s=PROBE_SHORTAGE_WAIT_S)
        async with http, asyncio.TaskGroup() as probes:
            while ask := await self._asks.get():
                probes.create_task(self._answer(ask, http))

    async def _answer(self, ask: ProbeEngine | ContinueEngine, http: HttpClient) -> None:
        try:
            answer = await probe_engine(ask, http)
        except Exception as error:  # door: an engine's answer must not end the thread
            log.exception("probe.failed", engine=ask.url)
            answer = EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=repr(error))
        self._answers.append(answer)
        self._bell.ring()
