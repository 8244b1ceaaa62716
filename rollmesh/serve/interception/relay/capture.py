"""The relay's open sessions and their keys; a closed session leaves nothing here."""

from rollmesh.core.clock import Clock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.ids import new_id
from rollmesh.runtime.session_deps import KeyDigests, SessionKeys
from rollmesh.serve.interception.capture import (
    CapturedSession,
    CaptureOptions,
    JournaledSession,
    OpenedSession,
)
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.events import RelayEventWriter, RelayReplay, decode
from rollmesh.serve.interception.relay.session import RelayCounters, RelaySession
from rollmesh.serve.interception.relay.upstreams import UpstreamPool


class RelayCapture:
    """Implements Capture."""

    def __init__(
        self,
        upstreams: UpstreamPool,
        clock: Clock,
        config: InterceptionConfig,
        journal: GatewayJournal | None = None,
    ) -> None:
        self._journal = journal
        self._upstreams = upstreams
        self._clock = clock
        self._config = config
        self._keys: SessionKeys[RelaySession] = SessionKeys()
        self._locks: dict[str, KeyDigests] = {}
        """By session id."""
        self.counters = RelayCounters()

    def open(self, wish: CaptureOptions) -> OpenedSession:
        """SessionError 400 for sampling rules: a relay changes no request."""
        if wish.sampling is not None:
            why = "sampling: a relay forwards requests as they are; rules need --capture tokens"
            raise SessionError(400, "unsupported_sampling", why)
        session_id = new_id("s", 6)
        writer = RelayEventWriter(self._journal, session_id) if self._journal else None
        session = self.create(session_id, writer, None)
        keys = self._keys.make(session)
        self._locks[session_id] = keys.locks
        return OpenedSession(session, keys.api_key, keys.path_secret)

    def restore(self, standing: JournaledSession) -> "RelayRestoration":
        assert self._journal is not None
        writer = RelayEventWriter(self._journal, standing.session_id)
        replay = RelayReplay(standing.read, self._config.max_body_bytes)
        return RelayRestoration(self, standing, writer, replay)

    def create(
        self, session_id: str, writer: RelayEventWriter | None, replay: RelayReplay | None
    ) -> RelaySession:
        """A session, continued from `replay` if given; its keys are added separately."""
        return RelaySession(
            session_id, self._upstreams, self._clock, self._config, self.counters, writer, replay
        )

    def reopen(self, session: RelaySession, locks: KeyDigests) -> None:
        """Accept the keys that opened the session in another process."""
        self._keys.reopen(locks, session)
        self._locks[session.session_id] = locks

    def find(self, secret: str) -> RelaySession:
        """The session of a secret; SessionError 401 if there is none."""
        return self._keys.find(secret)

    @property
    def num_doors(self) -> int:
        """Number of valid keys."""
        return len(self._keys)

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, RelaySession)
        captured.seal("it was deleted")
        captured.forget()
        locks = self._locks.pop(captured.session_id, None)
        if locks is not None:
            self._keys.close(locks)


class RelayRestoration:
    """Implements Regaining."""

    def __init__(
        self,
        capture: RelayCapture,
        standing: JournaledSession,
        writer: RelayEventWriter,
        replay: RelayReplay,
    ) -> None:
        self._capture = capture
        self._standing = standing
        self._writer = writer
        self._replay = replay

    def take(self, events: bytes) -> None:
        for event in decode(events):
            self._replay.take(event)

    def end(self) -> RelaySession:
        self._writer.encoder.num_nodes = self._replay.num_nodes
        session = self._capture.create(self._standing.session_id, self._writer, self._replay)
        self._capture.reopen(session, self._standing.locks)
        return session

    def finished(self, num_calls: int) -> RelaySession:
        session = self._capture.create(self._standing.session_id, self._writer, None)
        self._capture.reopen(session, self._standing.locks)
        session.num_calls = num_calls
        session.seal("it was finished")
        return session
