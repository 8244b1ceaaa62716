"""The lines of a run folder's files, as far as the page reads them.

Owns the reader's view: unknown fields are passed over, missing ones have defaults, so that the
page of today opens the run of yesterday. Invariant: a line that does not fit is counted by its
reader and never ends it. Driven by `view` and `shelf`.
"""

from typing import Any

import msgspec

from rollmesh.core.types import ErrorPlace
from rollmesh.wire.worker_report import WorkerStatus


class ProcessRow(msgspec.Struct, frozen=True):
    """One process as telemetry.jsonl saw it."""

    role: str
    pid: int = 0
    rss_bytes: int = 0


class EngineRow(msgspec.Struct, frozen=True):
    """One engine of the fleet table."""

    url: str
    phase: str = ""
    policy_version: int = 0
    num_running: int = 0
    num_waiting: int = 0
    detail: str = ""


class RouterRow(msgspec.Struct, frozen=True):
    """The router's /status."""

    workers: list[WorkerStatus] = []
    engines: list[EngineRow] = []
    queue: dict[str, int] = {}
    """Groups by state: queued, assigned, running."""
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_clients: int = 0
    address: str = ""
    """tcp://, which workers and clients dial."""
    status_url: str = ""
    causes: list[str] = []
    """Why groups wait, and will go on waiting unless somebody does something."""


class TelemetryRow(msgspec.Struct, frozen=True):
    """A line of telemetry.jsonl; one per second."""

    time_s: float
    """Unix time."""
    processes: list[ProcessRow] = []
    router: RouterRow | None = None


class StepRow(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl: one train step, or what was measured before the first."""

    time_s: float = 0.0
    step: int | None = None
    policy_version: int | None = None
    reward: float | None = None
    """Mean over the step's rollouts."""
    success: float | None = None
    """Share of the step's rollouts; None where success is not known."""
    reward_untrained: float | None = None
    success_untrained: float | None = None
    age_histogram: dict[str, int] = {}
    """Samples by age in train steps at consumption."""
    max_age: int | None = None
    frac_equal_groups: float | None = None
    """Share of the step's groups in which all rewards were equal."""
    loss: float | None = None
    entropy: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    logprob_gap_max: float | None = None

    metrics: dict[str, float] = {}
    """Means of the environment's metrics, by name; the keys `env/NAME` of the line."""


_decode_step = msgspec.json.Decoder(StepRow).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def parse_step(line: bytes) -> StepRow:
    """A line of metrics.jsonl with the environment's metrics; MsgspecError if it does not fit."""
    row = _decode_step(line)
    if b'"env/' not in line:
        return row
    named = [(name, value) for name, value in _decode_object(line).items() if name[:4] == "env/"]
    metrics = {name[4:]: float(value) for name, value in named if isinstance(value, int | float)}
    return msgspec.structs.replace(row, metrics=metrics)


class DropRow(msgspec.Struct, frozen=True):
    """A line of drops.jsonl: rollouts that did not train."""

    reason: str
    num_rollouts: int = 1
    time_s: float = 0.0
    group_id: str = ""
    index: int | None = None
    task_id: str = ""
    outcome: str = ""
    error: str = ""
    place: ErrorPlace | None = None


class FailedRow(msgspec.Struct, frozen=True):
    """A failed rollout, as the page lists it."""

    rollout_id: str
    task_id: str
    outcome: str
    error: str
    place: str
    """`my_env.py:15 in score`; '' where no line of the environment is known."""


class TrajectorySummary(msgspec.Struct, frozen=True):
    """What the list shows of a line of trajectories.jsonl; its long fields are passed over."""

    rollout_id: str
    time_s: float = 0.0
    task_id: str = ""
    outcome: str = ""
    reward: float | None = None
    num_calls: int = 0
    step: int | None = None
    """The train step that consumed it."""
    worker_id: str = ""
    success: float | None = None
    """1 where it passed; None where that is not known."""
    error: str = ""
    metrics: dict[str, float] = {}
    """The environment's."""


class SampleRow(msgspec.Struct, frozen=True):
    """One training sample: a path through the token graph; all lists have one entry per token."""

    token_ids: list[int] = []
    logprobs: list[float | None] = []
    """Of sampled tokens; what stands at context tokens means nothing."""
    loss_mask: list[int] = []
    """1 where the policy sampled the token."""
    policy_versions: list[int | None] = []


class TrajectoryRow(TrajectorySummary, frozen=True):
    """A whole line of trajectories.jsonl."""

    messages: list[Any] = []
    """Chat messages as the agent's endpoint saw them."""
    samples: list[SampleRow] = []


class RunSection(msgspec.Struct, frozen=True):
    """`run` of config.json."""

    name: str = ""


class ModelSection(msgspec.Struct, frozen=True):
    """`model` of config.json."""

    path: str = ""


class TrainerSection(msgspec.Struct, frozen=True):
    """`trainer` of config.json."""

    num_steps: int = 0
    max_staleness: int = 0


class ConfigRow(msgspec.Struct, frozen=True):
    """The settings of config.json that the page shows."""

    env: str = ""
    pass_threshold: float | None = None
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    trainer: TrainerSection = TrainerSection()


class SummaryRow(msgspec.Struct, frozen=True):
    """The part of summary.json that the page shows."""

    reward_untrained: float | None = None
    success_untrained: float | None = None
