"""How often, and for how long, engines may fail a generation before it is given up.

Owns the settings, and what went wrong since the last token. Invariants: a token makes all of it
good again; a cut that is nobody's fault, such as an update's, counts among `max_fruitless_legs`
alone; one engine's faults are put up with for `sick_s` where none better was to be had, so that a
caller hears what the engine says while it still listens. Times are of the generation's clock. Pure;
driven by generation.py.
"""

import msgspec

from rollmesh.core.errors import EngineBroke, EngineError, EngineOverloaded, EngineUnavailable
from rollmesh.engine.answers import UNVERSIONED

WHERE_TO_LOOK = "`rollmesh status`, or a gateway's /healthz, says more"
MAX_SAID_CHARS = 300
"""What an engine says goes on to agents; a page of HTML would not help them."""

_NOT_READY = "no engine is ready"
_BEHIND = "no engine has weights as new as this session has seen"

EngineLife = tuple[str, str]
"""(url, incarnation)"""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a generation is; all in time that is not paused by an update."""

    retry_window_s: float = 30.0
    engine_wait_s: float = 120.0
    answer_timeout_s: float = 90.0
    abort_repeat_s: float = 0.04
    """Wait after a first abort; grows from there."""
    abort_timeout_s: float = 5.0
    """A leg that does not end by then is dropped with the tokens that it did not show."""
    max_fruitless_legs: int = 16
    """So many legs in a row without a token, and the engines are given up."""
    max_full_queues: int = 8
    """So many legs in a row that meet a full queue, and the caller is told to come back later."""
    max_broken_legs: int = 3
    """So many legs that break before the first token of a request with images, and it is why."""
    sick_s: float = 1.5
    """An engine whose faults go on for so long, with nobody to take over, is given up."""
    backoff_s: float = 0.05
    """Wait after a second fruitless leg in a row; doubles from there."""
    max_backoff_s: float = 1.0


class Patience:
    """One generation's. Each of its questions is answered by the error to end with, or None."""

    __slots__ = (
        "_faulted",
        "_last_said",
        "_missing",
        "_num_broken",
        "_num_fruitless",
        "_num_full_queues",
        "_settings",
        "_sick_since_s",
        "not_before_s",
    )

    def __init__(self, settings: GenerationSettings) -> None:
        self.not_before_s = 0.0
        """When the next leg may begin."""
        self._settings = settings
        self._num_fruitless = 0
        self._num_full_queues = 0
        self._num_broken = 0
        self._faulted: set[EngineLife] = set()
        """Engines that failed it since the last token, each in one life."""
        self._sick_since_s = 0.0
        self._missing = _NOT_READY
        self._last_said = ""

    def on_tokens(self) -> None:
        """An engine gets on with it."""
        self._num_full_queues = 0

    def on_full_queue(self, detail: str) -> EngineError | None:
        """No leg was begun: the engine has no room."""
        self._num_full_queues += 1
        is_enough = self._num_full_queues > self._settings.max_full_queues
        return EngineOverloaded(detail) if is_enough else None

    def on_broken(self, detail: str) -> EngineError | None:
        """The engine fetches and opens images before it samples: one such request would fence all.

        SGLang answers 500, or cuts the stream, where an image's address leads nowhere.
        """
        self._num_broken += 1
        if self._num_broken < self._settings.max_broken_legs:
            return None
        why = f"engines break at this request, which shows images; are they in reach? {detail}"
        return EngineBroke(why)

    def on_fault(self, life: EngineLife, detail: str, now_s: float) -> EngineError | None:
        """The engine failed without a token, and the request is not known to be why."""
        self._num_full_queues = 0
        self._last_said = detail[:MAX_SAID_CHARS]
        if not self._faulted:
            self._sick_since_s = now_s
        is_again = life in self._faulted
        self._faulted.add(life)
        if is_again and now_s - self._sick_since_s >= self._settings.sick_s:
            return self._unavailable("the engine fails at every try, and no other is there")
        return None

    def on_cut(self, is_fruitful: bool, now_s: float) -> EngineError | None:
        """A leg is over and the turn is not, whosever fault it was."""
        if is_fruitful:
            self._num_fruitless = 0
            self._faulted.clear()
            return None
        self._num_fruitless += 1
        if self._num_fruitless > self._settings.max_fruitless_legs:
            return self._unavailable("no engine got on with it; are they healthy?")
        if self._num_fruitless > 1:
            wait_s = self._settings.backoff_s * 2.0 ** (self._num_fruitless - 2)
            self.not_before_s = now_s + min(wait_s, self._settings.max_backoff_s)
        return None

    def on_older_weights(self, url: str, served: int, announced: int) -> None:
        """A leg's tokens were refused: of older weights than the session's or the fleet table's."""
        named = "unnumbered weights" if served == UNVERSIONED else f"policy version {served}"
        self._last_said = f"{url}: samples with {named}, the fleet table has {announced}"

    def on_missing(self, why: str, *, is_behind: bool = False) -> None:
        """No engine is fit, and why; those that are READY are behind the session."""
        self._missing = _BEHIND if is_behind else _NOT_READY
        self._last_said = why[:MAX_SAID_CHARS] or self._last_said

    def without_engine(self) -> EngineError:
        """None was fit for as long as a call waits."""
        return self._unavailable(self._missing)

    def _unavailable(self, why: str) -> EngineUnavailable:
        last = f" (last: {self._last_said})" if self._last_said else ""
        return EngineUnavailable(f"{why}{last}; {WHERE_TO_LOOK}")
