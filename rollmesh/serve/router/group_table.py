"""The table of open groups and their clients, with deadlines, timers and tombstones.

- A group is in exactly one place: in the queue, among the suspects, held for a claim, or with a
  worker. A group that ended leaves a tombstone for a few beats, one that failed for longer, at most
  MAX_NOTES of them.
- A deadline never grows, so a late duplicate of an ask does not extend it.
- A timer that is not due costs nothing, a due one the logarithm of their number.
- Work that was running before this router started is counted by its outcome and logged in one line:
  KEPT (claimed and asked for), UNASKED (ended), AGAIN (runs again), EXHAUSTED (ended).
"""

import enum
import heapq
import hmac
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import TRANSITIONS, Group, GroupClient, GroupQueue
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import AnyMessage, AskGroup, GroupFailed, GroupMoved, GroupState

SPARE_ENTRIES = 1024
"""Limit on stale entries: this many, plus twice the number of valid ones."""


class TimerHeap:
    """Timers of groups; a group's own field has its time."""

    def __init__(self, due_s: Callable[[Group], float]) -> None:
        """`due_s` returns when a group is due, infinity if never."""
        self._due_s = due_s
        self._times: list[float] = []
        """A heap with the keys of `_at`."""
        self._at: dict[float, list[Group]] = {}
        self._num = 0
        self._most = SPARE_ENTRIES

    def __len__(self) -> int:
        return self._num

    def put(self, group: Group) -> None:
        """Set another time for a group."""
        if self._num >= self._most:
            self._tidy()
        self._add(group)

    def take_due(self, now_s: float) -> Iterator[Group]:
        """Yield groups that are due; the caller sets their next time."""
        while self._times and self._times[0] <= now_s:
            due_s = heapq.heappop(self._times)
            groups = self._at.pop(due_s)
            self._num -= len(groups)
            for group in groups:
                if self._due_s(group) == due_s:
                    yield group

    def _add(self, group: Group) -> None:
        due_s = self._due_s(group)
        together = self._at.get(due_s)
        if together is None:
            self._at[due_s] = [group]
            heapq.heappush(self._times, due_s)
        else:
            together.append(group)
        self._num += 1

    def _tidy(self) -> None:
        found = [(at_s, each) for at_s, groups in self._at.items() for each in groups]
        self._times, self._at, self._num = [], {}, 0
        for at_s, group in found:
            if self._due_s(group) == at_s:
                self._add(group)
        self._most = SPARE_ENTRIES + 3 * self._num


class Deadlines:
    """Deadlines of `groups`, a view of the open ones."""

    def __init__(self, groups: Mapping[GroupId, Group]) -> None:
        self._groups = groups
        self._timers = TimerHeap(self._ends_s)

    def __len__(self) -> int:
        """Number of stored times, those of ended groups included."""
        return len(self._timers)

    def set(self, group: Group, deadline_s: float, now_s: float) -> None:
        """Set a deadline `deadline_s` from now, and never later than one set before; 0 sets
        none.
        """
        ends_s = now_s + deadline_s
        # Also false if it is not a number.
        if deadline_s <= 0 or not ends_s < group.ends_s:
            return
        group.ends_s = ends_s
        self._timers.put(group)

    def take_overdue(self, now_s: float) -> list[Group]:
        """Return the open groups whose deadline has passed since the last call."""
        return list(self._timers.take_due(now_s))

    def _ends_s(self, group: Group) -> float:
        return group.ends_s if self._groups.get(group.group_id) is group else math.inf


def left_s(group: Group, now_s: float) -> float:
    """Return the seconds that are left, or 0 if there is no limit."""
    return 0.0 if group.ends_s == math.inf else max(group.ends_s - now_s, 0.001)


MAX_NOTES = 8192
"""Limit on tombstones of ended groups."""
FAILURE_NOTES = 20
"""Factor by which failures are remembered longer: a request whose answer was lost is repeated."""
FOR_GOOD = sys.maxsize
"""More attempts than any request has: the group has ended for good."""


class Tombstone(msgspec.Struct, frozen=True):
    """How a group ended; a request that knows fewer attempts than this is a late duplicate."""

    answer: GroupMoved | GroupFailed
    num_attempts: int
    until_s: float
    ticket: bytes = b""
    """Ticket of the group or of its cancel; b"" if it was not known."""


