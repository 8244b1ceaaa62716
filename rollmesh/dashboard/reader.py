"""Read a run folder as it grows and report what the dashboard must show.

- A poll reads a bounded amount.
- Files are read again from their start if the folder was replaced, if a restarted trainer resumed
  before its last lines, or if a resumed evaluation replaced its results.
- The events of a poll bring a page from the state before it to the state after it.
- The rows of an evaluation are kept, since its report is over all of them.
"""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollmesh.core.run_state import EVAL_MESH, SUMMARY_FILE, RunRecord, RunState, read_record
from rollmesh.core.types import TRAINED_OUTCOMES
from rollmesh.dashboard.rows import (
    ConfigRow,
    DroppedRollout,
    FailedRow,
    RowFile,
    StepRow,
    StoredTrajectory,
    SummaryRow,
    TelemetryRow,
    TrajectorySummary,
    parse_step,
)
from rollmesh.dashboard.trajectories import TokenText, TrajectoryIndex
from rollmesh.dashboard.view import RunView
from rollmesh.serve.client.evaluation_files import PLAN, RESULTS, EvaluationPlan, Row
from rollmesh.serve.client.scores import report_of

MAX_FAILED_ROLLOUTS = 20
"""Number of failed rollouts that the page lists, the latest ones."""


def is_evaluation(folder: Path) -> bool:
    """Return whether the folder is that of an evaluation."""
    return (folder / PLAN).is_file()


class EvalView:
    """One evaluation: its plan, its report so far, and its failed rollouts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = RowFile(folder / RESULTS, Row)
        self._rows: list[Row] = []
        self._num_restarts = 0
        self._plan: EvaluationPlan | None = None

    @property
    def num_bad_lines(self) -> int:
        return self._file.num_bad_lines

    @property
    def num_rows(self) -> int:
        """Rollouts that have ended, with or without a result."""
        return len(self._rows)

    def read(self) -> bool:
        """Read new rows; return whether there were any."""
        rows = self._file.read()
        is_new = self._plan is None or bool(rows)
        if self._file.num_restarts != self._num_restarts:
            self._num_restarts, self._rows = self._file.num_restarts, []
        self._rows += rows
        if self._plan is None:
            self._plan = _plan_in(self._folder)
        return is_new and self._plan is not None

    def snapshot(self, pass_threshold: float | None) -> dict[str, Any] | None:
        """Return all that the page shows; None while the plan cannot be read."""
        if self._plan is None:
            return None
        failed = [row for row in self._rows if row.outcome not in TRAINED_OUTCOMES]
        return {
            "split": self._plan.split,
            "model": self._plan.model,
            "num_samples": self._plan.num_samples,
            "num_wanted": self._plan.num_tasks * self._plan.num_samples,
            "num_rows": self.num_rows,
            "report": msgspec.to_builtins(report_of(self._rows, pass_threshold), str_keys=True),
            "failed": [_failed(row) for row in failed[: -MAX_FAILED_ROLLOUTS - 1 : -1]],
        }


def _plan_in(folder: Path) -> EvaluationPlan | None:
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=EvaluationPlan)
    except (OSError, msgspec.MsgspecError):
        return None


def _failed(row: Row) -> FailedRow:
    rollout_id = f"{row.group_id}/{row.index}"
    place = str(row.place) if row.place else ""
    return FailedRow(rollout_id, row.task_id, row.outcome, row.error, place)


LISTED_TRAJECTORIES = 50
"""Length of the page's list."""

Content = TypeVar("Content")


class PageEvent(msgspec.Struct, frozen=True):
    """An update of the page: `state` replaces all that it has, other events add to it."""

    name: str
    data: Any


class PlotVersion(NamedTuple):
    """The version of the plots, which tells whether a page's copy is outdated."""

    inode: int
    num_cuts: int
    step_thinnings: int
    telemetry_thinnings: int


