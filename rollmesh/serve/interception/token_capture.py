"""Capture in exact tokens: the gateway's sessions are the runtime's, as in a worker.

Invariants: each session ends alone, with a scope of its own; what a sealed session says of itself
is made from its record, and nothing else is kept once it was. Driven by book.py.
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
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.restore import RestoredState, SessionReplay, StoredSession
from rollmesh.runtime.scopes import OpenSession
from rollmesh.runtime.session import Session
from rollmesh.runtime.session_log import AnyDeed
from rollmesh.runtime.token_graph import images_on
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
    """Satisfies CapturedSession."""

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

    def account(self) -> SessionReport:
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
        return writer.account(self.session_id, self._names(), sampled)

    def forget(self) -> None:
        self.session.forget()

    def _names(self) -> dict[str, int]:
        """The nodes of all replies that have one, by the replies' ids."""
        names = {}
        for number in range(self.session.num_calls):
            name = f"{self.session_id}-{number}"
            with contextlib.suppress(SessionError):
                names[name] = self.session.node_of(name)
        return names


def _quoted(image: ImageRef) -> tuple[Piece, ...]:
    """An image's address as JSON; where it is a blob, none of its bytes needs an escape."""
    address = image.address
    return (msgspec.json.encode(address),) if isinstance(address, str) else (b'"', address, b'"')


class TokenSessionRestore:
    """Satisfies Regaining."""

    def __init__(
        self, capture: "TokenCapture", standing: JournaledSession, scribe: SessionEventWriter
    ) -> None:
        self._capture = capture
        self._standing = standing
        self._scribe = scribe
        self._redo = SessionReplay(standing.session_id, capture.kit, standing.read)

    def take(self, deeds: bytes) -> None:
        for deed in _decode(deeds):
            self._redo.take(deed)

    def end(self) -> TokenSession:
        past = self._redo.past()
        self._scribe.shown |= frozenset(past.held.history.images)
        return self._capture.stand(self._standing, self._scribe, past)

    def finished(self, num_calls: int) -> TokenSession:
        captured = self._capture.stand(self._standing, self._scribe, None)
        captured.session.num_calls = num_calls
        captured.seal("it was finished")
        captured.forget()
        return captured


class TokenCapture:
    """Satisfies Capture."""

    def __init__(
        self, runtime: Runtime, sampling: SamplingPolicy, archive: GatewayJournal | None = None
    ) -> None:
        """`sampling` is for sessions that wish for no other."""
        self.kit = runtime.deps
        self._runtime = runtime
        self._sampling = sampling
        self._archive = archive
        self._name = new_id("gw")
        self._num_opened = 0

    def open(self, wish: CaptureOptions) -> OpenedSession:
        seed = secrets.randbits(SEED_BITS) if wish.seed is None else wish.seed
        sampling = wish.sampling or self._sampling
        kept = None
        if self._archive is not None:
            session_id = new_id("s", 6)
            kept = StoredSession(session_id, SessionEventWriter(self._archive, session_id))
        opened = self._register(sampling, seed, kept)
        captured = TokenSession(opened.session)
        return OpenedSession(captured, opened.api_key, opened.path_secret, sampling, seed)

    def regain(self, standing: JournaledSession) -> TokenSessionRestore:
        assert self._archive is not None
        return TokenSessionRestore(
            self, standing, SessionEventWriter(self._archive, standing.session_id)
        )

    def stand(
        self, standing: JournaledSession, scribe: SessionEventWriter, past: RestoredState | None
    ) -> TokenSession:
        """A session that another process has opened, with what it did; a Regaining's."""
        kept = StoredSession(standing.session_id, scribe, standing.locks, past)
        opened = self._register(standing.sampling or self._sampling, standing.seed, kept)
        return TokenSession(opened.session)

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, TokenSession)
        self._runtime.cleanup_rollout(captured.session.rollout_id)

    def _register(
        self, sampling: SamplingPolicy, seed: int, kept: StoredSession | None
    ) -> OpenSession:
        rollout_id = RolloutId(GroupId(self._name, self._num_opened), 0)
        self._num_opened += 1
        return self._runtime.register_trajectory(
            rollout_id, sampling, seed, is_grouped=False, kept=kept
        )


_decode = msgspec.msgpack.Decoder(list[AnyDeed]).decode
