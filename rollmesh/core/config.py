"""Every setting of rollmesh: frozen structs, read from TOML, overridden by `--set`.

- Unknown keys are refused with their path, values are checked here once, and a loaded config never
  changes. Each room gets only its own section.
- A run writes its settings to config.json in its folder; its processes read that file.
- Secrets come from the environment or 0600 files; literal secrets are refused
  (core/config_parsing.py).
- tests/house/config_keys.txt lists the keys; `rollmesh init` shows the basic ones, `init --all`
  every one.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollmesh.core.addresses import why_not_dialable
from rollmesh.core.config_parsing import (
    apply_override,
    check_no_literals,
    explain,
    merge,
    read_file,
)
from rollmesh.core.config_section import (
    NonNegative,
    NonNegativeNumber,
    NonNegativeSeconds,
    Positive,
    PositiveSeconds,
    Section,
)
from rollmesh.core.engine_config import EngineConfig as EngineConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.files import FileMode
from rollmesh.core.network_config import InterceptionConfig as InterceptionConfig
from rollmesh.core.network_config import NetworkConfig
from rollmesh.core.types import (
    EVAL_SAMPLING,
    Branch,
    FieldPolicy,
    SamplingPolicy,
    SamplingRule,
)

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
LossWeight = Literal["token", "rollout"]
ProximalRule = Literal["recompute", "loglinear", "recorded"]
PublishMode = Literal["disk", "tensor", "distributed"]
StalePolicy = Literal["wait", "mask", "drop", "requeue"]
StalenessFormula = Literal["under_way", "known"]
IsolationMode = Literal["auto", "bwrap", "uid", "none"]
FailedSibling = Literal["drop", "score_rest"]
LEAST_HANG_S = 10.0
"""Smallest launch.hang_timeout_s; heartbeats are 2 s apart."""


class RunConfig(Section, frozen=True):
    """The run's name, and where its files are written."""

    name: str = "mesh"
    """The run's folder is `folder/name`; an older one of that name is moved aside."""
    folder: str = "runs"
    """The folder of run folders (default: runs)."""
    mode: FileMode = "private"
    """Permissions of what the run writes: `private` (default) for its user alone, folders 0700 and
    files 0600; `group` lets the user's group read, 0750 and 0640."""
    seed: int = 0
    """Seeds tasks, weights of the demo and sampling."""


class ModelConfig(Section, frozen=True):
    """The policy: a folder in Hugging Face layout."""

    path: str = ""
    """Folder with config.json, tokenizer.json and *.safetensors, or the id of a downloaded model
    of the Hugging Face hub, such as "Qwen/Qwen3-0.6B"."""
    renderer: str = "auto"
    """How chats become tokens: `auto` (by the model's type), a family name that the library
    renderers knows, or `template` (the folder's own chat template)."""
    max_context_tokens: Positive = 4096
    """Prompt and answer together; longer calls are refused as the dialect says."""


