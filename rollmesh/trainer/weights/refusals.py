"""Report publications that no engine accepts, and end a run in which none does for too long.

- Each one is an error in the log, which the terminal shows, and a row of metrics.jsonl (`refused`,
  without a train step).
- Time in which all engines sleep is not counted: nothing could be accepted then.
"""

import time

from rollmesh.core.errors import PublishError
from rollmesh.core.logs import get_logger
from rollmesh.trainer.books.records import RunRecords
from rollmesh.trainer.weights.folder import Refusal

NO_STEP = -1
"""The step of rows of metrics.jsonl that belong to no train step."""
FIX = "it is tried again; the engines' own logs may show more"

log = get_logger()


class Refusals:
    """Refused publications of a run; the train loop checks them between steps and as it waits."""

    def __init__(self, records: RunRecords, timeout_s: float) -> None:
        """`timeout_s` is how long no engine may accept anything."""
        self._records = records
        self._timeout_s = timeout_s
        self._last: Refusal | None = None
        self._since_s = 0.0

    def look(self, refusal: Refusal | None, *, all_asleep: bool) -> None:
        """Take the outcome of the last publication; PublishError if it is refused for too long."""
        now_s = time.monotonic()
        if refusal is not self._last:
            if self._last is None:
                self._since_s = now_s
            self._report(refusal)
            self._last = refusal
        if refusal is None or all_asleep:
            self._since_s = now_s
        elif now_s >= self._since_s + self._timeout_s:
            raise PublishError(
                f"publish.accept_timeout_s = {self._timeout_s:g}: no engine accepted new weights "
                f"for so long; version {refusal.policy_version}: {refusal.reason}; start the "
                "engines again, or raise publish.probe_tolerance if they are known to be right, "
                "then --resume"
            )

    def _report(self, refusal: Refusal | None) -> None:
        if refusal:
            error = f"no engine serves: {refusal.reason}"
            policy_version = refusal.policy_version
            log.error("weights.refused", policy_version=policy_version, error=error, fix=FIX)
            self._write(policy_version, refusal.reason)
        else:
            assert self._last
            self._write(self._last.policy_version, "")

    def _write(self, policy_version: int, reason: str) -> None:
        """A row that is no train step's; an empty reason ends a refusal."""
        row = {"step": NO_STEP, "policy_version": policy_version, "refused": reason}
        self._records.step(row)
        self._records.flush()
