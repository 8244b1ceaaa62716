"""When a savepoint is begun.

    due   every `period_steps` steps, and when the journal is over its byte budget and one would
          free some of it

Invariants: what came due while another was being written is due after it; what a full journal asked
for and the disk refused is tried again, but not at once; one that would tell the journal nothing
new is not forced. Pure; driven by saver.py, and by the simulator.
"""

FORCED_AGAIN_S = 10.0
"""What a full journal asked for and the disk refused is tried again after this time."""


class Due:
    """See the module."""

    def __init__(self, period_steps: int, num_gone: int) -> None:
        """`num_gone` groups have left by the newest durable savepoint."""
        self._period_steps = period_steps
        self._num_gone = num_gone
        self._is_due = False
        self._force_from_s = 0.0

    def stepped(self, num_steps: int) -> None:
        """So many steps are done."""
        self._is_due = self._is_due or num_steps % self._period_steps == 0

    def is_now(self, num_gone: int, now_s: float, *, is_full: bool) -> bool:
        """Whether to begin one, if none is being written: `num_gone` groups have left by now, and
        `is_full` is the journal."""
        return self._is_due or (
            is_full and num_gone > self._num_gone and now_s >= self._force_from_s
        )

    def begun(self, now_s: float) -> None:
        """One is being written."""
        self._is_due = False
        self._force_from_s = now_s + FORCED_AGAIN_S

    def settled(self, num_gone: int) -> None:
        """It is durable, and knows that so many groups have left."""
        self._num_gone = num_gone
        self._force_from_s = 0.0
