"""Messages about GPUs that several pipelines share: requests, grants and releases.

    hooks -> scheduler         HooksWired RequestGpus NotifyReleaseGpus NotifyReleaseThenRequestGpus
                               TakeGpus WithdrawRequest ReportProgress ClearProgress ReportPreempt
    scheduler -> hooks         SchedulerHello TicketMoved
    coordinator -> scheduler   CoordinatorHello (each second as well) WorkersResized
    scheduler -> coordinator   SchedulerHello ResizeWorkers
    admission -> scheduler     RegisterPipeline AdmitPipeline CheckKill KillPipeline
                               UnregisterPipeline
    launch -> scheduler        ClaimPipeline
    node agent, cli -> scheduler   JoinNode NodeBeat DrainNode UndrainNode ReadScheduler
    scheduler -> any of these  SchedulerAnswered (its body: JSON if something was read)

- A request with a key may be repeated at any time, and is carried out once.
- A client that waits for a ticket repeats its request each second; one that is no longer repeated
  is forgotten after a while, so that a lost client leaves nothing behind.
- A message that changes a pipeline carries that pipeline's token, or the operator's.
"""

import enum
from typing import TypeVar

import msgspec

from rollmesh.wire.header import Message

GENERATION_CLUSTER = "actor_infer"
"""Name of a pipeline's only elastic cluster."""


class GpuPriority(enum.IntEnum):
    """Lower is first; all but GENERATION need a whole device set, and keep it."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6


class TicketState(enum.StrEnum):
    """QUEUED -> GRANTED -> RELEASED; QUEUED -> REFUSED | WITHDRAWN

    For a fixed cluster QUEUED -> OFFERED -> GRANTED: the GPUs are reserved for the client and are
    its own once the scheduler has received its TakeGpus; if that does not come in time, the client
    waits again. The ticket of a NotifyReleaseGpus is QUEUED until everything is released, and then
    RELEASED.
    """

    QUEUED = "queued"
    OFFERED = "offered"
    GRANTED = "granted"
    RELEASED = "released"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class PipelineSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A pipeline's settings on the fleet."""

    pipeline_id: str
    clusters: dict[str, tuple[int, ...]]
    """GPUs by cluster name (actor_train, critic, reference...), each needed as a whole."""
    generation: tuple[int, ...]
    """GPUs of its engines: worker r has generation[r * tp : (r + 1) * tp], inside one node."""
    tp: int = 1
    """GPUs of a worker."""
    weight: float = 1.0
    """Its share relative to other pipelines."""
    max_gpus: int = 0
    """Maximum generation GPUs at a time; 0: no limit."""
    min_gpus: int = 0
    """Generation GPUs guaranteed while it has demand, once fixed clusters allow."""
    is_preemptible: bool = True
    """Whether its generation yields to other pipelines; it always yields to its own clusters."""
    rollouts_per_worker: int = 0
    """Rollouts that keep a worker busy: fewer remaining need fewer workers; 0: unknown."""


class WorkerPhase(enum.StrEnum):
    """ABSENT (never seen yet) -> ASLEEP -> WAKING -> AWAKE -> SLEEPING -> ASLEEP; any -> LOST
    (unknown state) -> ASLEEP"""

    ABSENT = "absent"
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    SLEEPING = "sleeping"
    LOST = "lost"


class WorkerTruth(msgspec.Struct, frozen=True, array_like=True):
    """State of one engine, as its coordinator knows it."""

    rank: int
    phase: WorkerPhase
    epoch: int
    """Epoch of the newest resize received; an older one is refused."""
    kv_tokens: int = 0
    """Tokens that a sleep would lose now."""
    detail: str = ""
    """Why it is LOST, or has not carried out a command."""


class WorkerChange(msgspec.Struct, frozen=True, array_like=True):
    """Command to one engine."""

    rank: int
    wakes: bool
    epoch: int


# hooks


class HooksWired(Message, frozen=True, tag="hooks_wired"):
    """Its rollouts will report; repeated each second."""

    pipeline_id: str
    token: str = ""


