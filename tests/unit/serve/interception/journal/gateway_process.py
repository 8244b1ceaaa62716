"""A gateway's registry over one journal, across restarts, with a scripted sampler."""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.serve.interception.capture import CaptureOptions, OpenedSession
from rollmesh.serve.interception.journal.entries import FORMAT, JournalHeader
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.recovery import JournalRecovery, RecoveryReport
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.sessions import RegisteredSession, SessionRegistry
from rollmesh.serve.interception.token_capture import TokenCapture, TokenSession
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.sampler import ScriptedSampler
from tests.unit.runtime.session_calls import Message, call

SEGMENT_BYTES = 16 * 1024
RETENTION_S = 1e9
HEADER = JournalHeader("tokens", "m", "q", FORMAT)


class GatewayProcess:
    """One process; create the next one after `journal.close_journal` to simulate a kill."""

    def __init__(
        self, folder: Path, prompts: Prompts, ids: list[int], max_bytes: int = 2**40
    ) -> None:
        self.clock = clock = FakeClock()
        self.sampler = ScriptedSampler(lambda _: ids, clock=clock)
        config = JournalConfig(segment_bytes=SEGMENT_BYTES, max_bytes=max_bytes)
        self.journal = GatewayJournal(folder, config)
        runtime = Runtime(self.sampler, prompts, 10**6, clock)
        self.runtime = runtime
        self.capture = TokenCapture(runtime, SamplingPolicy(), self.journal)
        self.registry = SessionRegistry(self.capture, clock, RETENTION_S, journal=self.journal)
        try:
            self.recovered: RecoveryReport = JournalRecovery(
                self.journal, self.capture, self.registry
            ).run(HEADER)
        except ConfigError:
            self.journal.close_journal()
            raise

    def open(self) -> OpenedSession:
        return self.registry.open(CaptureOptions(seed=7), b'{"task":1}')

    def entry(self, opened: OpenedSession) -> RegisteredSession:
        return self.registry.find(opened.captured.session_id)

    async def run_call(self, opened: OpenedSession, *texts: str, tools: bytes = b"") -> None:
        """Run one call whose history has these texts, each followed by its answer."""
        captured = self.entry(opened).captured
        assert isinstance(captured, TokenSession)
        messages: list[Message] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": "a"})
        raws = [msgspec.json.encode(message) for message in messages[:-1]]
        await call(captured.session, Turn(messages=raws, digest=hash(texts), tools=tools))

    def report(self, opened: OpenedSession) -> dict[str, Any]:
        encoded = joined(self.registry.finish(self.entry(opened), Outcome.COMPLETED))
        report: dict[str, Any] = msgspec.json.decode(encoded)
        return report
