"""All messages that cross a ZMQ socket, as tagged structs.

    client -> router   ClientHello ClientBeat ClientLeft AskGroup CancelGroup AttemptFailed
    router -> client   RouterHello GroupMoved GroupFailed AskRefused
    router -> worker   RouterHello RunGroup CancelRun DrainWorker
    worker -> router   WorkerHello WorkerBeat WorkerLeft GroupStarted GroupDelivered GroupReturned
                       GroupLost EnvFailed
    worker -> sink     GroupFinished (body GroupRecord, buffers int32 ids and float32 log-probs)
    sink -> worker     GroupAcked ResultRefused
    cli <-> router <- launch   AskDrain DrainAnswered, WorkerExited
    any <-> router   AskMesh MeshAnswered

- Facts are past tense, requests imperative. Engines: fleet.py; trainer ranks: ranks.py; GPUs of
  several pipelines: scheduling.py; batches of news: GroupNews (machine.py).
- Encoding is positional: fields are only appended, any other change raises PROTOCOL in frames.py;
  tests/golden freezes the bytes of each.
- Headers stay small: tasks and results are in the body, arrays in buffers.
- A GroupFailed's reason starts with attempts_exhausted, env_failed, bad_ask, overloaded,
  quarantined, deadline, client_left, cancelled or infra_error, then a colon.
"""

import enum

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.wire.fleet import (
    AskTable,
    EngineFaulted,
    EnginesListed,
    FleetAnswered,
    FleetAsk,
    OperatorAsk,
    PublisherLeft,
    TableMessage,
)
from rollmesh.wire.header import Message, Seconds
from rollmesh.wire.ranks import RankMessage
from rollmesh.wire.scheduling import SchedulingMessage
from rollmesh.wire.worker_report import WorkerReport

# parts of messages


class GroupState(enum.StrEnum):
    """QUEUED -> ASSIGNED -> RUNNING -> DONE | FAILED | CANCELLED; QUEUED if its worker dies."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupAsk(msgspec.Struct, frozen=True):
    """Body of AskGroup and RunGroup; the router forwards it unopened."""

    task: Task
    sampling: SamplingPolicy
    seed: int
    """Seeds the rollouts' sampling: a generation's seed derives from (seed, index, generation)."""
    is_eval: bool = False
    min_policy_version: int = -1
    """Minimum policy version at the start of its sessions; -1: any."""


class HeldGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that a worker claims after a router's restart."""

    group_id: GroupId
    attempt: int
    finished: bool
    """Finished, but not yet acknowledged by its sink."""


# clients and router


class ClientHello(Message, frozen=True, tag="client_hello"):
    client_id: str
    weight: int = 1
    """Its share of turns among the clients."""
    keep: bool = False
    """Whether its groups continue while it is gone."""


class ClientBeat(Message, frozen=True, tag="client_beat"):
    client_id: str
    num_open: int


class ClientLeft(Message, frozen=True, tag="client_left"):
    client_id: str


class AskGroup(Message, frozen=True, tag="ask_group"):
    group_id: GroupId
    client_id: str
    env: str
    num_samples: int
    sink: str
    """ZMQ address that receives the result."""
    attempts: int = 0
    """Attempts that have begun, as far as the client knows; more than 0 in a re-assertion."""
    priority: int = 0
    """Higher runs first."""
    deadline_s: Seconds = 0.0
    """Seconds until it must be done at the sink, counted from sending; 0 is no limit."""
    excused: int = 0
    """Excused attempts among `attempts`; see GroupMoved."""
    ticket: bytes = b""
    """Secret of the group, created by its client. A result without it is refused."""


class AttemptFailed(Message, frozen=True, tag="attempt_failed"):
    """The client refused the result of this attempt, which counts as failed."""

    group_id: GroupId
    attempt: int
    worker_id: str
    reason: str


class CancelGroup(Message, frozen=True, tag="cancel_group"):
    group_id: GroupId
    reason: str
    ticket: bytes = b""
    """The ticket of AskGroup. A cancel with another one has no effect."""


class RouterHello(Message, frozen=True, tag="router_hello"):
    """The envelope carries the router's incarnation."""

    beat_s: Seconds


class GroupMoved(Message, frozen=True, tag="group_moved"):
    group_id: GroupId
    state: GroupState
    attempt: int
    worker_id: str
    excused: int = 0
    """Attempts that do not count: handed back, or cut short by a worker that left in order."""
    reason: str = ""
    """Why this group, and maybe others of its client, has been waiting for long."""


class GroupFailed(Message, frozen=True, tag="group_failed"):
    """The group will not run (again); the client records the reason at its own sink."""

    group_id: GroupId
    reason: str


class AskRefused(Message, frozen=True, tag="ask_refused"):
    """The queue is full; the request remains with the client."""

    group_id: GroupId
    reason: str
    retry_after_s: Seconds


# router and workers


class RunGroup(Message, frozen=True, tag="run_group"):
    group_id: GroupId
    attempt: int
    num_samples: int
    sink: str
    deadline_s: Seconds = 0.0
    ticket: bytes = b""
    """The ticket of AskGroup; GroupFinished must carry it."""


class CancelRun(Message, frozen=True, tag="cancel_run"):
    group_id: GroupId
    reason: str