class RunReader:
    """One run folder that is followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inode = 0
        self._num_cuts = 0
        self._token_text: TokenText | None = None
        self._open()

    def poll(self, unix_s: float) -> list[PageEvent]:
        """Read new lines; return the events for the page."""
        before, head_before = self._mark(), self.view.head(unix_s)
        inode = self.folder.stat().st_ino if self.folder.exists() else 0
        if inode != self._inode:
            self._inode = inode
            self._open()
        events = self._poll_files()
        if self._steps.num_restarts + self._drops.num_restarts:
            self._num_cuts += 1
            self._open()
            events = self._poll_files()
        if self._mark() != before:
            return [PageEvent("state", self.state(unix_s))]
        head = self.view.head(unix_s)
        return [*events, PageEvent("run", head)] if head != head_before else events

    def state(self, unix_s: float) -> dict[str, Any]:
        """Return all that the page shows, bounded in size."""
        return {
            "run": self.view.head(unix_s),
            "steps": self.view.steps.rows(),
            "learning": self.view.learning(),
            "evaluation": self._eval_snapshot(),
            "telemetry": self.view.telemetry.rows(),
            "fleet": self.view.fleet(),
            "trajectories": self.trajectories(LISTED_TRAJECTORIES),
        }

    def trajectories(self, limit: int) -> list[TrajectorySummary]:
        """Return the latest trajectories, newest first."""
        return self._trajectories.recent(limit)

    def trajectory(self, rollout_id: str) -> StoredTrajectory | None:
        """Return a whole trajectory; blocks on the disk."""
        return self._trajectories.load(rollout_id)

    def token_text(self) -> TokenText:
        """Return the run's tokenizer, loaded on first use; blocks on the disk."""
        if self._token_text is None:
            folders = [self.folder / "model", Path(self.view.config.model.path)]
            self._token_text = TokenText(folders)
        return self._token_text

    def _open(self) -> None:
        self.view = RunView()
        self._token_text = None
        self._settings_mtimes: dict[str, float] = {}
        self._steps = RowFile(self.folder / "metrics.jsonl", StepRow, parse_step)
        self._evaluation = EvalView(self.folder) if is_evaluation(self.folder) else None
        self.view.eval_name = self.folder.resolve().name if self._evaluation else ""
        self._telemetry = RowFile(self._mesh_folder / "telemetry.jsonl", TelemetryRow)
        self._drops = RowFile(self.folder / "drops.jsonl", DroppedRollout)
        self._trajectories = TrajectoryIndex(self.folder / "trajectories.jsonl")

    @property
    def _mesh_folder(self) -> Path:
        """The folder to which launch writes: for an evaluation, its mesh's."""
        return self.folder / EVAL_MESH if self._evaluation else self.folder

    def _poll_files(self) -> list[PageEvent]:
        self._read_settings()
        return [
            *self._poll_steps(),
            *self._poll_evaluation(),
            *self._poll_telemetry(),
            *self._poll_trajectories(),
        ]

    def _mark(self) -> PlotVersion:
        view, thinned = self.view, self.view.telemetry.num_thinnings
        return PlotVersion(self._inode, self._num_cuts, view.steps.num_thinnings, thinned)

    def _read_settings(self) -> None:
        view = self.view
        view.record = read_record(self._mesh_folder)
        if self._evaluation and view.record is None and (self.folder / SUMMARY_FILE).exists():
            view.record = RunRecord(state=RunState.DONE)  # evaluated on an existing mesh
        if config := self._changed("config.json", ConfigRow):
            view.config, self._token_text = config, None
        summary = self._changed("summary.json", SummaryRow)
        if summary and summary.reward_untrained is not None:
            view.reward_untrained = summary.reward_untrained
            view.success_untrained = summary.success_untrained
        files = (self._steps, self._telemetry, self._drops, self._trajectories)
        view.num_bad_lines = sum(file.num_bad_lines for file in files)
        if self._evaluation:
            view.num_bad_lines += self._evaluation.num_bad_lines

    def _changed(self, name: str, content_type: type[Content]) -> Content | None:
        """Return the content of a small file that was written since the last call."""
        path = self.folder / name
        try:
            mtime = path.stat().st_mtime
            if self._settings_mtimes.get(name) == mtime:
                return None
            row = msgspec.json.decode(path.read_bytes(), type=content_type)
        except (OSError, msgspec.MsgspecError):
            return None
        self._settings_mtimes[name] = mtime
        return row

    def _poll_steps(self) -> list[PageEvent]:
        drops, rows = self._drops.read(), self._steps.read()
        for drop in drops:
            self.view.add_drop(drop)
        plotted = [numbers for row in rows if (numbers := self.view.add_step(row))]
        if not drops and not rows:
            return []
        return [PageEvent("steps", {"rows": plotted, "learning": self.view.learning()})]

    def _poll_evaluation(self) -> list[PageEvent]:
        if self._evaluation is None or not self._evaluation.read():
            return []
        return [PageEvent("evaluation", self._eval_snapshot())]

    def _eval_snapshot(self) -> dict[str, Any] | None:
        threshold = self.view.config.pass_threshold
        return self._evaluation.snapshot(threshold) if self._evaluation else None

    def _poll_telemetry(self) -> list[PageEvent]:
        rows = self._telemetry.read()
        plotted = [numbers for row in rows if (numbers := self.view.add_telemetry(row))]
        if not rows:
            return []
        return [PageEvent("telemetry", {"rows": plotted, "fleet": self.view.fleet()})]

    def _poll_trajectories(self) -> list[PageEvent]:
        summaries = self._trajectories.read()[-LISTED_TRAJECTORIES:]
        return [PageEvent("trajectories", summaries[::-1])] if summaries else []
