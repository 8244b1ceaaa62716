"""Admission of peers to a hub, and the messages that each role may send: all role checks are here.

- A connection is admitted if its public key is a member's. The list is read again for each new
  connection, and at most once a second for messages, so a removed key is refused within a second.
- A message is accepted if the hub's table lists its type for the sender's role.
- A worker's or client's name, and a run's group ids, belong to the key that used them first, while
  the hub runs and that key is a member's. A worker name that is the name of a key belongs to it.
"""

import functools
import os
import threading
import time
import typing
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from rollmesh.core.errors import ConfigError
from rollmesh.core.logs import Occasional, get_logger
from rollmesh.wire.fleet import (
    AskTable,
    EngineFaulted,
    FleetAsk,
    OperatorAsk,
    PublisherLeft,
    ReadFleet,
)
from rollmesh.wire.header import Message
from rollmesh.wire.keys import HUB, MEMBERS, Keys, Member, Role, read_members
from rollmesh.wire.messages import (
    AskAddresses,
    AskDrain,
    AskGroup,
    AskMesh,
    CancelGroup,
    ClientBeat,
    ClientHello,
    ClientLeft,
    EnvFailed,
    GroupDelivered,
    GroupFinished,
    GroupLost,
    GroupReturned,
    GroupStarted,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    ClaimPipeline,
    CoordinatorMessage,
    DrainNode,
    HookMessage,
    JoinNode,
    NodeBeat,
    ReadScheduler,
    UndrainNode,
)

log = get_logger()

LOOK_AGAIN_S = 1.0
MAX_NAMES = 10_000
"""Names that one key may hold; beyond it the oldest one is released."""

Table = Mapping[Role, frozenset[type]]

_CLIENT = frozenset(
    {ClientHello, ClientBeat, ClientLeft, AskGroup, CancelGroup, AskAddresses, AskMesh}
)
ROUTER: Table = {
    Role.WORKER: frozenset(
        {
            WorkerHello,
            WorkerBeat,
            WorkerLeft,
            GroupStarted,
            GroupDelivered,
            GroupReturned,
            GroupLost,
            EnvFailed,
            EngineFaulted,
            AskTable,
            AskMesh,
        }
    ),
    Role.CLIENT: _CLIENT,
    Role.PUBLISHER: _CLIENT | {*typing.get_args(FleetAsk), PublisherLeft},
    Role.OPERATOR: frozenset(
        {AskDrain, AskAddresses, AskMesh, WorkerExited, ReadFleet, *typing.get_args(OperatorAsk)}
    ),
}
SINK: Table = {Role.WORKER: frozenset({GroupFinished})}
_PIPELINE = frozenset(
    {
        *typing.get_args(HookMessage),
        *typing.get_args(CoordinatorMessage),
        ClaimPipeline,
        ReadScheduler,
    }
)
SCHEDULER: Table = {
    Role.CLIENT: _PIPELINE,
    Role.PUBLISHER: _PIPELINE,
    Role.OPERATOR: frozenset(
        {*typing.get_args(AdmissionMessage), JoinNode, DrainNode, UndrainNode, ReadScheduler}
    ),
    Role.NODE: frozenset({JoinNode, NodeBeat}),
}
OWN: Table = {}
"""For a hub whose peers hold its own key file, such as the ranks of a trainer."""

_OF_WORKERS = frozenset({WorkerHello, WorkerBeat, WorkerLeft, EnvFailed, GroupFinished})
_OF_CLIENTS = frozenset({ClientHello, ClientBeat, ClientLeft})


