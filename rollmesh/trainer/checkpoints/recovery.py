"""Find what earlier incarnations left in the run's folder, and continue from it.

    journal and newest checkpoint --plan_recovery--> what is redone, ready, open, dropped
                                  --> counts, pacing and records that continue from there

- A trainer always continues from what it finds; restarting it needs no option.
- Every incarnation after the first leaves one log line and one row in recoveries.jsonl.
"""

import collections
import itertools
from typing import Any

import msgspec

from rollmesh.core.config import Config
from rollmesh.core.errors import JournalDamaged, JournalError, UserError
from rollmesh.core.logs import get_logger
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.journal import History
from rollmesh.serve.client.journal_entries import num_in
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan, plan_recovery
from rollmesh.trainer.checkpoints.store import CheckpointStore, SavedCheckpoint
from rollmesh.trainer.reports.records import RunRecords, Tally, read_recoveries
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings, StalenessState
from rollmesh.wire.keys import Role, read_keys

log = get_logger()

MAX_INCARNATIONS = 10
"""Limit of restarts at one step: the trainer would otherwise repeat it forever, too slowly for
launch to detect a crash loop."""


class ResumePoint(msgspec.Struct, frozen=True):
    """State from which a trainer resumes, as read at its start."""

    saved: SavedCheckpoint | None
    """The newest complete checkpoint."""
    recovery: RecoveryPlan
    is_first: bool
    """Whether this is the run's first incarnation."""

    @property
    def covered(self) -> dict[str, int]:
        """Bytes of each record file that stay."""
        return self.saved.state.offsets if self.saved else {}


def open_client(config: Config, router: str) -> RolloutClient:
    """Open the run's client; UserError if another trainer uses its journal, or if that is
    damaged."""
    folder, keys = config.run_folder(), read_keys(role=Role.PUBLISHER)
    advertise = config.trainer.advertise or config.network.advertise
    try:
        return RolloutClient(
            router,
            config.journal,
            folder,
            keys,
            bind=config.trainer.bind,
            advertise=advertise,
            keep=True,
        )
    except JournalDamaged as error:
        raise UserError(
            f"{error}; restore its files, or move journal/ and weights/ out of {folder}: "
            "--resume then goes on from the newest checkpoint, without anything later"
        ) from None
    except JournalError as error:
        raise UserError(f"{error}; a run folder can be used by one trainer at a time") from None


def find_resume_point(client: RolloutClient, checkpoints: CheckpointStore) -> ResumePoint:
    """Find the resume point, before the client is started.

    UserError if all checkpoints are damaged: continuing from the initial weights would not be this
    run.
    """
    saved, known = checkpoints.newest(), client.history.saved
    if saved is None and known.gone:
        raise UserError(
            f"{checkpoints.folder}: no checkpoint is intact, and the journal no longer has "
            f"what the one of {known.num_steps} steps held; the log names the damage: restore "
            "one, or start again without --resume"
        )
    recovery = plan_recovery(saved.state if saved else None, client.history)
    return ResumePoint(saved, recovery, saved is None and client.history == History())


def restored_tally(config: Config, resume: ResumePoint) -> Tally:
    """Return the counts of all incarnations."""
    trainer, recovery, tally = config.trainer, resume.recovery, Tally(config.pass_threshold)
    if resume.saved:
        tally.restore(resume.saved.state.tally)
    if (
        recovery.num_asked
    ):  # counted by the journal: tasks that waited for space in it were never requested
        # Journals of earlier releases do not record evaluations.
        tally.num_evals = num_in(recovery.evals) or tally.num_evals
        num_groups = recovery.num_asked - tally.num_evals
        tally.num_asked = num_groups * trainer.samples_per_group
    return tally


def restored_staleness(config: Config, resume: ResumePoint | None = None) -> StalenessManager:
    """Return the configured staleness manager, with the counts of earlier incarnations."""
    trainer = config.trainer
    settings = StalenessSettings(
        batch=trainer.groups_per_step * trainer.samples_per_group,
        max_staleness=trainer.max_staleness,
        max_concurrent=trainer.max_running_groups * trainer.samples_per_group,
        policy=trainer.stale_policy,
        formula=trainer.staleness_formula,
    )
    if resume is None:
        return StalenessManager(settings)
    restored = None
    if resume.saved:
        state = resume.saved.state.staleness
        restored = msgspec.convert(state, StalenessState, str_keys=True)
    newest, step = max(resume.recovery.step_of_version.items())
    return StalenessManager(settings, step, newest, restored)


def report_resume(resume: ResumePoint, records: RunRecords) -> None:
    """Log and record what this incarnation continues from, what was lost, and why.

    UserError if the last MAX_INCARNATIONS continued from the same point without progress.
    """
    if resume.is_first:
        return
    earlier = read_recoveries(records.folder)
    row = resume_row(resume, incarnation=len(earlier) + 2)
    stuck = itertools.takewhile(lambda each: _made_no_progress(each, row), reversed(earlier))
    is_giving_up = len(list(stuck)) >= MAX_INCARNATIONS
    log.info("trainer.recovered", **row)
    records.recovery(row | {"gave_up": is_giving_up})
    if is_giving_up:
        raise UserError(
            f"{records.folder}: {MAX_INCARNATIONS} trainers in a row have died at step "
            f"{resume.recovery.next_step}; logs/trainer.out says why: fix the cause, then use "
            "--resume"
        )


def _made_no_progress(earlier: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether an incarnation that began with this row has made no progress since."""
    names = ("num_steps", "redone_steps", "num_ready", "num_open")
    return not earlier["gave_up"] and all(earlier[name] == row[name] for name in names)


def resume_row(resume: ResumePoint, incarnation: int) -> dict[str, Any]:
    """Return the row of recoveries.jsonl, also used by the summary."""
    recovery = resume.recovery
    parted = [each for each in recovery.parted if not recovery.is_eval(each.group_id)]
    dropped = [each.reason for each in recovery.drops] + [each.reason for each in parted]
    reasons = collections.Counter(reason.partition(":")[0] for reason in dropped)
    return {
        "life": incarnation,
        "savepoint": resume.saved.folder.name if resume.saved else "",
        "num_steps": recovery.num_steps,
        "redone_steps": [each.step for each in recovery.redo],
        "num_ready": len(recovery.ready),
        "num_open": len(recovery.open_asks),
        "num_dropped": len(dropped),
        "dropped_for": dict(reasons),
        "policy_version": recovery.policy_version,
        "lost": list(recovery.lines),
    }
