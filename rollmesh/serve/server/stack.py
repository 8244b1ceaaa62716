"""Places in source code: where a thread is, and where an exception of environment code came from.

- A place is in a file of the user's if there is one, and not in a library, the standard library or
  rollmesh, since the user can change only that.
"""

import inspect
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

from rollmesh.core.errors import RollmeshError
from rollmesh.core.types import ErrorPlace

_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THEIRS = (
    "<frozen ",
    *sorted({sysconfig.get_path(kind) + os.sep for kind in _KINDS}),
    str(Path(__file__).parents[2]) + os.sep,
)


def whereabouts(thread_id: int) -> str:
    """Return where that thread is now; '' if it has ended."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - its documented use
    return describe(frame) if frame else ""


def describe(frame: FrameType) -> str:
    """Return the function of a frame, its place, and the function of the user's that it runs
    for.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_NOT_THEIRS):
        caller = caller.f_back
    if caller is None or caller is frame:
        return _place(frame)
    return f"{_place(frame)} for {_place(caller)}"


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"


def cause_of(error: BaseException) -> BaseException:
    """Return `error`, or the first exception inside it if it is a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def place_of(error: BaseException, method: Any) -> ErrorPlace | None:
    """Return where `error` was raised by a call of `method`, a method of an environment.

    That is the innermost frame in a file of the user's. Without one it is the innermost frame in
    the file that defines `method`, or else the definition of `method`; but None for an error that
    rollmesh raised on purpose in an environment of its own.
    """
    kind, found, own = type(error).__name__, None, None
    code = _code_of(method)
    trace = error.__traceback__
    while trace is not None:
        frame_code = trace.tb_frame.f_code
        place = ErrorPlace(kind, frame_code.co_filename, trace.tb_lineno, frame_code.co_name)
        if not place.file.startswith(_NOT_THEIRS):
            found = place
        elif code is not None and place.file == code.co_filename:
            own = place
        trace = trace.tb_next
    if found is not None or code is None:
        return found
    if code.co_filename.startswith(_NOT_THEIRS):
        return None if isinstance(error, RollmeshError) else own
    return own or ErrorPlace(kind, code.co_filename, code.co_firstlineno, code.co_name)


def _code_of(method: Any) -> Any:
    """Return the code object of a function or method; None for a callable without one."""
    function = method.__func__ if isinstance(method, MethodType) else method
    return getattr(inspect.unwrap(function), "__code__", None)