class RouterConfig(Section, frozen=True):
    """The process that assigns groups to workers and tracks which peers are alive."""

    bind: str = "tcp://127.0.0.1:0"
    """ZMQ address for clients and workers; port 0 picks a free one."""
    advertise: str = ""
    """tcp://HOST:PORT by which others reach `bind` where NAT or a proxy changes the port too
    (default: `bind` with network.advertise)."""
    http_bind: str = "127.0.0.1:0"
    """host:port of /status, /healthz and /metrics."""
    max_queued_groups: Positive = 10_000
    """Groups in the queue; further requests are refused as Overloaded (default: 10000)."""
    beat_s: PositiveSeconds = 0.5
    """Interval of the heartbeats of workers and clients, in seconds (default: 0.5)."""
    missed_beats: Positive = 6
    """Missed heartbeats after which a worker or client is considered lost (default: 6)."""
    max_lag_s: PositiveSeconds = 60.0
    """A worker whose event loop is blocked for longer, in seconds, is considered lost, although it
    sends heartbeats (default: 60)."""
    max_attempts: Positive = 3
    """Attempts of a group whose workers die (default: 3)."""
    client_grace_s: PositiveSeconds = 30.0
    """Seconds after which the groups of a lost client are cancelled (default: 30)."""
    kept_client_s: PositiveSeconds = 3600.0
    """Seconds for which the groups of a lost client that asked to keep them, such as a trainer that
    restarts, are kept; results that no client fetches would fill the workers (default: 3600)."""
    load_grace_s: NonNegativeSeconds = 30.0
    """Seconds, after worker.load_timeout_s, in which a worker that loads its environment must serve
    or report why it cannot (default: 30)."""
    successor_wait_s: NonNegativeSeconds = 60.0
    """Seconds for which the last worker of an environment waits for the successor of a recycled one
    before it is recycled too (default: 60)."""
    suspect_wait_beats: NonNegative = 60
    """Heartbeat intervals for which a group whose worker died waits for a worker without another
    such group; then it runs on any (default: 60)."""
    suspect_watch_beats: NonNegative = 60
    """Heartbeat intervals for which such a group runs, at most, before the next one may run on the
    same worker (default: 60)."""

    def __post_init__(self) -> None:
        if self.advertise and (why := why_not_dialable(self.advertise)):
            raise ValueError(f"advertise: {why}")


class WorkerConfig(Section, frozen=True):
    """The processes in which environments and agents run."""

    num_workers: Positive = 2
    """How many this machine starts."""
    max_rollouts: Positive = 64
    """Rollouts that run at the same time in one worker."""
    load_timeout_s: PositiveSeconds = 100.0
    """Seconds in which an environment must load, or it has failed; keep it below
    launch.ready_timeout_s, so that the reason is reported (default: 100)."""
    run_timeout_s: PositiveSeconds = 600.0
    """A rollout that runs longer ends as `truncated`."""
    score_timeout_s: PositiveSeconds = 120.0
    """Scoring a rollout or a group may take this long; past it the outcome is infra_error."""
    delivery_timeout_s: PositiveSeconds = 600.0
    """Seconds in which a result must be acknowledged by its sink, or its group runs again (default:
    600)."""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 1.5
    """Seconds that a worker which is asked to stop has to finish its rollouts (default: 1.5)."""
    farewell_timeout_s: NonNegativeSeconds = 2.0
    """Seconds that a stopped worker then has to deliver the results of finished groups
    (default: 2)."""
    close_timeout_s: PositiveSeconds = 1.0
    """Seconds that an environment has for its `close` (default: 1)."""
    exit_timeout_s: NonNegativeSeconds = 1.0
    """Seconds that a worker which is done waits for tasks and threads of environment code before
    it exits without them (default: 1)."""
    report_timeout_s: NonNegativeSeconds = 5.0
    """Seconds for which a worker whose environment does not load tries to report the reason to the
    router (default: 5)."""
    failed_sibling: FailedSibling = "drop"
    """When a rollout fails for good: `drop` its group, or `score_rest` of the siblings."""
    num_infra_retries: NonNegative = 2
    """Retries, in its worker, of a rollout that fails for infrastructure reasons (default: 2)."""
    max_unacked_bytes: Positive = 256 * 2**20
    """Finished groups that no sink acknowledged yet; past it the worker takes no new asks."""
    max_held_bytes: Positive = 2 * 2**30
    """All that its rollouts and results hold in memory; past it the worker takes no new asks."""
    max_rss_bytes: NonNegative = 0
    """A worker whose resident memory is larger finishes its rollouts and restarts; 0: never
    (default: 0)."""
    recycle_rollouts: NonNegative = 0
    """A worker that has run this many rollouts restarts likewise; 0: never (default: 0)."""
    isolation: IsolationMode = "auto"
    """How agents' programs are separated from the host (docs/explanation/security.md): `bwrap`
    (namespaces), `uid` (a user id each; needs root or `rollmesh worker --user`), `none`; `auto`
    takes the first of these that works (default)."""
    isolation_first_uid: Positive = 200_000
    """`uid`: the first user id of the range, which nothing else on the host may use. With `--user`
    the range of the same length above it is used too (default: 200000)."""
    isolation_num_uids: Positive = 1024
    """`uid`: how many ids the range has; the workers of a host share them (default: 1024)."""
    program_memory_bytes: NonNegative = 0
    """Memory of one isolated program with all it starts, by cgroup; where this process may make
    none, the data segment of each process (RLIMIT_DATA). 0 is no limit (default: 0)."""
    program_max_processes: NonNegative = 1024
    """Processes and threads of one isolated program, by cgroup or RLIMIT_NPROC; 0 is no limit
    (default: 1024)."""
    program_cpus: NonNegativeSeconds = 0.0
    """CPUs that one isolated program may use, by cgroup alone; 0 is no limit (default: 0)."""


