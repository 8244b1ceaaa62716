"""What is said of GPUs: who asks the scheduler for them, and who gives them up.

    hooks -> scheduler         HooksWired RequestGpus NotifyReleaseGpus NotifyReleaseThenRequestGpus
                               TakeGpus WithdrawRequest ReportProgress ClearProgress ReportPreempt
    scheduler -> hooks         SchedulerHello TicketMoved
    coordinator -> scheduler   CoordinatorHello (each second as well) WorkersResized
    scheduler -> coordinator   SchedulerHello ResizeWorkers
    admission -> scheduler     RegisterPipeline AdmitPipeline CheckKill KillPipeline
                               UnregisterPipeline
    launch -> scheduler        ClaimPipeline
    node agent, cli -> scheduler   JoinNode NodeBeat DrainNode UndrainNode ReadScheduler
    scheduler -> any of these  SchedulerAnswered (its body: JSON where something was read)

- An ask with a key may be sent again at any time, and is carried out once.
- A client that waits for a ticket sends its ask again each second; an ask that is no longer sent is
  forgotten after a while, so that a lost client leaves nothing behind.
- A message that changes a pipeline carries the token of that pipeline, or the operator's.
"""

import enum
from typing import TypeVar

import msgspec

from rollmesh.wire.header import Message

GENERATION_CLUSTER = "actor_infer"
"""The name of the one cluster of a pipeline that is elastic."""


class GpuPriority(enum.IntEnum):
    """Lower is first; all but GENERATION want all of a device set, and keep it."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6


class TicketState(enum.StrEnum):
    """QUEUED -> GRANTED -> RELEASED; QUEUED -> REFUSED | WITHDRAWN

    Of a fixed cluster QUEUED -> OFFERED -> GRANTED: the GPUs are kept for who asked, who has them
    once the scheduler has heard that he takes them; not taken in time, he waits again. The ticket
    of a NotifyReleaseGpus is QUEUED until all is given up, and then RELEASED."""

    QUEUED = "queued"
    OFFERED = "offered"
    GRANTED = "granted"
    RELEASED = "released"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class PipelineSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A pipeline's place on the fleet."""

    pipeline_id: str
    clusters: dict[str, tuple[int, ...]]
    """By name (actor_train, critic, reference...), the GPUs that it needs all of."""
    generation: tuple[int, ...]
    """GPUs of its engines: worker r has generation[r * tp : (r + 1) * tp], inside one node."""
    tp: int = 1
    """GPUs of a worker."""
    weight: float = 1.0
    """Its share against that of the others."""
    max_gpus: int = 0
    """Of generation, at most so many at a time; 0: no limit."""
    min_gpus: int = 0
    """Of generation, what it has for certain while it has demand, once fixed clusters allow."""
    is_preemptible: bool = True
    """Whether its generation gives way to other pipelines; to its own clusters it always does."""
    rollouts_per_worker: int = 0
    """So many rollouts keep a worker busy: fewer left need fewer workers; 0: unknown."""


class WorkerPhase(enum.StrEnum):
    """ABSENT (never seen yet) -> ASLEEP -> WAKING -> AWAKE -> SLEEPING -> ASLEEP;
    any -> LOST (nobody knows) -> ASLEEP"""

    ABSENT = "absent"
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    SLEEPING = "sleeping"
    LOST = "lost"


class WorkerTruth(msgspec.Struct, frozen=True, array_like=True):
    """What a coordinator knows of one of its engines."""

    rank: int
    phase: WorkerPhase
    epoch: int
    """Of the newest resize that it was told of; an older one is refused."""
    kv_tokens: int = 0
    """What a sleep would lose now."""
    detail: str = ""
    """Why it is LOST, or has not done what it was told to."""


class WorkerChange(msgspec.Struct, frozen=True, array_like=True):
    """To one engine."""

    rank: int
    wakes: bool
    epoch: int


# hooks


class HooksWired(Message, frozen=True, tag="hooks_wired"):
    """Its rollouts will report; said again each second."""

    pipeline_id: str
    token: str = ""


class RequestGpus(Message, frozen=True, tag="request_gpus"):
    """For GENERATION: open the demand; granted as soon as a worker is awake, with what is held."""

    key: str
    pipeline_id: str
    cluster: str
    priority: int
    global_step: int = -1
    step_target_estimate: int = 0
    """Rollouts (not groups) that are to come; 0 is unknown, and gets the floor."""
    token: str = ""


class NotifyReleaseGpus(Message, frozen=True, tag="notify_release_gpus"):
    """Of the generation cluster: close the demand, and answer when its workers are asleep."""

    key: str
    pipeline_id: str
    cluster: str
    global_step: int = -1
    token: str = ""


class NotifyReleaseThenRequestGpus(Message, frozen=True, tag="notify_release_then_request_gpus"):
    """Both at once: nobody else is planned for in between."""

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
    """Who asked has heard of the offer, and is there; answered by a TicketMoved."""

    key: str
    offer: int
    """Another is not taken by this: who was offered GPUs before may have died since."""
    token: str = ""


class WithdrawRequest(Message, frozen=True, tag="withdraw_request"):
    key: str
    token: str = ""


class ReportProgress(Message, frozen=True, tag="report_progress"):
    """Corrects the estimate of an open demand, and never opens one."""

    pipeline_id: str
    stream: str
    """`train`, `eval`, or an adapter's name."""
    batch: int
    """Grows from one batch of the stream to the next, also over the lives of who reports; older
    news is ignored."""
    target: int
    """Rollouts."""
    completed: int
    token: str = ""