class Tombstones:
    """Tombstones of groups that ended, for messages that still arrive for them."""

    def __init__(self, note_s: float) -> None:
        self._note_s = note_s
        self._tombstones: OrderedDict[GroupId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tombstones)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._tombstones

    def add(
        self,
        answer: GroupMoved | GroupFailed,
        num_attempts: int,
        now_s: float,
        ticket: bytes = b"",
    ) -> None:
        """Remember for a while that the group ended."""
        beats = FAILURE_NOTES if isinstance(answer, GroupFailed) else 1
        until_s = now_s + beats * self._note_s
        self._tombstones[answer.group_id] = Tombstone(answer, num_attempts, until_s, ticket)
        self._tombstones.move_to_end(answer.group_id)
        if len(self._tombstones) > MAX_NOTES:
            self._tombstones.popitem(last=False)

    def late_answer(self, ask: AskGroup) -> GroupMoved | GroupFailed | None:
        """Return the answer to a request that arrives after its group's end; None if it is a new
        one.
        """
        note = self._tombstones.get(ask.group_id)
        if note is None or ask.attempts >= note.num_attempts:
            return None
        return note.answer if self.is_theirs(ask.group_id, ask.ticket) else None

    def is_theirs(self, group_id: GroupId, ticket: bytes) -> bool:
        """Return whether the tombstone of the group, if there is one, has this ticket or none."""
        note = self._tombstones.get(group_id)
        return not note or not note.ticket or hmac.compare_digest(note.ticket, ticket)

    def reason(self, group_id: GroupId) -> str:
        """Return why the group failed; '' if it did not, as far as is remembered."""
        note = self._tombstones.get(group_id)
        return note.answer.reason if note and isinstance(note.answer, GroupFailed) else ""

    def tear(self, now_s: float) -> None:
        """Forget tombstones that have expired, in order of their age."""
        while self._tombstones and next(iter(self._tombstones.values())).until_s <= now_s:
            self._tombstones.popitem(last=False)


class TakeoverOutcome(enum.StrEnum):
    """Outcome of a group that was running before this router started."""

    KEPT = "kept"
    AGAIN = "run_again"
    UNASKED = "dropped_unasked"
    EXHAUSTED = "dropped_exhausted"


