"""Read the output of an SGLang server: the progress of its load, and the reason of its end.

- Pure: lines in, text out. SGLang's messages are no interface: a line that is not known changes
  nothing, and an unknown end is described by the last error line.
"""

import re
from collections import deque
from typing import NamedTuple

_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d [^\]]*\]\s*")
"""Time, and the rank behind it, before most lines."""
_COUNT = re.compile(r"(\d+)/(\d+) \[")
"""A progress bar of tqdm: `| 3/8 [00:01<00:02, ...`."""
_PERCENT = re.compile(r"\b(\d+)%")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)\b:? ?")
"""The last line of a Python traceback."""
_USAGE_ERROR = re.compile(r"error: (.*(?:argument|choice|option).*)")
"""argparse's complaint about the command line."""
_NO_MODULE = re.compile(r"(?:ModuleNotFoundError: )?No module named '?([\w.]+)'?")
MAX_LINES = 400
"""Last lines of the output in which the reason of an end is searched."""
MAX_REASON_CHARS = 300

_PHASES = (
    ("Init parallel begin", "connecting the GPUs"),
    ("Init torch distributed begin", "connecting the GPUs"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating KV cache"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("Capture decode CUDA graph begin", "capturing CUDA graphs"),
    ("Capture prefill CUDA graph begin", "capturing CUDA graphs"),
    ("Application startup complete", "warming up"),
    ("The server is fired up", "ready"),
)
"""The beginnings of phases, and their names."""
_LOADING, _CAPTURING = "loading weights", "capturing CUDA graphs"


class LoadState(NamedTuple):
    """How far a load is."""

    phase: str = "starting"
    amount: str = ""
    """Such as `3/8` or `43%`; '' if unknown."""

    def __str__(self) -> str:
        return f"{self.phase} {self.amount}".strip()


class LoadProgress:
    """The progress of one load, folded from its output."""

    def __init__(self) -> None:
        self.state = LoadState()

    def add(self, line: str) -> bool:
        """Fold a line; return whether the state changed."""
        before = self.state
        for words, phase in _PHASES:
            if words in line and phase != before.phase:
                self.state = LoadState(phase)
        bar = _COUNT.search(line)
        if bar and ("shards" in line or "Capturing" in line):
            phase = _LOADING if "shards" in line else _CAPTURING
            self.state = LoadState(phase, f"{bar[1]}/{bar[2]}")
        return self.state != before


class EndReason(NamedTuple):
    """Why a server ended."""

    text: str
    """The reason and its remedy, in one line; '' if the output has none."""
    is_port_taken: bool = False
    """Whether another program took a port, so that the next start may succeed."""


class OutputTail:
    """The last lines of a server's output."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def add(self, line: str) -> None:
        """Append a line."""
        if text := _STAMP.sub("", line).strip():
            self._lines.append(text)

    def reason(self, code: int = 1) -> EndReason:
        """Return the reason of the end with the exit code `code`, by the lines so far."""
        for line in self._lines:
            if (found := _known_reason(line)) is not None:
                return found
        errors = [line for line in self._lines if _ERROR.match(line)]
        # A child's exception is followed by that of the parent which lost it, so the first counts.
        if errors:
            return EndReason(_short(errors[0]))
        is_killed = code < 0  # then the last line is not the reason
        return EndReason("" if is_killed else _short(next(reversed(self._lines), "")))


def _known_reason(line: str) -> EndReason | None:
    lowered = line.lower()
    if "out of memory" in lowered and ("cuda" in lowered or "hip" in lowered):
        return EndReason(
            f"{_short(line)}; lower --mem-fraction-static in engine.args, give each server more "
            "GPUs (engine.gpus_each), or end what else uses the GPU"
        )
    if "Not enough memory" in line:
        return EndReason(f"{_short(line)}; set it in engine.args")
    if "address already in use" in lowered or "port is already in use" in lowered:
        return EndReason(f"a port is taken: {_short(line)}", is_port_taken=True)
    if found := _NO_MODULE.search(line):
        if line.startswith("Ignore import error"):
            return None
        if line.startswith("ModuleNotFoundError") or found[1].startswith("sglang"):
            return EndReason(
                f"its Python has no package {found[1]}: install it there, or name another Python "
                "by engine.python"
            )
    if found := _USAGE_ERROR.search(line):
        return EndReason(f"engine.args: {_short(found[1])}")
    return None


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."
