"""Each measure against growth, taken away: what the soak's ablations put in its place.

    evict     a finished rollout's scope stays in the registry, with all that it holds
    discard   every request's body stays in a table of intercepts
    trim      the heap is laid out as the C library has it, and never trimmed (mallopt, keeper: the
              two halves of it)
    dedupe    each turn holds its own copy of the history that it was asked with, images and all,
              as long as its session
    spill     nothing is moved to disk

Invariant: a function here reverts one measure and nothing else, before the process begins; the code
of rollmesh/ has no switch for it. Of tokens mode. Driven by _soak_worker.py.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path

from rollmesh.core.heap import Heap
from rollmesh.runtime import blobs
from rollmesh.runtime.chat import Turn
from rollmesh.runtime.replies import Reply
from rollmesh.runtime.scopes import Scope
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.request import HttpRequest

HEAP = ("mallopt", "keeper")


def keep_scopes() -> None:
    """evict"""
    Scope.end = Scope.close  # type: ignore[method-assign]


def keep_bodies() -> None:
    """discard"""
    read, bodies = HttpRequest.read, list[bytes]()

    @wraps(read)
    async def kept(request: HttpRequest, max_bytes: int, silence_s: float) -> bytes:
        body = await read(request, max_bytes, silence_s)
        bodies.append(body)
        return body

    HttpRequest.read = kept  # type: ignore[assignment, method-assign]


def copy_histories() -> None:
    """dedupe"""
    attach, forget = Session.attach, Session.forget
    copies: dict[str, list[bytearray]] = {}

    @wraps(attach)
    async def copied(session: Session, turn: Turn) -> tuple[Reply, ...]:
        own = copies.setdefault(session.session_id, [])
        own += map(bytearray, (turn.messages_raw, *turn.messages))
        return await attach(session, turn)

    @wraps(forget)
    def forgotten(session: Session) -> None:
        copies.pop(session.session_id, None)
        forget(session)

    Session.attach, Session.forget = copied, forgotten  # type: ignore[assignment, method-assign]


def leave_heap() -> None:
    """mallopt"""
    Heap.settle = lambda heap: False  # type: ignore[assignment, method-assign]


def leave_free() -> None:
    """keeper"""
    Heap.can_trim = property(lambda heap: False)  # type: ignore[assignment, method-assign]


def leave_both() -> None:
    """trim"""
    leave_heap()
    leave_free()


def spill_nothing() -> None:
    """spill"""
    settle = blobs.settle

    def settled(max_memory_bytes: int, folder: Path | None) -> None:
        del max_memory_bytes
        settle(sys.maxsize, folder)

    blobs.settle = settled


MEASURES: dict[str, Callable[[], None]] = {
    "evict": keep_scopes,
    "discard": keep_bodies,
    "trim": leave_both,
    "dedupe": copy_histories,
    "spill": spill_nothing,
}
_PARTS = {"mallopt": leave_heap, "keeper": leave_free}


def ablate(names: Sequence[str]) -> None:
    """Take these measures, or halves of one, away."""
    for name in names:
        (MEASURES | _PARTS)[name]()