class SamplingConfig(Section, frozen=True):
    """Sampling that training forces on every call; evaluation lets agents choose."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Nucleus share."""
    max_tokens: Positive = 512
    """Tokens per turn where the agent names none."""

    def policy(self) -> SamplingPolicy:
        """The rules of a training session."""
        return SamplingPolicy(
            temperature=SamplingRule(FieldPolicy.FORCE, self.temperature),
            top_p=SamplingRule(FieldPolicy.FORCE, self.top_p),
            max_tokens=SamplingRule(FieldPolicy.DEFAULT, self.max_tokens),
        )

    def eval_policy(self) -> SamplingPolicy:
        """The rules of an evaluation: ours is what the agent leaves out."""
        return msgspec.structs.replace(
            EVAL_SAMPLING,
            temperature=SamplingRule(FieldPolicy.DEFAULT, self.temperature),
            top_p=SamplingRule(FieldPolicy.DEFAULT, self.top_p),
            max_tokens=SamplingRule(FieldPolicy.DEFAULT, self.max_tokens),
        )


class TrainerConfig(Section, frozen=True):
    """Group-relative policy optimisation on the finished groups."""

    bind: str = ""
    """ZMQ address where finished groups arrive: an address of this host, a network interface
    (tcp://eth0:5556) or tcp://0.0.0.0:5556. Empty: a free port that faces the router."""
    advertise: str = ""
    """tcp://HOST:PORT by which workers reach `bind` where NAT or a proxy changes the port too
    (default: `bind` with network.advertise)."""
    num_steps: NonNegative = 200
    """Train steps of the run."""
    num_ranks: Positive = 1
    """Processes that train together, each with a shard of the model and own rows (default: 1)."""
    num_local_ranks: NonNegative = 0
    """Ranks that the trainer starts on its own host; the others are started elsewhere, by torchrun,
    `rollmesh rank` or `--on ray | slurm`, and dial in (docs/howto/ranks.md). 0 (default): all, or
    with `--on slurm` as many as a node has GPUs."""
    rank_bind: str = ""
    """ZMQ address that ranks started elsewhere dial: an address of this host or a network interface
    (tcp://eth0:5557). Empty: a free port that faces them."""
    groups_per_step: Positive = 16
    """Groups in one train step (default: 16)."""
    samples_per_group: Positive = 16
    """Rollouts of each task (default: 16)."""
    max_staleness: NonNegative = 2
    """Samples whose oldest token is more train steps old than this are not used (default: 2)."""
    stale_policy: StalePolicy = "wait"
    """For stragglers: `wait` (default) delays steps so that none gets too old; otherwise they are
    trained with older tokens `mask`ed, `drop`ped, or their tasks `requeue`d."""
    staleness_formula: StalenessFormula = "under_way"
    """Formula that limits requested rollouts: `under_way` counts unfinished ones; `known` is the
    formula of AReaL, which counts all that were ever accepted (docs/explanation/staleness.md)."""
    max_running_groups: Positive = 32
    """Limit on groups that are requested and not finished (default: 32)."""
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 1e-5
    """AdamW's learning rate, constant after warm-up (default: 1e-5, which suits a pretrained model
    of which all weights train; LoRA takes about ten times as much)."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from zero."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Weight decay of AdamW (default: 0)."""
    lora_rank: NonNegative = 0
    """Rank of the low-rank adapters that are trained, published and saved (docs/howto/lora.md); the
    model's own weights are frozen. 0: all weights train."""
    num_minibatches: Positive = 1
    """Optimiser steps per train step."""
    microbatch_tokens: Positive = 4096
    """Limit on the tokens of one forward pass; gradients accumulate over a minibatch
    (default: 4096)."""
    loss_weight: LossWeight = "token"
    """Weighting of the loss: each trained `token` weighs the same (default), or each `rollout`."""
    loss: str = "ppo"
    """`ppo` (default), `gspo` (sequence-level ratios), or `package.module:function` of your own
    (docs/howto/losses.md)."""
    advantage: str = "grpo"
    """Advantage of a reward within its group: `grpo` (less mean, over std), `mean` (less mean),
    `leave_one_out`, or `package.module:function` of your own (docs/howto/losses.md)."""
    clip_low: Share = 0.2
    """The policy ratio is clipped below 1 - clip_low (default: 0.2)."""
    clip_high: Annotated[float, msgspec.Meta(gt=0)] = 0.28
    """The policy ratio is clipped above 1 + clip_high (default: 0.28)."""
    max_importance_weight: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    """Limit on the importance weight of stale tokens (default: 4)."""
    proximal: ProximalRule = "recompute"
    """Log-probs as the step began, which clipping refers to: `recompute`, a forward more where
    num_minibatches > 1; `loglinear`, interpolated; `recorded`, as sampled (plain PPO)."""
    entropy_coef: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Gradients are clipped to this norm (default: 1)."""
    device: str = "auto"
    """Where torch trains: cpu, cuda, cuda:1; `auto` (default) is cuda where torch sees a GPU for
    each rank, else cpu."""
    num_threads: Positive = 1
    """Number of torch threads (default: 1)."""
    eval_rollouts: NonNegative = 0
    """Rollouts that measure the policy before the first step (default: 0)."""
    max_logprob_gap: Annotated[float, msgspec.Meta(gt=0)] = 0.05
    """Samples of the current weights whose log-probs are off by more than this on average, in nats,
    are masked (default: 0.05)."""
    max_token_gap: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Single tokens of the current weights whose log-prob is off by more than this, in nats, are
    masked (default: 1.0); in a sample's average a token counts as this at most, so a larger
    max_logprob_gap masks no sample."""
    checkpoint_steps: Positive = 100
    """Train steps between checkpoints; one is also written at the end (default: 100)."""
    stop_wait_s: NonNegativeSeconds = 10.0
    """Seconds that a stopped trainer waits for engines, at most, and at most a quarter of
    launch.stop_timeout_s; the rest is for its checkpoint (default: 10)."""
    sleep_timeout_s: NonNegativeSeconds = 30.0
    """On a shared fleet: seconds that a finished run waits for its engines to sleep
    (default: 30)."""
    withdraw_timeout_s: PositiveSeconds = 10.0
    """On a shared fleet: seconds for which the withdrawal of a request for GPUs is repeated to a
    scheduler that is reachable and does not confirm it (default: 10)."""
    rank_start_timeout_s: PositiveSeconds = 120.0
    """Seconds in which all ranks must meet and load the model (default: 120)."""
    rank_silence_s: PositiveSeconds = 30.0
    """Seconds after which a rank, or the trainer, that is silent is lost, and all ranks end
    (default: 30)."""
    rank_exit_timeout_s: NonNegativeSeconds = 10.0
    """Seconds that ranks have to end by themselves before they are killed (default: 10)."""
    train_branches: tuple[Branch, ...] = ("main", "subagent")
    """Which branches of a rollout's token graph train: main, subagent, side."""

    def __post_init__(self) -> None:
        if self.advertise and (why := why_not_dialable(self.advertise)):
            raise ValueError(f"advertise: {why}")
        if self.num_local_ranks > self.num_ranks:
            raise ValueError(
                f"num_local_ranks = {self.num_local_ranks} is more than num_ranks = "
                f"{self.num_ranks}; lower it, or set 0 for all"
            )

    @property
    def local_ranks(self) -> int:
        """Number of ranks that the trainer starts itself."""
        return self.num_local_ranks or self.num_ranks


