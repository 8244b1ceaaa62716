"""A fleet machine with a manual clock, whose probes the test answers."""

import msgspec

from rollmesh.engine.fleet import (
    Action,
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
    ProbeEngine,
    PublishTable,
)
from rollmesh.wire.fleet import (
    EnginePhase,
    EngineRow,
    FleetAnswered,
    FleetAsk,
    JoinEngine,
    TableMessage,
)
from rollmesh.wire.machine import Received, Send, Ticked

A, B = "http://a", "http://b"
PUBLISHER = b"publisher"


class Bench:
    """A fleet, its manual clock, and the probes that wait for an answer."""

    def __init__(self, *urls: str, settings: FleetSettings | None = None) -> None:
        settings = settings or FleetSettings()
        self.fleet = Fleet(msgspec.structs.replace(settings, allow_hosts=("a", "b")))
        self.now_s = 0.0
        self.pending: dict[str, ProbeEngine | ContinueEngine] = {}
        self.sent: list[TableMessage] = []
        """Messages that every worker was sent."""
        for url in urls:
            self.ask(JoinEngine(1, url))

    def take(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, ProbeEngine | ContinueEngine):
                self.pending[action.url] = action
            if isinstance(action, PublishTable):
                self.sent.append(action.message)
        return actions

    def ask(self, ask: FleetAsk, route: bytes = PUBLISHER) -> FleetAnswered:
        actions = self.take(self.fleet.step(Received(route, ask), self.now_s))
        [answer] = [a.message for a in actions if isinstance(a, Send) and a.route == route]
        assert isinstance(answer, FleetAnswered)
        assert answer.epoch == self.fleet.table().epoch
        return answer

    def tick(self, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        return self.take(self.fleet.step(Ticked(), self.now_s))

    def answer(
        self,
        url: str,
        policy_version: int = 0,
        incarnation: str = "i1",
        ok: bool = True,
        adapter: str = "",
        is_local: bool = False,
    ) -> None:
        ask = self.pending.pop(url)
        probed = EngineProbed(
            url=url,
            serial=ask.serial,
            ok=ok,
            incarnation=incarnation,
            policy_version=policy_version,
            adapter=adapter,
            detail="" if ok else "connection refused",
            is_local=is_local,
        )
        self.take(self.fleet.step(probed, self.now_s))

    def row(self, url: str = A) -> EngineRow:
        [row] = [row for row in self.fleet.table().engines if row.url == url]
        return row

    def phase(self, url: str = A) -> EnginePhase:
        return self.row(url).phase


def ready(*urls: str, policy_version: int = 0) -> Bench:
    """A fleet whose engines have all been probed."""
    bench = Bench(*urls)
    for url in urls:
        bench.answer(url, policy_version)
        assert bench.phase(url) is EnginePhase.READY
    return bench
