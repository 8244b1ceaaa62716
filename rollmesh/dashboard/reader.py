"""Reads a run folder as it grows and says what the page must be told.

Owns the folder's files as rows and the picture they make. Invariants: a poll reads a bounded
amount; a run folder that was replaced by a new run's is read anew, and so is one whose trainer
died and goes on from before its last lines; what a poll returns brings a page that held the state
before it to the state after it. Driven by the page's one polling task.
"""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rollmesh.core.run_state import EVAL_MESH, SUMMARY_FILE, RunRecord, RunState, read_record
from rollmesh.dashboard.evaluation import EvalView, is_evaluation
from rollmesh.dashboard.rowfile import RowFile
from rollmesh.dashboard.rows import (
    ConfigRow,
    DropRow,
    StepRow,
    SummaryRow,
    TelemetryRow,
    TrajectoryRow,
    TrajectorySummary,
    parse_step,
)
from rollmesh.dashboard.shelf import Shelf
from rollmesh.dashboard.tokens import TokenText
from rollmesh.dashboard.view import RunView

LISTED_TRAJECTORIES = 50
"""The page's list holds so many."""

Row = TypeVar("Row")


class PageEvent(msgspec.Struct, frozen=True):
    """Something the page is told: `state` replaces all that it has, the others add to it."""

    name: str
    data: Any


class Mark(NamedTuple):
    """What tells a page's copy of the plots from ours: compared before and after a poll."""

    inode: int
    num_cuts: int
    step_thinnings: int
    telemetry_thinnings: int


class RunReader:
    """One run folder, followed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inode = 0
        self._num_cuts = 0
        self._token_text: TokenText | None = None
        self._open()

    def poll(self, unix_s: float) -> list[PageEvent]:
        """Read what is new; what a page must be told of it."""
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
        """Everything that the page shows, bounded in size."""
        return {
            "run": self.view.head(unix_s),
            "steps": self.view.steps.rows(),
            "learning": self.view.learning(),
            "evaluation": self._picture(),
            "telemetry": self.view.telemetry.rows(),
            "fleet": self.view.fleet(),
            "trajectories": self.trajectories(LISTED_TRAJECTORIES),
        }

    def trajectories(self, limit: int) -> list[TrajectorySummary]:
        """The latest trajectories, newest first."""
        return self._shelf.recent(limit)

    def trajectory(self, rollout_id: str) -> TrajectoryRow | None:
        """A whole trajectory; blocks on the disk."""
        return self._shelf.load(rollout_id)

    def token_text(self) -> TokenText:
        """The run's tokenizer, loaded when first asked for; blocks on the disk."""
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
        self._drops = RowFile(self.folder / "drops.jsonl", DropRow)
        self._shelf = Shelf(self.folder / "trajectories.jsonl")

    @property
    def _mesh_folder(self) -> Path:
        """Where launch writes: the folder, or in that of an evaluation its mesh's."""
        return self.folder / EVAL_MESH if self._evaluation else self.folder

    def _poll_files(self) -> list[PageEvent]:
        self._read_settings()
        return [
            *self._poll_steps(),
            *self._poll_evaluation(),
            *self._poll_telemetry(),
            *self._poll_trajectories(),
        ]

    def _mark(self) -> Mark:
        view, thinned = self.view, self.view.telemetry.num_thinnings
        return Mark(self._inode, self._num_cuts, view.steps.num_thinnings, thinned)

    def _read_settings(self) -> None:
        view = self.view
        view.record = read_record(self._mesh_folder)
        if self._evaluation and view.record is None and (self.folder / SUMMARY_FILE).exists():
            view.record = RunRecord(state=RunState.DONE)  # on a mesh that was there before
        if config := self._changed("config.json", ConfigRow):
            view.config, self._token_text = config, None
        summary = self._changed("summary.json", SummaryRow)
        if summary and summary.reward_untrained is not None:
            view.reward_untrained = summary.reward_untrained
            view.success_untrained = summary.success_untrained
        files = (self._steps, self._telemetry, self._drops, self._shelf)
        view.num_bad_lines = sum(file.num_bad_lines for file in files)
        if self._evaluation:
            view.num_bad_lines += self._evaluation.num_bad_lines

    def _changed(self, name: str, row_type: type[Row]) -> Row | None:
        """The content of a small file that was written since the last call."""
        path = self.folder / name
        try:
            mtime = path.stat().st_mtime
            if self._settings_mtimes.get(name) == mtime:
                return None
            row = msgspec.json.decode(path.read_bytes(), type=row_type)
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
        return [PageEvent("evaluation", self._picture())]

    def _picture(self) -> dict[str, Any] | None:
        threshold = self.view.config.pass_threshold
        return self._evaluation.picture(threshold) if self._evaluation else None

    def _poll_telemetry(self) -> list[PageEvent]:
        rows = self._telemetry.read()
        plotted = [numbers for row in rows if (numbers := self.view.add_telemetry(row))]
        if not rows:
            return []
        return [PageEvent("telemetry", {"rows": plotted, "fleet": self.view.fleet()})]

    def _poll_trajectories(self) -> list[PageEvent]:
        summaries = self._shelf.read()[-LISTED_TRAJECTORIES:]
        return [PageEvent("trajectories", summaries[::-1])] if summaries else []
