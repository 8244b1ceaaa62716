"""The book: every open group, the clients that asked, and short notes of what ended.

Owns the groups' life cycle (drawn in groups.py), the queue, and the letters of one step of the
ledger; deadlines and notes are beside it. Invariants: a group is in exactly one place: waiting in
the queue, among the suspects or for a claim, or with a worker; an ended group leaves a note for a
few beats and then nothing. Driven by ledger.py, which sets `now_s` first, by crew.py and deals.py.
"""

from collections import Counter

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.deadlines import Deadlines
from rollmesh.serve.router.groups import TRANSITIONS, Client, FairQueue, Group
from rollmesh.serve.router.notes import FOR_GOOD, Notes
from rollmesh.serve.router.takeover import Takeover
from rollmesh.wire.frames import Buffer
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import AnyMessage, GroupFailed, GroupMoved, GroupState

CLIENT_LEFT = "client_left"
"""Begins the reason of what was cancelled since its client has gone."""


def moved(group: Group, reason: str = "") -> GroupMoved:
    """How `group` stands, and why."""
    group_id, attempt = group.group_id, group.attempt
    return GroupMoved(group_id, group.state, attempt, group.worker_id, group.excused, reason)


def state_after(answer: GroupMoved | GroupFailed) -> GroupState:
    """How a group ends of which this is said: whose client has gone is wanted by nobody."""
    if isinstance(answer, GroupMoved):
        return answer.state
    gone = answer.reason.startswith(CLIENT_LEFT)
    return GroupState.CANCELLED if gone else GroupState.FAILED


def waiting_for(env: str, book: "Book") -> list[Group]:
    """All that wait for a worker of `env`, wherever they do."""
    apart = [*book.held.values(), *book.suspects.values()]
    return [*book.queue.of_env(env), *(group for group in apart if group.env == env)]


class Book:
    """See the module; the attributes are for reading, the methods change them."""

    def __init__(self, note_s: float, now_s: float) -> None:
        self.now_s = now_s
        self.groups: dict[GroupId, Group] = {}
        self.clients: dict[str, Client] = {}
        self.queue = FairQueue()
        self.held: dict[GroupId, Group] = {}
        """Asked again after a restart; they wait for a worker's claim before they queue."""
        self.suspects: dict[GroupId, Group] = {}
        """They wait for a worker that runs no other suspect."""
        self.num_waiting_bytes = 0
        """Of the bodies of all that wait."""
        self.num_body_bytes = 0
        """Of all asks that are here."""
        self.of_client: dict[str, dict[GroupId, Group]] = {}
        self.num_in: Counter[GroupState] = Counter()
        """Groups by state; those that ended count since the start."""
        self.num: Counter[str] = Counter()
        """What happened since the start, by name."""
        self.notes = Notes(note_s)
        self.takeover = Takeover(note_s)
        self.deadlines = Deadlines(self.groups)
        self._sends: list[Send] = []

    def send(self, route: bytes, message: AnyMessage, body: Buffer = b"") -> None:
        """A letter of this step."""
        self._sends.append(Send(route, message, body))

    def take_sends(self) -> list[Send]:
        """The letters since the last call."""
        sends, self._sends = self._sends, []
        return sends

    def tell_client(self, group: Group, answer: GroupMoved | GroupFailed | None = None) -> None:
        """Say `answer`, or how `group` stands, to whoever asked for it."""
        if client := self.clients.get(group.client_id):
            self.send(client.route, answer or moved(group))

    def hear_client(self, client_id: str, route: bytes) -> bool:
        """The client lives, at `route`; True if it was not known."""
        client = self.clients.get(client_id)
        if client is None:
            self.clients[client_id] = Client(client_id, route, self.now_s)
            return True
        client.route, client.heard_s = route, self.now_s
        self.queue.away.discard(client_id)
        return False

    def open(self, group: Group) -> None:
        """A group begins here, in whatever state it is found."""
        self.groups[group.group_id] = group
        self.num_in[group.state] += 1
        self.num_body_bytes += len(group.body)
        self.set_client(group, group.client_id)

    def set_client(self, group: Group, client_id: str, body: Buffer | None = None) -> None:
        """Whose group it is, '' is nobody's, and what it asks for, where that is news."""
        if body is not None:
            self.num_body_bytes += len(body) - len(group.body)
            group.body = body
        self._leave_client(group)
        group.client_id = client_id
        if client_id:
            self.of_client.setdefault(client_id, {})[group.group_id] = group

    def enter(self, group: Group, state: GroupState) -> None:
        """Change a group's state, and what is counted by it."""
        assert state in TRANSITIONS[group.state], f"{group.state} -> {state}"
        self.num_in[group.state] -= 1
        self.num_in[state] += 1
        group.state = state

    @property
    def num_waiting(self) -> int:
        """Groups in the queue, among the suspects, or waiting for a claim."""
        return len(self.queue) + len(self.suspects) + len(self.held)

    def hold(self, group: Group) -> None:
        """A QUEUED group waits for a worker's claim."""
        self.held[group.group_id] = group
        self.num_waiting_bytes += len(group.body)

    def wait(self, group: Group, first: bool = False) -> None:
        """A QUEUED group waits for its turn from now on, and a suspect for a worker of its own."""
        self.unwait(group)
        group.queued_s = self.now_s
        self.num_waiting_bytes += len(group.body)
        if group.deaths:
            self.suspects[group.group_id] = group
        else:
            self.queue.push(group, first)

    def take(self, group: Group) -> None:
        """The head of the queue gets its turn."""
        client = self.clients.get(group.client_id)
        self.queue.take(group, client.weight if client else 1)
        self.num_waiting_bytes -= len(group.body)

    def unwait(self, group: Group) -> None:
        """It waits no longer, neither for its turn nor for a claim."""
        apart = self.suspects.pop(group.group_id, None) or self.held.pop(group.group_id, None)
        if apart or self.queue.remove(group):
            self.num_waiting_bytes -= len(group.body)

    def end(
        self,
        group: Group,
        answer: GroupMoved | GroupFailed,
        num_attempts: int = FOR_GOOD,
        *,
        is_told: bool = True,
    ) -> None:
        """The group, which no worker has any more, ends as `answer` says.

        An ask that knows of `num_attempts` may ask for one more. `is_told` is False where the end
        is none for its client.
        """
        assert not group.worker_id
        self.notes.add(answer, num_attempts, self.now_s, group.ticket)
        if is_told:
            self.tell_client(group, answer)
        self.drop(group, state_after(answer))

    def drop(self, group: Group, state: GroupState) -> None:
        """Forget the group without a word."""
        self.unwait(group)
        self.enter(group, state)
        self._leave_client(group)
        self.num_body_bytes -= len(group.body)
        group.body = b""  # an agenda may name it until its time has come
        del self.groups[group.group_id]

    def _leave_client(self, group: Group) -> None:
        if groups := self.of_client.get(group.client_id):
            groups.pop(group.group_id, None)
            if not groups:
                del self.of_client[group.client_id]
