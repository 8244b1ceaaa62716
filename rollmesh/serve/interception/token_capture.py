"""Capture in exact tokens, with the runtime's sessions, as in a worker.

- Each session has its own scope and is sealed alone.
- The report of a sealed session is built from its record; then everything else is released.
"""

import contextlib
import secrets
from array import array
from collections import Counter
from collections.abc import Mapping

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.ids import GroupId, RolloutId, new_id
from rollmesh.core.types import Outcome, SamplingPolicy
from rollmesh.runtime.conversation.token_graph import images_on
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.restore import RestoredState, SessionReplay, StoredSession
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.session import Session
from rollmesh.runtime.session_log import AnyEvent
from rollmesh.serve.interception.capture import (
    NO_COUNTS,
    CapturedSession,
    CaptureOptions,
    JournaledSession,
    OpenedSession,
)
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.journal.session_writer import SessionEventWriter
from rollmesh.serve.interception.pieces import Piece, cut
from rollmesh.serve.interception.report import (
    ReportWriter,
    RewardSlot,
    SessionReport,
    cut_samples,
    unused_turns,
)

SEED_BITS = 62


class TokenSession:
    """CapturedSession over a session of the runtime."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def num_calls(self) -> int:
        return self.session.num_calls

    @property
    def is_busy(self) -> bool:
        return any(not reply.is_ended for reply in self.session.sampling)

    @property
    def held_bytes(self) -> int:
        return self.session.held_bytes

    def held(self) -> Mapping[str, int]:
        return self.session.held()

    @property
    def fault(self) -> str:
        return self.session.engine_fault

    @property
    def natural_outcome(self) -> Outcome:
        return Outcome.INFRA_ERROR if self.fault else Outcome.COMPLETED

    @property
    def spent_because(self) -> str:
        return self.session.spent_because

    @property
    def forks(self) -> Mapping[str, int]:
        rows = self.session.fork_report().forks
        return Counter([row.cause for row in rows]) if rows else NO_COUNTS

    @property
    def healed(self) -> Mapping[str, int]:
        return self.session.fork_report().healed

    def node_of(self, name: int | str) -> int:
        # Each dialect puts its own prefix before the reply's id.
        at = name.find(self.session_id) if isinstance(name, str) else 0
        if at < 0:
            raise LookupError(name)
        try:
            return self.session.node_of(name[at:] if isinstance(name, str) else name)
        except SessionError:
            raise LookupError(name) from None

    def seal(self, reason: str) -> None:
        self.session.seal(reason)

    def report(self) -> SessionReport:
        record, writer = self.session.record(), ReportWriter()
        nodes = record.nodes
        token_ids, logprobs = array("i"), array("f")
        token_ids.frombytes(record.token_ids)
        logprobs.frombytes(record.logprobs)
        rows = (
            (
                RewardSlot(tuple(sample["nodes"]), has_default=True),
                {**sample, "images": images_on(nodes, sample["nodes"])},
            )
            for sample in cut_samples(nodes, token_ids, logprobs)
        )
        writer.rows("samples", rows)
        writer.field("unused", unused_turns(nodes))
        writer.ready("messages", cut(bytes(record.messages)))
        images = ((digest, _quoted(image)) for digest, image in record.images.items())
        writer.named("images", images)
        writer.field("forks", [msgspec.structs.asdict(row) for row in record.forks])
        writer.field("healed", record.healed)
        writer.field("num_calls", record.num_calls)
        writer.field("fell_back", self.session.num_fell_back)
        writer.field("capture", "tokens")
        sampled = (row for row, node in enumerate(nodes) if node.sampled)
        return writer.build(self.session_id, self._names(), sampled)

    def forget(self) -> None:
        self.session.forget()

    def _names(self) -> dict[str, int]:
        """Map the ids of replies to their nodes."""
        names = {}
        for number in range(self.session.num_calls):
            name = f"{self.session_id}-{number}"
            with contextlib.suppress(SessionError):
                names[name] = self.session.node_of(name)
        return names


def _quoted(image: ImageRef) -> tuple[Piece, ...]:
    """Encode an image's address as JSON; the bytes of a blob need no escapes."""
    address = image.address
    return (msgspec.json.encode(address),) if isinstance(address, str) else (b'"', address, b'"')


class TokenSessionRestore:
    """SessionRestore over the runtime's session replay."""

    def __init__(
        self, capture: "TokenCapture", journaled: JournaledSession, writer: SessionEventWriter
    ) -> None:
        self._capture = capture
        self._standing = journaled
        self._writer = writer
        self._redo = SessionReplay(journaled.session_id, capture.deps, journaled.read)

    def take(self, events: bytes) -> None:
        for event in _decode(events):
            self._redo.take(event)

    def end(self) -> TokenSession:
        restored = self._redo.restored()
        self._writer.shown |= frozenset(restored.held.history.images)
        return self._capture.register_restored(self._standing, self._writer, restored)

    def finished(self, num_calls: int) -> TokenSession:
        captured = self._capture.register_restored(self._standing, self._writer, None)
        captured.session.num_calls = num_calls
        captured.seal("it was finished")
        captured.forget()
        return captured


class TokenCapture:
    """Capture over the runtime."""

    def __init__(
        self, runtime: Runtime, sampling: SamplingPolicy, journal: GatewayJournal | None = None
    ) -> None:
        """Create the capture; `sampling` is the default of its sessions."""
        self.deps = runtime.deps
        self._runtime = runtime
        self._sampling = sampling
        self._journal = journal
        self._name = new_id("gw")
        self._num_opened = 0

    def open(self, options: CaptureOptions) -> OpenedSession:
        seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
        sampling = options.sampling or self._sampling
        stored = None
        if self._journal is not None:
            session_id = new_id("s", 6)
            stored = StoredSession(session_id, SessionEventWriter(self._journal, session_id))
        opened = self._register(sampling, seed, stored)
        captured = TokenSession(opened.session)
        return OpenedSession(captured, opened.api_key, opened.path_secret, sampling, seed)

    def restore(self, journaled: JournaledSession) -> TokenSessionRestore:
        assert self._journal is not None
        return TokenSessionRestore(
            self, journaled, SessionEventWriter(self._journal, journaled.session_id)
        )

    def register_restored(
        self,
        journaled: JournaledSession,
        writer: SessionEventWriter,
        restored: RestoredState | None,
    ) -> TokenSession:
        """Register a session of an earlier process with its restored state."""
        stored = StoredSession(journaled.session_id, writer, journaled.locks, restored)
        opened = self._register(journaled.sampling or self._sampling, journaled.seed, stored)
        return TokenSession(opened.session)

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, TokenSession)
        self._runtime.cleanup_rollout(captured.session.rollout_id)

    def _register(
        self, sampling: SamplingPolicy, seed: int, stored: StoredSession | None
    ) -> OpenSession:
        rollout_id = RolloutId(GroupId(self._name, self._num_opened), 0)
        self._num_opened += 1
        return self._runtime.register_trajectory(
            rollout_id, sampling, seed, is_grouped=False, stored=stored
        )


_decode = msgspec.msgpack.Decoder(list[AnyEvent]).decode