class PublishConfig(Section, frozen=True):
    """How new weights reach the engines."""

    every_steps: Positive = 1
    """Train steps per published policy version (default: 1)."""
    mode: PublishMode = "disk"
    """`disk`: engines read the folder. `tensor`: those of this host read the trainer's memory.
    `distributed`: a broadcast to all. The folder is written in each mode, for engines that join
    later."""
    lease_s: PositiveSeconds = 30.0
    """Seconds in which a publisher must finish an update, or the router undoes it
    (default: 30)."""
    probe_tolerance: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    """Largest difference, in nats, between log-probs of the probe sequence from an engine and from
    the trainer (default: 0.1)."""
    accept_timeout_s: PositiveSeconds = 600.0
    """Seconds after which the run ends if no engine accepts the new weights; engines that sleep
    on a shared fleet do not count (default: 600)."""
    shortage_wait_s: NonNegativeSeconds = 1.0
    """Seconds for which a connection to an engine that fails for lack of ports or file descriptors
    on this machine is retried; then the update of this engine starts again (default: 1)."""
    close_timeout_s: NonNegativeSeconds = 2.0
    """Seconds in which the publisher must release the engines when the trainer ends; later, its
    leases expire (default: 2)."""


class JournalConfig(Section, frozen=True):
    """The trainer side's record of what arrived, and a gateway's of its sessions."""

    segment_bytes: Positive = 32 * 2**20
    """A file of the journal is closed at this size."""
    max_bytes: Positive = 4 * 2**30
    """Past this the asks stop until a checkpoint frees segments; a gateway begins no call."""
    fsync: bool = False
    """Survive a crash of the machine, not only of the process."""