RELIEVED = "it is worn out"
"""Reason for draining a worn worker that will be restarted."""


class DrainWorker(Message, frozen=True, tag="drain_worker"):
    reason: str


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    worker_id: str
    env: str
    max_rollouts: int
    pid: int
    host: str
    holds: tuple[HeldGroup, ...] = ()
    started_s: Seconds = 0.0
    """Unix time; distinguishes a process from an earlier one of its name and pid; 0 is unknown."""
    loads_for_s: Seconds = 0.0
    """Maximum time for loading its environment, while it does not serve yet."""
    pid_space: str = ""
    """Namespace of `pid` (core/process.py); '' is unknown."""
    max_unacked_bytes: int = 0
    """Limit past which the worker accepts nothing; 0 is unknown."""


class WorkerBeat(WorkerReport, Message, frozen=True, array_like=True, tag="worker_beat", gc=False):
    """A worker's heartbeat."""


class WorkerLeft(Message, frozen=True, tag="worker_left"):
    worker_id: str
    reason: str
    pid: int = 0
    started_s: Seconds = 0.0


class GroupStarted(Message, frozen=True, tag="group_started"):
    group_id: GroupId
    attempt: int


class GroupDelivered(Message, frozen=True, tag="group_delivered"):
    """The sink acknowledged the result: the group is DONE."""

    group_id: GroupId
    attempt: int
    ticket: bytes = b""
    """The ticket of RunGroup. A report with another one has no effect."""


class GroupReturned(Message, frozen=True, tag="group_returned"):
    """The worker cannot run the group, and has not begun."""

    group_id: GroupId
    attempt: int
    reason: str


class GroupLost(Message, frozen=True, tag="group_lost"):
    """The worker dropped its result: the sink refused it, or did not acknowledge it in time."""

    group_id: GroupId
    attempt: int
    reason: str


class EnvFailed(Message, frozen=True, tag="env_failed"):
    worker_id: str
    env: str
    error: str
    pid: int = 0
    started_s: Seconds = 0.0


# workers and sinks


class GroupFinished(Message, frozen=True, tag="group_finished"):
    group_id: GroupId
    attempt: int
    worker_id: str
    complete: bool
    """No sibling was cancelled, and none ended in infra_error if worker.failed_sibling is
    `drop`."""
    ticket: bytes = b""
    """The ticket of RunGroup."""


class GroupAcked(Message, frozen=True, tag="group_acked"):
    group_id: GroupId
    attempt: int
    duplicate: bool


class ResultRefused(Message, frozen=True, tag="result_refused"):
    """The sink will never accept this result: the worker drops it."""

    group_id: GroupId
    attempt: int
    reason: str


# launch and the cli


class WorkerExited(Message, frozen=True, tag="worker_exited"):
    worker_id: str
    pid: int
    cause: str
    """`killed by signal 9`, `exit code 1`, `out of memory`."""
    started_s: Seconds = 0.0


class AskDrain(Message, frozen=True, tag="ask_drain"):
    """Finish running groups, accept no new ones, and leave."""

    ask_id: int
    worker_id: str
    reason: str


class DrainAnswered(Message, frozen=True, tag="drain_answered"):
    ask_id: int
    ok: bool
    error: str


class AskAddresses(Message, frozen=True, tag="ask_addresses"):
    """Request the addresses of the router, from a program that knows one of them."""

    ask_id: int


class AddressesAnswered(Message, frozen=True, tag="addresses_answered"):
    ask_id: int
    address: str
    """Bound router address, tcp://."""
    status_url: str
    """Bound status address, http://."""


class AskMesh(Message, frozen=True, tag="ask_mesh"):
    """Request what a machine needs for its checks (`rollmesh doctor`); every member may."""

    ask_id: int


class MeshAnswered(Message, frozen=True, tag="mesh_answered"):
    ask_id: int
    engines: tuple[str, ...]
    """URLs of the engines."""
    run_folder: str
    """Absolute path on the router's machine."""
    folder_mark: str
    """Content of the file by which a machine that sees the folder recognises it; '' without a
    folder."""
    unix_s: Seconds
    """Time of the router's clock."""


class GroupNews(Message, frozen=True, tag="group_news"):
    """Several news messages at once, slightly delayed; see machine.py."""

    news: tuple[GroupMoved | GroupStarted | GroupDelivered, ...]


AnyMessage = (
    ClientHello
    | ClientBeat
    | ClientLeft
    | AskGroup
    | CancelGroup
    | RouterHello
    | GroupMoved
    | GroupFailed
    | AskRefused
    | RunGroup
    | CancelRun
    | TableMessage
    | DrainWorker
    | WorkerHello
    | WorkerBeat
    | WorkerLeft
    | GroupStarted
    | GroupDelivered
    | GroupReturned
    | GroupLost
    | EnvFailed
    | EngineFaulted
    | PublisherLeft
    | AskTable
    | GroupFinished
    | GroupAcked
    | ResultRefused
    | AttemptFailed
    | FleetAsk
    | FleetAnswered
    | OperatorAsk
    | EnginesListed
    | WorkerExited
    | AskDrain
    | DrainAnswered
    | AskAddresses
    | AddressesAnswered
    | GroupNews
    | AskMesh
    | MeshAnswered
    | RankMessage
    | SchedulingMessage
)
