"""One sampled turn, as its readers see it: the tokens so far, its end, and the wait for more.

Invariants: readers change nothing but by coming and going, or by sealing it; whoever waits is woken
at new tokens and at every end. Made and woken by legs.py; driven by replies and sessions.
"""

import asyncio
from array import array
from collections.abc import Callable

from rollmesh.core.errors import EngineError
from rollmesh.core.types import VersionRun
from rollmesh.engine.answers import TopLogprobs
from rollmesh.runtime.generation import Event, GenerationMachine, GenerationState
from rollmesh.runtime.generation_events import Joined, Left, Sealed

Drive = Callable[["Generation", Event], None]


class Generation:
    """See the module."""

    def __init__(
        self, machine: GenerationMachine, drive: Drive, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.machine = machine
        sampled = machine.sampled
        self.token_ids: array[int] = sampled.token_ids
        """All sampled tokens so far, the stop token included."""
        self.logprobs: array[float] = sampled.logprobs
        """One per token."""
        self.top_logprobs: list[TopLogprobs] = sampled.top_logprobs
        """One per token where the request asked for them."""
        self.policy_versions: list[VersionRun] = sampled.policy_versions
        """Runs that add up to the tokens."""
        self.engines: list[str] = sampled.engines
        """Where they ran; runs name places in it."""
        self._drive = drive
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def state(self) -> GenerationState:
        return self.machine.state

    @property
    def finish_reason(self) -> str:
        """`stop` or `length` once COMMITTED, else ''."""
        return self.machine.finish_reason

    @property
    def matched_stop(self) -> int | str | None:
        """The token or string that stopped it."""
        return self.machine.matched_stop

    @property
    def error(self) -> EngineError | None:
        """Why it is VOID."""
        return self.machine.error

    def join(self) -> None:
        """A reader comes; a parked generation goes on from its exact tokens."""
        self._drive(self, Joined())

    def leave(self) -> None:
        """A reader goes; the last one parks a running generation."""
        self._drive(self, Left())

    def seal(self, reason: str) -> None:
        """End it, VOID, unless it is COMMITTED; every waiter is woken."""
        self._drive(self, Sealed(reason))

    async def wait(self, num_tokens: int) -> bool:
        """Until there are more than `num_tokens` tokens (True) or no more will come (False)."""
        while len(self.token_ids) <= num_tokens:
            if self.state in (GenerationState.COMMITTED, GenerationState.VOID):
                return False
            self._waiters.append(waiter := self._loop.create_future())
            await waiter
        return True

    def wake(self) -> None:
        """Let every waiter look again; the sampler's."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