class DashboardConfig(Section, frozen=True):
    """The live dashboard."""

    enabled: bool = True
    """Start it with the run."""
    bind: str = "127.0.0.1:0"
    """host:port of the dashboard; loopback only (default: 127.0.0.1:0, a free port)."""
    poll_s: PositiveSeconds = 0.5
    """Interval of reading the run's files, in seconds (default: 0.5)."""


class LaunchConfig(Section, frozen=True):
    """Starting and stopping the processes."""

    ready_timeout_s: PositiveSeconds = 120.0
    """Seconds in which a process must report that it is ready; later, the start fails (default:
    120)."""
    stop_timeout_s: PositiveSeconds = 120.0
    """Seconds that a stopped run may take to save before what still runs is killed (default: 120,
    which leaves time for the checkpoint of a model of 8 B parameters). A second Ctrl-C kills at
    once."""
    max_restarts: NonNegative = 5
    """A process that dies more often within `restart_window_s`, or before it is ready again, ends
    the run (default: 5)."""
    hang_timeout_s: NonNegativeSeconds = 90.0
    """A process that sends no heartbeat for this many seconds, for example because it is suspended,
    is killed and restarted; a warning is shown after a third of it. At least 10; 0: never
    (default: 90)."""
    restart_delay_s: PositiveSeconds = 0.5
    """Seconds before a process that died is restarted; each further death within
    `restart_window_s` doubles the delay (default: 0.5)."""
    max_restart_delay_s: PositiveSeconds = 10.0
    """Longest delay of a restart, in seconds (default: 10)."""
    restart_window_s: PositiveSeconds = 60.0
    """Seconds for which a death counts against `max_restarts`; it counts longer while the process
    has not been ready again (default: 60)."""
    min_recycle_s: NonNegativeSeconds = 10.0
    """A worker that recycles itself sooner after its start, in seconds, counts as dead, so that it
    cannot do nothing else (default: 10)."""
    telemetry_interval_s: PositiveSeconds = 1.0
    """Seconds between two lines of telemetry.jsonl, which the dashboard and `status` show
    (default: 1)."""
    telemetry_timeout_s: PositiveSeconds = 0.8
    """Seconds in which the router must answer to be in a line of telemetry.jsonl (default: 0.8)."""
    suspended_s: PositiveSeconds = 10.0
    """Launch acts ten times a second; after a gap of this many seconds it considers its machine
    suspended, and counts no heartbeat of that time as missing (default: 10)."""
    engine_check_timeout_s: PositiveSeconds = 5.0
    """Seconds in which each server of engine.urls must answer before the run starts
    (default: 5)."""
    node_timeout_s: PositiveSeconds = 30.0
    """With --on slurm: seconds of silence after which another node is lost. Its processes end there
    and start again, on another node where they can (default: 30)."""
    scheduler_wait_s: NonNegativeSeconds = 30.0
    """With --scheduler: seconds to wait until the scheduler answers and admits the pipeline
    (default: 30)."""
    scheduler_timeout_s: PositiveSeconds = 10.0
    """With --scheduler: seconds in which the scheduler must answer one request (default: 10)."""
    release_timeout_s: PositiveSeconds = 10.0
    """With --scheduler: seconds that a run which has ended waits for the scheduler to confirm it
    (default: 10, about one restart of the scheduler)."""
    driver_gone_s: NonNegativeSeconds = 10.0
    """With --scheduler: seconds for which a pipeline may still appear driven after its coordinator
    was killed; later, it counts as running elsewhere (default: 10)."""

    def __post_init__(self) -> None:
        if 0 < self.hang_timeout_s < LEAST_HANG_S:
            raise ValueError(
                f"hang_timeout_s = {self.hang_timeout_s:g} would kill processes of a busy machine; "
                f"use at least {LEAST_HANG_S:g}, or 0 for never"
            )