class RequestGpus(Message, frozen=True, tag="request_gpus"):
    """For GENERATION: open the demand; granted with the present workers as soon as one is awake."""

    key: str
    pipeline_id: str
    cluster: str
    priority: int
    global_step: int = -1
    step_target_estimate: int = 0
    """Expected rollouts (not groups); 0 is unknown, and gets the floor."""
    token: str = ""


class NotifyReleaseGpus(Message, frozen=True, tag="notify_release_gpus"):
    """For the generation cluster: close the demand, and answer when its workers are asleep."""

    key: str
    pipeline_id: str
    cluster: str
    global_step: int = -1
    token: str = ""


class NotifyReleaseThenRequestGpus(Message, frozen=True, tag="notify_release_then_request_gpus"):
    """Both at once: no other request is planned in between."""

    key: str
    pipeline_id: str
    release_cluster: str
    cluster: str
    priority: int
    release_global_step: int = -1
    global_step: int = -1
    step_target_estimate: int = 0
    token: str = ""


class TakeGpus(Message, frozen=True, tag="take_gpus"):
    """The client has received the offer; answered by a TicketMoved."""

    key: str
    offer: int
    """Accept only this offer: the client of an earlier one may have died since."""
    token: str = ""


class WithdrawRequest(Message, frozen=True, tag="withdraw_request"):
    key: str
    token: str = ""


class ReportProgress(Message, frozen=True, tag="report_progress"):
    """Corrects the estimate of an open demand; never opens one."""

    pipeline_id: str
    stream: str
    """`train`, `eval`, or an adapter's name."""
    batch: int
    """Grows from one batch of the stream to the next, also over restarts of the reporter; older
    reports are ignored."""
    target: int
    """Rollouts."""
    completed: int
    token: str = ""


class ClearProgress(Message, frozen=True, tag="clear_progress"):
    """The stream has ended; the demand is closed when all have."""

    pipeline_id: str
    stream: str
    batch: int
    token: str = ""


class ReportPreempt(Message, frozen=True, tag="report_preempt"):
    """A rollout lost its engine and continues on another."""

    pipeline_id: str
    rank: int
    url: str
    token: str = ""


class TicketMoved(Message, frozen=True, tag="ticket_moved"):
    key: str
    state: TicketState
    gpus: tuple[int, ...] = ()
    reason: str = ""
    """Why it waits, and which pipeline holds the GPUs; or why it was refused."""
    offer: int = 0
    """Unique number of an OFFERED state."""


class SchedulerHello(Message, frozen=True, tag="scheduler_hello"):
    """Answer to each hello."""

    scheduler: str
    """Incarnation of the scheduler."""
    newest_s: float = 0.0
    """To a coordinator: start time, by its own clock, of the newest coordinator known: the one that
    is answered, or one that is no longer active, so the receiver is newer. 0 if the pipeline is
    unknown or another coordinator of it is active."""
    newest_batch: int = 0
    """To hooks: newest batch of all progress known of their pipeline."""
    error: str = ""
    """Why messages of the sender are refused: its token is missing or wrong."""


# coordinators


class CoordinatorHello(Message, frozen=True, tag="coordinator_hello"):
    pipeline_id: str
    workers: tuple[WorkerTruth, ...]
    started_s: float = 0.0
    """Distinguishes a process from an earlier one of its pipeline, whose messages are ignored: unix
    time, or later if the clock was set back since."""
    token: str = ""


class ResizeWorkers(Message, frozen=True, tag="resize_workers"):
    """Wake all or put all to sleep."""

    pipeline_id: str
    resize_id: int
    changes: tuple[WorkerChange, ...]
    deadline_s: float
    """Counted from its receipt."""
    started_s: float = 0.0
    """Start time of the addressed coordinator; a later one refuses it."""
    turn_s: float = float("inf")
    """Time after which the next resize no longer waits; slower engines continue by themselves."""


class WorkersResized(Message, frozen=True, tag="workers_resized"):
    """State of the named workers, whether resized or not."""

    pipeline_id: str
    resize_id: int
    workers: tuple[WorkerTruth, ...]
    error: str = ""
    token: str = ""


# admission


class RegisterPipeline(Message, frozen=True, tag="register_pipeline"):
    """Register a pipeline; repeated with the same spec it has no effect."""

    key: str
    spec: PipelineSpec
    token: str = ""
    """The operator's token."""
    token_hash: str = ""
    """SHA-256 of the pipeline's own token, in hex; replaces the previous one."""


