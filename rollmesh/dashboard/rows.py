"""The lines of a run folder's files, with the fields that the dashboard reads.

- Unknown fields are ignored and missing ones have defaults, so that runs of other releases can be
  opened.
- A line that cannot be parsed is counted and skipped; one read is bounded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from rollmesh.core.files import FileTail
from rollmesh.core.types import ErrorPlace
from rollmesh.wire.worker_report import WorkerStatus


class ProcessRow(msgspec.Struct, frozen=True):
    """One process, from telemetry.jsonl."""

    role: str
    pid: int = 0
    rss_bytes: int = 0


class EngineTableRow(msgspec.Struct, frozen=True):
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
    engines: list[EngineTableRow] = []
    queue: dict[str, int] = {}
    """Groups by state: queued, assigned, running."""
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_clients: int = 0
    address: str = ""
    """tcp:// address for workers and clients."""
    status_url: str = ""
    causes: list[str] = []
    """Why groups wait, for causes that need the user to act."""


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
    """Parse a line of metrics.jsonl with the environment's metrics; MsgspecError if it does not
    fit.
    """
    row = _decode_step(line)
    if b'"env/' not in line:
        return row
    named = [(name, value) for name, value in _decode_object(line).items() if name[:4] == "env/"]
    metrics = {name[4:]: float(value) for name, value in named if isinstance(value, int | float)}
    return msgspec.structs.replace(row, metrics=metrics)


class DroppedRollout(msgspec.Struct, frozen=True):
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
    """A failed rollout in the page's list."""

    rollout_id: str
    task_id: str
    outcome: str
    error: str
    place: str
    """`my_env.py:15 in score`; '' if no line of the environment is known."""


class TrajectorySummary(msgspec.Struct, frozen=True):
    """The fields of a line of trajectories.jsonl that the list shows; its long fields are
    skipped.
    """

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
    """1 if it passed; None if that is not known."""
    error: str = ""
    metrics: dict[str, float] = {}
    """The environment's metrics."""


class SampleRow(msgspec.Struct, frozen=True):
    """One training sample: a path through the token graph; all lists have one entry per token."""

    token_ids: list[int] = []
    logprobs: list[float | None] = []
    """Log-probs of sampled tokens; values at context tokens are undefined."""
    loss_mask: list[int] = []
    """1 where the policy sampled the token."""
    policy_versions: list[int | None] = []


class StoredTrajectory(TrajectorySummary, frozen=True):
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
    """The fields of summary.json that the page shows."""

    reward_untrained: float | None = None
    success_untrained: float | None = None


BLOCKS_PER_READ = 8
"""A page that is opened late catches up by this many blocks of the tail per poll."""

Row = TypeVar("Row")


class RowFile(Generic[Row]):
    """A JSON-lines file, read as rows of one type while it grows."""

    def __init__(
        self, path: Path, row_type: type[Row], parse: Callable[[bytes], Row] | None = None
    ) -> None:
        """`parse` converts a line, and raises MsgspecError if it does not fit."""
        self.num_bad_lines = 0
        self._tail = FileTail(path)
        self._decode = parse or msgspec.json.Decoder(row_type).decode

    @property
    def num_restarts(self) -> int:
        """How often the file was replaced or truncated."""
        return self._tail.num_restarts

    def read(self) -> list[Row]:
        """Return the rows since the last call."""
        rows: list[Row] = []
        for _ in range(BLOCKS_PER_READ):
            lines = self._tail.read()
            if not lines:
                break
            rows += [row for line in lines if (row := self._parse(line.data)) is not None]
        return rows

    def _parse(self, data: bytes) -> Row | None:
        try:
            return self._decode(data)
        except msgspec.MsgspecError:
            self.num_bad_lines += 1
            return None
