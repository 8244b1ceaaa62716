"""What a trainer finds in its run's folder as it begins: nothing, or what an earlier life left.

    journal and newest savepoint --plan_recovery--> what is redone, ready, open, dropped
                                 --> counts, pacing and records that go on from there

Invariant: a trainer always goes on from what it finds, so that whoever starts one again need say
nothing; a life after the first leaves one line in the log and one row in recoveries.jsonl. Driven
by process.py, before the loop.
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
from rollmesh.trainer.books.records import RunRecords, Tally, read_recoveries
from rollmesh.trainer.recovery.plan import Recovery, plan_recovery
from rollmesh.trainer.savepoints.shelf import Saved, Savepoints
from rollmesh.trainer.staleness import StalenessManager, StalenessSettings, StalenessState
from rollmesh.wire.keys import Role, read_keys

log = get_logger()

MAX_LIVES = 10
"""A step that ends every trainer would be done again for ever, slowly enough for launch not to see
a crash loop."""


class Revival(msgspec.Struct, frozen=True):
    """See the module."""

    saved: Saved | None
    """The newest savepoint."""
    recovery: Recovery
    is_first: bool
    """No life was before this one."""

    @property
    def covered(self) -> dict[str, int]:
        """How much of each record file stays."""
        return self.saved.state.offsets if self.saved else {}


def open_client(config: Config, router: str) -> RolloutClient:
    """The run's client; UserError where another trainer has its journal, or that is damaged."""
    folder, bind = config.run_folder(), config.trainer.bind
    try:
        return RolloutClient(
            router, config.journal, folder, read_keys(role=Role.PUBLISHER), bind=bind, keep=True
        )
    except JournalDamaged as error:
        raise UserError(
            f"{error}; put back what stood there, or move journal/ and weights/ out of {folder}: "
            "--resume then goes on from the newest savepoint, without what came since"
        ) from None
    except JournalError as error:
        raise UserError(f"{error}; a run has one trainer, and its folder is its own") from None


def find(client: RolloutClient, savepoints: Savepoints) -> Revival:
    """Look, before the client is started.

    UserError where all savepoints are broken: what goes on from the first weights is not this run.
    """
    saved, known = savepoints.newest(), client.history.saved
    if saved is None and known.gone:
        raise UserError(
            f"{savepoints.folder}: none of its savepoints is whole, and the journal has let go of "
            f"what that of {known.num_steps} steps held; the log says what is broken: put one "
            "back, or begin anew without --resume"
        )
    recovery = plan_recovery(saved.state if saved else None, client.history)
    return Revival(saved, recovery, saved is None and client.history == History())


def restored_tally(config: Config, revival: Revival) -> Tally:
    """The counts of all lives."""
    trainer, recovery, tally = config.trainer, revival.recovery, Tally(config.pass_threshold)
    if revival.saved:
        tally.restore(revival.saved.state.tally)
    if recovery.num_asked:  # by the journal: what waited for room there was never asked for
        # One of an earlier release has no word on evaluations.
        tally.num_evals = num_in(recovery.evals) or tally.num_evals
        num_groups = recovery.num_asked - tally.num_evals
        tally.num_asked = num_groups * trainer.samples_per_group
    return tally


def staleness_of(config: Config, revival: Revival | None = None) -> StalenessManager:
    """The pacing that the settings ask for, with what was counted before."""
    trainer = config.trainer
    settings = StalenessSettings(
        batch=trainer.groups_per_step * trainer.samples_per_group,
        max_staleness=trainer.max_staleness,
        max_concurrent=trainer.max_running_groups * trainer.samples_per_group,
        policy=trainer.stale_policy,
        formula=trainer.staleness_formula,
    )
    if revival is None:
        return StalenessManager(settings)
    restored = None
    if revival.saved:
        state = revival.saved.state.staleness
        restored = msgspec.convert(state, StalenessState, str_keys=True)
    newest, step = max(revival.recovery.step_of_version.items())
    return StalenessManager(settings, step, newest, restored)


def tell(revival: Revival, records: RunRecords) -> None:
    """Leave word of what this life goes on with, what it does without, and why.

    UserError where MAX_LIVES before it went on with the very same and came to nothing.
    """
    if revival.is_first:
        return
    earlier = read_recoveries(records.folder)
    row = row_of(revival, life=len(earlier) + 2)
    alike = itertools.takewhile(lambda each: _is_alike(each, row), reversed(earlier))
    gives_up = len(list(alike)) >= MAX_LIVES
    log.info("trainer.recovered", **row)
    records.recovery(row | {"gave_up": gives_up})
    if gives_up:
        raise UserError(
            f"{records.folder}: {MAX_LIVES} trainers in a row have died at step "
            f"{revival.recovery.next_step}; logs/trainer.out there says of what: mend that, then "
            "--resume"
        )


def _is_alike(earlier: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a life that began so has brought nothing since."""
    names = ("num_steps", "redone_steps", "num_ready", "num_open")
    return not earlier["gave_up"] and all(earlier[name] == row[name] for name in names)


def row_of(revival: Revival, life: int) -> dict[str, Any]:
    """For people, and for the summary."""
    recovery = revival.recovery
    parted = [each for each in recovery.parted if not recovery.is_eval(each.group_id)]
    dropped = [each.reason for each in recovery.drops] + [each.reason for each in parted]
    reasons = collections.Counter(reason.partition(":")[0] for reason in dropped)
    return {
        "life": life,
        "savepoint": revival.saved.folder.name if revival.saved else "",
        "num_steps": recovery.num_steps,
        "redone_steps": [each.step for each in recovery.redo],
        "num_ready": len(recovery.ready),
        "num_open": len(recovery.open_asks),
        "num_dropped": len(dropped),
        "dropped_for": dict(reasons),
        "policy_version": recovery.policy_version,
        "lost": list(recovery.lines),
    }