class AdmitPipeline(Message, frozen=True, tag="admit_pipeline"):
    key: str
    pipeline_id: str
    token: str = ""


class CheckKill(Message, frozen=True, tag="check_kill"):
    """Ask whether the processes of a pipeline's run may be ended; nothing changes.

    Refused if the pipeline is unknown, or its name belongs to another run.
    """

    key: str
    pipeline_id: str
    run_id: str = ""
    """'': no run has the name."""
    token: str = ""


class KillPipeline(Message, frozen=True, tag="kill_pipeline"):
    """Its processes are dead: its GPUs are free, whatever its coordinator reported last."""

    key: str
    pipeline_id: str
    run_id: str = ""
    """Refused if another run has the name now; '': any run."""
    token: str = ""


class UnregisterPipeline(Message, frozen=True, tag="unregister_pipeline"):
    """Put its workers to sleep, and forget it once its trainer has released its GPUs."""

    key: str
    pipeline_id: str
    token: str = ""


class RunClaim(msgspec.Struct, frozen=True, array_like=True):
    """The run that holds a pipeline's name. The mark of its processes is not included."""

    run_id: str
    """Unique to the run."""
    host: str
    pid: int
    """Pid of its launch."""
    place: str = ""
    """Machine and namespace of that pid: elsewhere its state is unknown."""
    started_ticks: str = ""
    """When the launch started, in clock ticks since boot; another process with the same pid has
    another."""
    owns_engines: bool = True
    """Whether the engines are processes of the run, and die with it."""
    record: str = ""
    """Path on that host of the file with the mark, which only its owner can read."""


class ClaimPipeline(Message, frozen=True, tag="claim_pipeline"):
    """Assign a name, held by one run at a time, to `run`, or (None) to none.

    Refused if it no longer belongs to `after`: the sender has ensured that all processes of that
    run have ended and its GPUs are free.
    """

    key: str
    pipeline_id: str
    run: RunClaim | None
    after: str = ""
    """A run_id; '': no run had it."""
    token: str = ""


# nodes and readers


class JoinNode(Message, frozen=True, tag="join_node"):
    """A node that rejoins under its name gets its former GPU numbers."""

    key: str
    name: str
    num_gpus: int
    labels: tuple[str, ...] = ()
    beats: bool = True
    """Whether it will send a NodeBeat each second, and is considered dead without."""


class NodeBeat(Message, frozen=True, tag="node_beat"):
    name: str


class DrainNode(Message, frozen=True, tag="drain_node"):
    """Start nothing new there; sleeping workers stay asleep."""

    key: str
    name: str


class UndrainNode(Message, frozen=True, tag="undrain_node"):
    """Use the node again."""

    key: str
    name: str


class ReadScheduler(Message, frozen=True, tag="read_scheduler"):
    """The answer's body is the explanation of one pipeline, or ('') of all."""

    key: str
    pipeline_id: str = ""


class SchedulerAnswered(Message, frozen=True, tag="scheduler_answered"):
    key: str
    ok: bool
    error: str = ""


HookMessage = (
    HooksWired
    | RequestGpus
    | NotifyReleaseGpus
    | NotifyReleaseThenRequestGpus
    | TakeGpus
    | WithdrawRequest
    | ReportProgress
    | ClearProgress
    | ReportPreempt
    | TicketMoved
    | SchedulerHello
)
CoordinatorMessage = CoordinatorHello | ResizeWorkers | WorkersResized
AdmissionMessage = (
    RegisterPipeline | AdmitPipeline | CheckKill | KillPipeline | UnregisterPipeline | ClaimPipeline
)
NodeMessage = JoinNode | NodeBeat | DrainNode | UndrainNode | ReadScheduler | SchedulerAnswered

SchedulingMessage = HookMessage | CoordinatorMessage | AdmissionMessage | NodeMessage

_M = TypeVar("_M", bound=Message)


def signed(message: _M, token: str) -> _M:
    """Return the message with the token, if its type has one."""
    if not token or "token" not in message.__struct_fields__:
        return message
    return msgspec.structs.replace(message, token=token)
