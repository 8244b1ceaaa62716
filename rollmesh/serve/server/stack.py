"""Where on its stack a thread is, in words: the function that holds things up, and for whom.

Invariant: one line, short; a library's function is named with the nearest caller that is neither a
library's nor ours, since that is where its user can change something. Driven by beats.py and
loading.py.
"""

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THEIRS = (
    "<frozen ",
    *sorted({sysconfig.get_path(kind) for kind in _KINDS}),
    str(Path(__file__).parents[2]),
)


def whereabouts(thread_id: int) -> str:
    """Where that thread is now; '' if it has ended."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - its documented use
    return describe(frame) if frame else ""


def describe(frame: FrameType) -> str:
    """The function that a frame is in, where, and for which function of the user's."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_NOT_THEIRS):
        caller = caller.f_back
    if caller is None or caller is frame:
        return _place(frame)
    return f"{_place(frame)} for {_place(caller)}"


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