class Access:
    """The members of one hub, its table, and the names that their keys hold."""

    def __init__(
        self,
        keys: Keys,
        table: Table = OWN,
        *,
        is_open: bool = False,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        """With `is_open`, a key that is not in the list is a worker's: for a client whose key file
        was copied without the list. Results prove their tickets there. ConfigError if there is a
        list and it cannot be read."""
        self.num_refused = 0
        self._table = table
        self._is_open = is_open
        self._look_again_s = look_again_s
        self._own = (
            Member(HUB, Role.HUB, keys.hub_public),
            Member(keys.name, Role.HUB, keys.public),
        )
        self._path = Path(keys.folder) / MEMBERS if keys.folder and table else None
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}
        self._by_name: dict[str, str] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = 0.0
        self._holders: dict[tuple[str, str], str] = {}
        """Public key of the holder, by kind and name."""
        self._names: dict[str, dict[tuple[str, str], None]] = {}
        """Names by public key, oldest first."""
        self._refusals = Occasional()
        self._take(read_members(self._path.parent) if self._path else [])
        self.look()

    def look(self) -> None:
        """Read the list of members again if it has changed; an unreadable list changes nothing."""
        if self._path is None:
            return
        with self._lock:
            self._looked_s = time.monotonic()
            try:
                found = os.stat(self._path)
                stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
                if stamp != self._stamp:
                    self._take(read_members(self._path.parent))
                    self._stamp = stamp
            except (OSError, ConfigError) as error:
                log.warning("members.unreadable", error=str(error), path=str(self._path))

    def admits(self, public: str) -> bool:
        """Whether a connection with this public key is admitted."""
        self.look()
        return self._is_open or public in self._members

    def takes(self, public: str, message: Message) -> bool:
        """Whether the key may send `message`; a refusal is counted and logged."""
        if time.monotonic() - self._looked_s > self._look_again_s:
            self.look()
        member = self._members.get(public)
        if member is None:
            if not self._is_open:
                return self._refuse(f"removed key {public}", message, "it was removed")
            member = Member(f"key {public}", Role.WORKER, public)
        if member.role is Role.HUB:
            return True
        if type(message) not in self._table.get(member.role, ()):
            return self._refuse(member.name, message, f"role {member.role} may not send it")
        new = [name for name in _names_in(message) if self._holders.get(name) != public]
        for name in new:
            if not self._is_free(public, name):
                return self._refuse(
                    member.name, message, f"{name[0]} {name[1]} belongs to another key"
                )
        for name in new:
            self._bind(public, name)
        return True

    def _take(self, members: list[Member]) -> None:
        known = (*members, *self._own)
        self._members = {each.public: each for each in known}
        self._by_name = {each.name: each.public for each in known}

    def _is_free(self, public: str, name: tuple[str, str]) -> bool:
        if name[0] == "worker" and self._by_name.get(name[1], public) != public:
            return False
        holder = self._holders.get(name)
        return holder is None or not (self._is_open or holder in self._members)

    def _bind(self, public: str, name: tuple[str, str]) -> None:
        if before := self._holders.pop(name, None):
            self._names[before].pop(name, None)
        names = self._names.setdefault(public, {})
        if len(names) >= MAX_NAMES:
            oldest = next(iter(names))
            del names[oldest], self._holders[oldest]
        names[name] = None
        self._holders[name] = public

    def _refuse(self, sender: str, message: Message, why: str) -> bool:
        self.num_refused += 1
        kind = type(message).__name__
        if number := self._refusals.number((sender, kind)):
            log.warning("message.refused", key=sender, message=kind, why=why[:200], number=number)
        return False


def _names_in(message: Message) -> tuple[tuple[str, str], ...]:
    """Return the names that `message` claims for its sender."""
    kind = type(message)
    if kind in _OF_WORKERS:
        return (("worker", message.worker_id),)  # type: ignore[attr-defined]
    if kind in _OF_CLIENTS:
        return (("client", message.client_id),)  # type: ignore[attr-defined]
    if isinstance(message, AskGroup):
        return (("client", message.client_id), ("run", message.group_id.run_id))
    if isinstance(message, CancelGroup):
        return (("run", message.group_id.run_id),)
    return ()


class Gate:
    """Answers libzmq's ZAP requests for new connections (rfc.zeromq.org/spec/27), by hub."""

    def __init__(self) -> None:
        # One ZAP handler serves a zmq context; a domain distinguishes the hubs of the process.
        self._authenticator = ThreadAuthenticator(zmq.Context.instance())
        self._authenticator.start()
        self._accesses: dict[str, Access] = {}
        self._num_domains = 0

    def open(self, socket: "zmq.Socket[bytes]", access: Access) -> str:
        """Admit the members of `access` at `socket`; return the domain, for `close`."""
        self._num_domains += 1
        domain = f"hub-{self._num_domains}"
        self._accesses[domain] = access
        self._authenticator.configure_curve_callback(domain, self)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        return domain

    def close(self, domain: str) -> None:
        """Remove a hub."""
        self._accesses.pop(domain, None)
        self._authenticator.credentials_providers.pop(domain, None)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key is admitted."""
        access = self._accesses.get(domain)
        return access is not None and access.admits(key.decode("ascii", "replace"))


@functools.cache
def gate() -> Gate:
    """Return the gate of this process."""
    return Gate()
