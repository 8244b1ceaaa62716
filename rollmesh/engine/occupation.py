"""What an engine says of its memory: by the name of its weights, which outlives who gave it.

    7 --its coordinator renames it--> moving-7 --memory released--> released-7
    released-7 --renamed--> moving-7 --memory taken again--> moving-7 --weights loaded--> 8

SGLang tells nobody whether its memory is released; but it keeps, until its process ends, the name
that it was given, and weights whose memory was released are gone. Invariants: such a name is no
policy version, so nobody is sent there; `moving` is what nobody knows until it is released again.
Driven by the coordinator, and by an embedded engine that starts asleep.
"""

import enum
from collections.abc import Awaitable, Callable


class EngineMemory:
    """The memory of weights, keys and values of one engine; part of its client."""

    def __init__(self, order: Callable[[str], Awaitable[bytes]]) -> None:
        """`order` has the engine do what a path says."""
        self._order = order

    async def release(self) -> None:
        """Give it up; the weights are lost.

        Only while it is paused and has flushed: SGLang falls over a request that still runs.
        """
        await self._order("/release_memory_occupation")

    async def retake(self) -> None:
        """Have it again; weights must be loaded before it generates."""
        await self._order("/resume_memory_occupation")


class Occupation(enum.StrEnum):
    """Whether an engine has its memory."""

    HELD = "held"
    MOVING = "moving"
    RELEASED = "released"


def name_of(occupation: Occupation, weights: str) -> str:
    """What the engine's weights are called, which were `weights` before."""
    return weights if occupation is Occupation.HELD else f"{occupation.value}-{weights}"


def told_by(name: str) -> tuple[Occupation, str]:
    """How it is, and what its weights are or were called."""
    for occupation in (Occupation.MOVING, Occupation.RELEASED):
        if name.startswith(f"{occupation.value}-"):
            return occupation, name.removeprefix(f"{occupation.value}-")
    return Occupation.HELD, name