class ClearProgress(Message, frozen=True, tag="clear_progress"):
    """The stream is retired; the demand is closed when all are."""

    pipeline_id: str
    stream: str
    batch: int
    token: str = ""


class ReportPreempt(Message, frozen=True, tag="report_preempt"):
    """A rollout has lost its engine and goes on elsewhere."""

    pipeline_id: str
    rank: int
    url: str
    token: str = ""


class TicketMoved(Message, frozen=True, tag="ticket_moved"):
    key: str
    state: TicketState
    gpus: tuple[int, ...] = ()
    reason: str = ""
    """Why it waits, and who holds what it waits for; or why it was refused."""
    offer: int = 0
    """Of OFFERED: its number, no two are equal."""


class SchedulerHello(Message, frozen=True, tag="scheduler_hello"):
    """Answers every hello."""

    scheduler: str
    """Its incarnation."""
    newest_s: float = 0.0
    """To a coordinator: when the newest one known began, by its clock, which is the one that is
    answered or one that is not heard any more; so who hears it is the newer one. 0 where the
    pipeline is not known, or another coordinator of it lives."""
    newest_batch: int = 0
    """To hooks: of all progress known of their pipeline."""
    error: str = ""
    """Why nothing is taken from the sender: its token is missing or wrong."""


# coordinators


class CoordinatorHello(Message, frozen=True, tag="coordinator_hello"):
    pipeline_id: str
    workers: tuple[WorkerTruth, ...]
    started_s: float = 0.0
    """Tells a process from an earlier one of its pipeline, whose news is ignored: unix time, or
    later than that where the clock has gone back since."""
    token: str = ""


class ResizeWorkers(Message, frozen=True, tag="resize_workers"):
    """All wake or all sleep."""

    pipeline_id: str
    resize_id: int
    changes: tuple[WorkerChange, ...]
    deadline_s: float
    """From when it is heard."""
    started_s: float = 0.0
    """Of the coordinator that it was told to: a later one refuses what was meant for it."""
    turn_s: float = float("inf")
    """The next one waits for it no longer; engines that take more go on by themselves."""


class WorkersResized(Message, frozen=True, tag="workers_resized"):
    """Done or not: the workers that it named, as they are now."""

    pipeline_id: str
    resize_id: int
    workers: tuple[WorkerTruth, ...]
    error: str = ""
    token: str = ""


# admission


class RegisterPipeline(Message, frozen=True, tag="register_pipeline"):
    """Said again with the same spec it changes nothing."""

    key: str
    spec: PipelineSpec
    token: str = ""
    """The operator's."""
    token_hash: str = ""
    """SHA-256 of the pipeline's own token, in hex; replaces the one before."""


class AdmitPipeline(Message, frozen=True, tag="admit_pipeline"):
    key: str
    pipeline_id: str
    token: str = ""


class CheckKill(Message, frozen=True, tag="check_kill"):
    """Ask whether the processes of a pipeline's run may be ended; nothing changes.

    Refused where the pipeline is unknown, or its name is not that run's.
    """

    key: str
    pipeline_id: str
    run_id: str = ""
    """'': no run has it."""
    token: str = ""


class KillPipeline(Message, frozen=True, tag="kill_pipeline"):
    """Its processes are dead: its GPUs are free, whatever its coordinator reported last."""

    key: str
    pipeline_id: str
    run_id: str = ""
    """Refused where another run has the name by now; '': whichever has it."""
    token: str = ""


class UnregisterPipeline(Message, frozen=True, tag="unregister_pipeline"):
    """Put its workers to sleep, and forget it once its trainer has given up what it holds."""

    key: str
    pipeline_id: str
    token: str = ""


class RunClaim(msgspec.Struct, frozen=True, array_like=True):
    """The run that has a pipeline's name. The mark that its processes carry is not in it."""

    run_id: str
    """No other run's."""
    host: str
    pid: int
    """Of its launch."""
    place: str = ""
    """Where and whose that pid is: from another place nobody can tell whether it lives."""
    life: str = ""
    """Tells its launch from another process that got the same pid."""
    owns_engines: bool = True
    """They are processes of the run, and die with it."""
    record: str = ""
    """Path on that host of the file with the mark, which its owner alone can read."""


class ClaimPipeline(Message, frozen=True, tag="claim_pipeline"):
    """A name is one run's at a time: it is `run`'s from now on, or (None) nobody's.

    Refused where it is not that of `after` any more: who says this has seen to it that no process
    of that one is left, and what it had is free."""

    key: str
    pipeline_id: str
    run: RunClaim | None
    after: str = ""
    """A run_id; '': no run had it."""
    token: str = ""


# nodes, and those who look


class JoinNode(Message, frozen=True, tag="join_node"):
    """A node of that name gets the GPU numbers again that it had."""

    key: str
    name: str
    num_gpus: int
    labels: tuple[str, ...] = ()
    beats: bool = True
    """It will say NodeBeat each second, and is dead when it does not."""


class NodeBeat(Message, frozen=True, tag="node_beat"):
    name: str


class DrainNode(Message, frozen=True, tag="drain_node"):
    """Nothing new starts there; what sleeps stays asleep."""

    key: str
    name: str


class UndrainNode(Message, frozen=True, tag="undrain_node"):
    """It is used again."""

    key: str
    name: str


class ReadScheduler(Message, frozen=True, tag="read_scheduler"):
    """The answer's body is what service/explain.py says, of one pipeline or ('') of all."""

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
    """The message with the token, if it is of a kind that carries one."""
    if not token or "token" not in message.__struct_fields__:
        return message
    return msgspec.structs.replace(message, token=token)
