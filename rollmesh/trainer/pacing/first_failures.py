"""Ends a run whose environment fails in every group from the first one on.

- Only failures with a place count: an engine that is unavailable leaves none, and InfraError is
  raised by an environment that says that something around it failed.
- One rollout with a reward ends the count for the rest of the run.
"""

from rollmesh.core.errors import EnvError, InfraError
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord

NUM_ALIKE = 16
"""So many groups that failed alike, before any has succeeded, end the run."""


class FirstFailures:
    """The count; `note` sees each group that arrives."""

    def __init__(self, env: str) -> None:
        self.has_succeeded = False
        """Whether any rollout of the run has had a reward; then nothing is counted any more."""
        self._env = env
        self._place: ErrorPlace | None = None
        self._num_alike = 0
        self._last = ""
        """The error and the task of the last one."""

    def note(self, record: GroupRecord) -> None:
        """Count a group that has arrived."""
        place, error = _failure_of(record)
        if place is None:
            self.has_succeeded |= any(each.reward is not None for each in record.rollouts)
        elif place.kind != InfraError.__name__:
            self._num_alike = self._num_alike + 1 if place == self._place else 1
            self._place, self._last = place, f"{error}; task {record.task.id}"

    def check(self) -> None:
        """Raise EnvError if NUM_ALIKE groups in a row failed alike and none has succeeded."""
        if self._num_alike >= NUM_ALIKE and not self.has_succeeded:
            raise EnvError(
                f'env = "{self._env}": the first {NUM_ALIKE} groups all failed alike: '
                f"{self._last}; fix that and --resume; the workers' logs in the run folder say more"
            )


def _failure_of(record: GroupRecord) -> tuple[ErrorPlace | None, str]:
    """The one place where all of the group failed, and the error; None if there is none."""
    ended = [each for each in record.rollouts if each.outcome is not Outcome.CANCELLED]
    if record.place and not any(each.place for each in ended):
        return record.place, record.reason  # the siblings' common score
    first: RolloutRecord | None = next(iter(ended), None)
    if first is None or any(each.place != first.place for each in ended):
        return None, ""
    return first.place, first.error
