"""RolloutClient: ask the mesh for groups of rollouts and take the results, from any program.

    client = RolloutClient(router, config.journal, run_folder)
    client.start()
    group_id = client.ask(task, env="guess", num_samples=8, sampling=SamplingPolicy(), seed=0)
    for arrival in client.take(timeout_s=1.0): ...

- `take` returns every group once, as Finished or as Dropped with its reason.
- What was taken is in the journal. A new client on the same folder returns again what was neither
  trained nor marked as done. With `keep` it also has the name and address of the old one, and open
  asks go on.
- Every method may be called from any thread, and none waits for the network. In a forked process
  they are errors.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import msgspec

from rollmesh.core.addresses import (
    address_towards,
    advertised,
    own_address,
    split_address,
    with_host,
)
from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import (
    AddressError,
    ClientClosed,
    ConfigError,
    JournalError,
    Overloaded,
    WireError,
)
from rollmesh.core.ids import GroupId, new_id
from rollmesh.core.text import printable
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.arrivals import (
    Arrival,
    Dropped,
    Finished,
    StoredResult,
    Unopened,
    open_result,
)
from rollmesh.serve.client.asks import MOMENT_S, PATIENCE_S, Asked, AskSettings, Cancelled
from rollmesh.serve.client.intake import MAX_FILED_BYTES, Cover, IntakeThread, Note, Taken
from rollmesh.serve.client.journal import History, open_journal
from rollmesh.serve.client.journal_entries import (
    Again,
    GroupParted,
    Published,
    StateSaved,
    StepBegun,
    StepEnded,
    StepEntry,
    StepTaken,
)
from rollmesh.wire.frames import decode_ask, encode_ask
from rollmesh.wire.keys import Keys
from rollmesh.wire.members import SINK, Access
from rollmesh.wire.messages import GroupAsk
from rollmesh.wire.sockets import SERVER_KEY, Dialer, Hub

__all__ = ["Arrival", "Dropped", "Finished", "RolloutClient"]

NOTE_TIMEOUT_S = 30.0
MAX_OPEN = 16_384
"""Limit on groups that were asked for and not taken; past it `ask` raises Overloaded."""
MAX_WEIGHT = 1000
LOOPBACK = "127.0.0.1"
QUEUE_RESULTS = 4
"""Results queued per worker: results may be long, and those without room should wait at the
worker.
"""
NUM_LISTENS, LISTEN_AGAIN_S = 10, 0.05
"""How often, and after what pause, the address of an earlier client is tried."""


TriesAgain = Callable[[], bool]
"""Waits, does what may free disk space, and returns whether to try again."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Terms(msgspec.Struct, frozen=True):
    """The terms of a group besides its task."""

    env: str
    num_samples: Int64
    priority: Int64
    deadline_s: float
    patience_s: float