class RayConfig(Section, frozen=True):
    """`rollmesh up --on ray`: the cluster, and what each process needs of a node."""

    address: str = "auto"
    """Address of the cluster's head; `auto` is RAY_ADDRESS, or a cluster with a node on this
    machine (default: auto)."""
    worker_cpus: NonNegativeNumber = 1.0
    """CPUs of a worker. Workers without a place make an autoscaler add nodes (default: 1)."""
    engine_cpus: NonNegativeNumber = 1.0
    """CPUs of an engine, besides its GPUs (default: 1)."""
    trainer_cpus: NonNegativeNumber = 1.0
    """CPUs of the trainer, besides its GPUs (default: 1)."""
    trainer_gpus: NonNegative = 0
    """GPUs of the trainer, on one node (default: 0, one for each rank, or none where
    trainer.device is cpu or the cluster has no GPU)."""


class SlurmConfig(Section, frozen=True):
    """`rollmesh up --on slurm`: the job, and how its processes are spread over its nodes."""

    nodes: NonNegative = 0
    """Nodes of the job (default: 0; then --nodes is needed)."""
    job_name: str = ""
    """Name of the job in the queue (default: the run's name)."""
    partition: str = ""
    """Partition of the nodes (default: the cluster's)."""
    account: str = ""
    """Account that is charged (default: the user's)."""
    time_limit: str = ""
    """Time limit of the job as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS (default: the
    partition's)."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node; a trainer with more ranks is spread over several nodes (default: 0)."""
    cpus_per_node: NonNegative = 0
    """CPUs of each node, which the job may then share with others (default: 0: whole nodes, with
    all their memory)."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as ["--constraint=h100", "--mem=500G"]."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on the first node before the mesh starts, such as ["module load cuda"].
    The other nodes inherit the environment."""
    python: str = ""
    """The Python interpreter on the nodes (default: the one that runs `rollmesh up`)."""
    stop_before_s: NonNegative = 300
    """Seconds before the time limit at which the run stops and saves; more than
    launch.stop_timeout_s. 0: the run is killed at the limit (default: 300)."""
    requeue: bool = True
    """Queue the job again after the time limit, a preemption or the loss of its first node; it then
    resumes the run (default: true)."""
    engines_on_first: NonNegative = 0
    """Engines on the first node, beside router and trainer (default: 0)."""
    engines_per_node: NonNegative = 0
    """Engines on each other node that has no rank of the trainer (default: 0: the engines of
    [engine], spread evenly over these nodes)."""
    workers_per_node: NonNegative = 0
    """Workers on each of these nodes (default: 0: worker.num_workers, spread evenly)."""
    runner_timeout_s: PositiveSeconds = 60.0
    """Seconds in which srun must start rollmesh on a node; later, the node's processes are started
    on another one (default: 60)."""
    avoid_node_s: NonNegativeSeconds = 300.0
    """Seconds for which a node that was lost gets no processes if there is another one
    (default: 300)."""

    def __post_init__(self) -> None:
        for name in ("job_name", "partition", "account", "time_limit"):
            if any(letter.isspace() for letter in getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)!r} contains white space")
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"options: {option!r} is no option of sbatch; write --NAME=VALUE")