class Takeover:
    """A line is due `wait_s` seconds after the last group was found."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._outcomes: dict[GroupId, TakeoverOutcome] = {}
        self._found_s = 0.0

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._outcomes

    def note(self, group_id: GroupId, outcome: TakeoverOutcome, now_s: float) -> None:
        """Record the outcome of a group of an earlier router."""
        self._outcomes[group_id] = outcome
        self._found_s = now_s

    def take_counts(self, now_s: float) -> dict[str, int] | None:
        """Return groups by outcome when a line is due; each is returned once."""
        if not self._outcomes or now_s < self._found_s + self._wait_s:
            return None
        num = Counter(self._outcomes.values())
        self._outcomes.clear()
        return {f"num_{outcome}": num[outcome] for outcome in TakeoverOutcome}


CLIENT_LEFT = "client_left"
"""Prefix of the reason of groups that were cancelled because their client left."""


def moved(group: Group, reason: str = "") -> GroupMoved:
    """State of `group` with its reason."""
    group_id, attempt = group.group_id, group.attempt
    return GroupMoved(group_id, group.state, attempt, group.worker_id, group.excused, reason)


def state_after(answer: GroupMoved | GroupFailed) -> GroupState:
    """Return how a group with this reason ends: a group whose client left is cancelled."""
    if isinstance(answer, GroupMoved):
        return answer.state
    gone = answer.reason.startswith(CLIENT_LEFT)
    return GroupState.CANCELLED if gone else GroupState.FAILED


def waiting_for(env: str, table: "GroupTable") -> list[Group]:
    """Return all groups that wait for a worker of `env`."""
    apart = [*table.held.values(), *table.suspects.values()]
    return [*table.queue.of_env(env), *(group for group in apart if group.env == env)]


class GroupTable:
    """Open groups and clients; attributes are read, methods change them."""

    def __init__(self, note_s: float, now_s: float) -> None:
        self.now_s = now_s
        self.groups: dict[GroupId, Group] = {}
        self.clients: dict[str, GroupClient] = {}
        self.queue = GroupQueue()
        self.held: dict[GroupId, Group] = {}
        """Groups requested again after a restart; they wait for a worker's claim before they
        queue.
        """
        self.suspects: dict[GroupId, Group] = {}
        """Suspects that wait for a worker without another suspect."""
        self.num_waiting_bytes = 0
        """Bytes of the bodies of all groups that wait."""
        self.num_body_bytes = 0
        """Bytes of all requests."""
        self.of_client: dict[str, dict[GroupId, Group]] = {}
        self.num_in: Counter[GroupState] = Counter()
        """Number of groups by state; ended ones since the start."""
        self.num: Counter[str] = Counter()
        """Counters of events since the start, by name."""
        self.tombstones = Tombstones(note_s)
        self.takeover = Takeover(note_s)
        self.deadlines = Deadlines(self.groups)
        self._sends: list[Send] = []

    def send(self, route: bytes, message: AnyMessage, body: Buffer = b"") -> None:
        """Add a message of this step."""
        self._sends.append(Send(route, message, body))

    def take_sends(self) -> list[Send]:
        """Return the messages since the last call."""
        sends, self._sends = self._sends, []
        return sends

    def notify_client(self, group: Group, answer: GroupMoved | GroupFailed | None = None) -> None:
        """Send `answer`, or the state of `group`, to its client."""
        if client := self.clients.get(group.client_id):
            self.send(client.route, answer or moved(group))

    def client_seen(self, client_id: str, route: bytes) -> bool:
        """The client is alive, at `route`; return whether it was new."""
        client = self.clients.get(client_id)
        if client is None:
            self.clients[client_id] = GroupClient(client_id, route, self.now_s)
            return True
        client.route, client.last_message_s = route, self.now_s
        self.queue.away.discard(client_id)
        return False

    def open(self, group: Group) -> None:
        """Add a group in the state in which it is found."""
        self.groups[group.group_id] = group
        self.num_in[group.state] += 1
        self.num_body_bytes += len(group.body)
        self.set_client(group, group.client_id)

    def set_client(self, group: Group, client_id: str, body: Buffer | None = None) -> None:
        """Set the group's client ('' for none) and what it asks for, if that is known now."""
        if body is not None:
            self.num_body_bytes += len(body) - len(group.body)
            group.body = body
        self._leave_client(group)
        group.client_id = client_id
        if client_id:
            self.of_client.setdefault(client_id, {})[group.group_id] = group

    def enter(self, group: Group, state: GroupState) -> None:
        """Change a group's state and the counters."""
        assert state in TRANSITIONS[group.state], f"{group.state} -> {state}"
        self.num_in[group.state] -= 1
        self.num_in[state] += 1
        group.state = state

    @property
    def num_waiting(self) -> int:
        """Number of groups in the queue, among the suspects, or waiting for a claim."""
        return len(self.queue) + len(self.suspects) + len(self.held)

    def hold(self, group: Group) -> None:
        """Hold a QUEUED group for a worker's claim."""
        self.held[group.group_id] = group
        self.num_waiting_bytes += len(group.body)

    def wait(self, group: Group, first: bool = False) -> None:
        """Queue a QUEUED group, or hold a suspect for a worker of its own."""
        self.unwait(group)
        group.queued_s = self.now_s
        self.num_waiting_bytes += len(group.body)
        if group.deaths:
            self.suspects[group.group_id] = group
        else:
            self.queue.push(group, first)

    def take(self, group: Group) -> None:
        """Take the head of the queue."""
        client = self.clients.get(group.client_id)
        self.queue.take(group, client.weight if client else 1)
        self.num_waiting_bytes -= len(group.body)

    def unwait(self, group: Group) -> None:
        """Remove the group from the queue, or from those that wait for a claim."""
        apart = self.suspects.pop(group.group_id, None) or self.held.pop(group.group_id, None)
        if apart or self.queue.remove(group):
            self.num_waiting_bytes -= len(group.body)

    def end(
        self,
        group: Group,
        answer: GroupMoved | GroupFailed,
        num_attempts: int = FOR_GOOD,
        *,
        informs_client: bool = True,
    ) -> None:
        """End the group, which no worker has any more, with `answer`.

        A request that knows of `num_attempts` may ask for one more. `informs_client` is False if
        the client is not to be informed.
        """
        assert not group.worker_id
        self.tombstones.add(answer, num_attempts, self.now_s, group.ticket)
        if informs_client:
            self.notify_client(group, answer)
        self.drop(group, state_after(answer))

    def drop(self, group: Group, state: GroupState) -> None:
        """Forget the group without a message."""
        self.unwait(group)
        self.enter(group, state)
        self._leave_client(group)
        self.num_body_bytes -= len(group.body)
        group.body = b""  # a timer may name it until its time has come
        del self.groups[group.group_id]

    def _leave_client(self, group: Group) -> None:
        if groups := self.of_client.get(group.client_id):
            groups.pop(group.group_id, None)
            if not groups:
                del self.of_client[group.client_id]