class RolloutClient:
    """One client with one sink; its journal is in `folder/journal`, which no other process may
    use.
    """

    def __init__(
        self,
        router: str,
        journal: JournalConfig,
        folder: Path,
        keys: Keys | None = None,
        *,
        bind: str = "",
        advertise: str = "",
        weight: int = 1,
        keep: bool = False,
    ) -> None:
        """Dial `router` and listen at `bind` or, if that is empty, at a free port that the router
        can reach. `advertise` is the host, or the tcp:// address, by which workers reach it.

        `weight` is this client's share of turns against other clients'. `keep` lets its groups
        outlive it. Raises AddressError or JournalError if it cannot be opened.
        """
        if not 1 <= weight <= MAX_WEIGHT:
            raise ConfigError(f"weight = {weight}: give a client 1 to {MAX_WEIGHT:,} turns")
        self.reopened: dict[GroupId, Task] = {}
        """With `keep`: groups that an earlier client here asked for and did not take."""
        self._lock = threading.Lock()
        self._next_seq = 0
        self._num_open = 0
        self._is_closed = False
        self._pid = os.getpid()
        with ExitStack() as undo:
            bind = bind or with_host("tcp://:0", address_here(router))
            client_journal = undo.enter_context(closing(open_journal(folder, journal)))
            self.history = client_journal.history() if keep else History()
            """With `keep`, until `start`: what earlier clients here left."""
            self.run_id = fresh_run_id(client_journal.ended)
            earlier = client_journal.earlier if keep else None
            client_id = (earlier and earlier.client_id) or new_id("c")
            place = split_address(advertised(bind, advertise, router))[0]
            before = earlier.sink if earlier and split_address(earlier.sink)[0] == place else ""
            hub = undo.enter_context(closing(listen(bind, before, keys)))
            dialer = undo.enter_context(closing(Dialer(router, client_id, keys)))
            self.address = advertised(hub.address, advertise, router)
            """Address to which workers send results."""
            sink = hub.address_for_peers(self.address)
            settings = AskSettings(client_id=client_id, sink=sink, weight=weight, keep=keep)
            self._intake = IntakeThread(hub, dialer, client_journal, settings)
            self._client_journal = client_journal
            undo.pop_all()
        self.redo = RedoNotes(self._note)
        """Records what happens to steps that are redone."""
        self.why_waiting: Callable[[], str] = self._intake.why_waiting
        """Returns why groups wait, as last sent by the router; '' if it has sent nothing lately."""
        self.client_id = client_id
        """Its name at the router; with `keep` the same after a restart."""

    def start(self, saved: StateSaved | None = None) -> None:
        """Begin to serve; results that the journal holds of earlier runs are handed out first.

        With `saved` (the state of the program's newest checkpoint; StateSaved() if there is none),
        whatever no checkpoint covers stays in the journal and is reported by `history`, and results
        that a step took are not handed out, because that step is redone.
        """
        reopened = self._intake.start(self.run_id, saved)
        self.history = History()
        self.reopened = {asked.group_id: decode_ask(asked.body).task for asked in reopened}

    def meet_router(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the first answer of a router; return whether one answered."""
        return self._intake.has_router.wait(timeout_s)

    def watch(self, on_arrival: Callable[[], None] | None) -> None:
        """Call this, from another thread, when `take` would return something again; None stops
        that.

        It must not wait and must not call this client.
        """
        self._intake.watch(on_arrival)

    def close(self, *, for_good: bool = False) -> None:
        """Leave; the router cancels open groups unless they are kept. The journal stays.

        `for_good`: no later client will continue kept groups, so they are cancelled too. A second
        call does nothing, nor does a call in a forked process.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
        self._intake.close(for_good=for_good)

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
        priority: int = 0,
        deadline_s: float = 0.0,
        patience_s: float = PATIENCE_S,
        asked_step: int = 0,
        num_drawn: int = 0,
        again: Again | None = None,
        min_policy_version: int = -1,
    ) -> GroupId:
        """Ask for `num_samples` rollouts of `task`; return the group's id at once.

        Higher `priority` runs first. A group that has not ended in `deadline_s` (0: no limit) ends
        as `deadline`; one that a full router refuses for `patience_s`, as `overloaded`. Its
        sessions wait for weights of `min_policy_version` or newer. Requests are held back while the
        journal is over its byte budget. A later client's `history` has `asked_step` (train steps
        that the engines' weights have done), `num_drawn` (tasks drawn so far) and `again`. Raises
        Overloaded if too many groups are open, WireError if no router could read the task,
        ClientClosed after `close`.
        """
        self._check_ours()
        check_terms(Terms(env, num_samples, priority, deadline_s, patience_s))
        body = encode_ask(GroupAsk(task, sampling, seed, is_eval, min_policy_version))
        with self._lock:
            if self._is_closed:
                raise ClientClosed("this client was closed: ask before that, or open another")
            if self._num_open >= MAX_OPEN:
                raise Overloaded(f"{MAX_OPEN} groups are asked for here and not taken", 1.0)
            group_id = GroupId(self.run_id, self._next_seq)
            self._next_seq += 1
            self._num_open += 1
        self._intake.command(
            Asked(
                group_id=group_id,
                env=env,
                num_samples=num_samples,
                priority=priority,
                deadline_s=max(deadline_s, MOMENT_S) if deadline_s else 0.0,
                patience_s=patience_s,
                asked_step=asked_step,
                num_drawn=num_drawn,
                is_eval=is_eval,
                again=again,
                body=body,
            )
        )
        return group_id

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End an open group as Dropped `cancelled: {reason}`; does nothing if it has ended."""
        self._intake.command(Cancelled(group_id, printable(f"cancelled: {reason}")))

    def take(self, timeout_s: float) -> list[Arrival]:
        """Return what has ended since the last call, waiting up to `timeout_s` for the first.

        Many results of earlier runs are returned some at a time. Raises what ended the client's own
        thread, if anything did.
        """
        return [self.open(each) for each in self._take(timeout_s, MAX_FILED_BYTES)]

    def take_unopened(self) -> list[Unopened]:
        """Return all that has ended since the last call, for `open`; does not wait."""
        return self._take(0.0, math.inf)

    def open(self, arrival: Unopened) -> Arrival:
        """Decode a result, after reading it from the disk if it is there; never raises."""
        if isinstance(arrival, StoredResult):
            try:
                arrival = self._intake.load(arrival)
            except JournalError as error:
                return Dropped(arrival.group_id, f"infra_error: {error}")
        return arrival if isinstance(arrival, Dropped) else open_result(arrival)

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Mark results as not needed again, so that the journal may release them.

        If checkpoints are made, they are released once a checkpoint covers that. Until then, with a
        `reason`, a later client's `history` reports that they were dropped for it before `step`,
        and with `times` how often their task has been asked for again, if a later request repeats
        it.
        """
        if not reason:
            self._intake.command(Taken(tuple(group_ids)))
        for group_id in group_ids if reason else ():
            self._intake.command(GroupParted(group_id, reason, step, times))

    def note_step(
        self,
        step: int,
        group_ids: Sequence[GroupId],
        oldest_step: int = 0,
        again: TriesAgain | None = None,
    ) -> None:
        """Journal, before the step, that `step` trains these groups; JournalError if that fails.

        Tokens of weights before `oldest_step` do not train. With `again`, what the disk refuses is
        retried until it returns False.
        """
        self._note(StepTaken(step, tuple(group_ids), oldest_step), again)

    def note_published(
        self, policy_version: int, step: int, again: TriesAgain | None = None
    ) -> None:
        """Journal, before the publication, that the weights after `step` steps are published.

        `again` and errors as for `note_step`.
        """
        self._note(Published(policy_version, step), again)

    def note_saved(self, saved: StateSaved) -> None:
        """Release what a durable checkpoint covers from the journal. Returns at once."""
        self._intake.command(Cover(saved))

    @property
    def is_journal_full(self) -> bool:
        """Whether requests wait because the journal is over its byte budget: a checkpoint is
        due.
        """
        return self._client_journal.is_full

    def _take(self, timeout_s: float, max_filed_bytes: float) -> list[Unopened]:
        self._check_ours()
        arrivals = self._intake.take(timeout_s, max_filed_bytes)
        with self._lock:
            self._num_open -= sum(each.group_id.run_id == self.run_id for each in arrivals)
        for each in arrivals if self.reopened else ():
            self.reopened.pop(each.group_id, None)
        return arrivals

    def _check_ours(self) -> None:
        """Raise ClientClosed in a forked process: no thread serves the client there."""
        if os.getpid() != self._pid:
            raise ClientClosed(f"this client is that of process {self._pid}: open another")

    def _note(self, entry: StepEntry, again: TriesAgain | None) -> None:
        while True:
            written: Future[None] = Future()
            self._intake.command(Note(entry, written))
            try:
                written.result(NOTE_TIMEOUT_S)
            except JournalError:
                if again is None or not again():
                    raise
            else:
                return