class Config(Section, frozen=True):
    """All settings."""

    env: str = "guess"
    """The environment: `package.module:Class`, or a short name: guess, echo, gym, openenv."""
    env_settings: dict[str, Any] = {}  # noqa: RUF012 - a struct copies it
    """Keyword arguments of the environment's constructor. Secrets (`*_key`, `*_token`, `*_secret`,
    `*password*`) are written { env = "NAME" } or { file = "PATH" }."""
    pass_threshold: float | None = None
    """A rollout with at least this reward succeeded, where the environment does not report success
    by the metric `success`. Not set: success is known only where all rewards are 0 or 1."""
    run: RunConfig = RunConfig()
    network: NetworkConfig = NetworkConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    worker: WorkerConfig = WorkerConfig()
    sampling: SamplingConfig = SamplingConfig()
    interception: InterceptionConfig = InterceptionConfig()
    trainer: TrainerConfig = TrainerConfig()
    publish: PublishConfig = PublishConfig()
    journal: JournalConfig = JournalConfig()
    dashboard: DashboardConfig = DashboardConfig()
    launch: LaunchConfig = LaunchConfig()
    ray: RayConfig = RayConfig()
    slurm: SlurmConfig = SlurmConfig()

    def __post_init__(self) -> None:
        most = self.trainer.max_staleness + 1
        if self.publish.every_steps > most:
            raise ValueError(
                f"publish.every_steps = {self.publish.every_steps} lets no sample be within "
                f"trainer.max_staleness = {self.trainer.max_staleness}; use at most {most}"
            )

    def run_folder(self) -> Path:
        """Return the folder of the run's files."""
        return Path(self.run.folder) / self.run.name


def load_config(
    path: Path | None, overrides: list[str] | None = None, defaults: dict[str, Any] | None = None
) -> Config:
    """Read `path` (TOML, or the JSON of a run folder), lay it over `defaults`, apply `overrides`.

    An override reads `section.key=value`, its value in TOML's notation (a bare word is a string).
    ConfigError names the key, the file and what is expected.
    """
    tree: dict[str, Any] = {}
    merge(tree, defaults or {})
    merge(tree, read_file(path) if path else {})
    for override in overrides or []:
        apply_override(tree, override)
    return convert(tree, f"{path}" if path else "the settings")


def write_config(config: Config, path: Path) -> None:
    """Write the resolved config as JSON, for people and for the run's processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")


def convert(tree: dict[str, Any], source: str) -> Config:
    """Check `tree` and freeze it; ConfigError in one line naming `source` and the key."""
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(str(error), Config)}") from None
    try:
        check_no_literals(config.env_settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return config