class RedoNotes:
    """Journals how redone steps go, step by step, so that processes that die in one are counted."""

    def __init__(self, note: Callable[[StepEntry, TriesAgain | None], None]) -> None:
        self._note = note

    def begun(self, step: int, again: TriesAgain | None = None) -> None:
        """Journal that `step` is about to be redone; `again` and errors as
        RolloutClient.note_step.
        """
        self._note(StepBegun(step, os.getppid()), again)

    def ended(self, step: int, why: str = "", again: TriesAgain | None = None) -> None:
        """Journal that `step` was redone or, with `why`, that it ended the trainer; `again` as
        above.
        """
        self._note(StepEnded(step, why), again)


def fresh_run_id(known: Container[str]) -> str:
    """Return an id of no earlier run, so that no group id is used twice."""
    while (run_id := new_id("r")) in known:
        pass
    return run_id


def check_terms(terms: Terms) -> None:
    """Raise WireError if the router could not read these: it would drop them without an answer."""
    try:
        msgspec.msgpack.encode(msgspec.convert(msgspec.structs.asdict(terms), Terms))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise WireError(f"not an ask: {error}") from None
    if math.isnan(terms.deadline_s):
        raise WireError("not an ask: deadline_s is not a number")


def listen(bind: str, earlier: str, keys: Keys | None) -> Hub:
    """Listen on the port of an earlier client of this host, if that is free and `bind` leaves the
    port open; else at `bind`.
    """
    before = split_address(earlier.partition(SERVER_KEY)[0])[1]
    host, _, port = bind.rpartition(":")
    for _ in range(NUM_LISTENS if port == "0" and before else 0):
        try:
            return _sink_hub(f"{host}:{before}", keys)
        except AddressError:
            time.sleep(LISTEN_AGAIN_S)  # zmq releases a port of this process with a delay
    # Another process has the port: results that workers hold for it run again, for the new address.
    return _sink_hub(bind, keys)


def _sink_hub(bind: str, keys: Keys | None) -> Hub:
    access = Access(keys, SINK, is_open=not keys.folder) if keys else None
    return Hub(bind, keys, queue_messages=QUEUE_RESULTS, access=access)


def address_here(router: str) -> str:
    """Return this machine's address on the route to `router`; its own address if there is none."""
    host, port = split_address(router)
    if not host or not port.isdecimal():
        return LOOPBACK  # the Dialer refuses this address
    return address_towards(host) or own_address()
