"""The model that an engine makes ahead, beside the one that it uses.

    none --stage--> MAKING --made--> STAGED --take, drop, a newer one--> none
                    MAKING --fails--> none;  --take, drop, a newer one--> none, made for the taker

Invariant: there is one at most, and it goes to who says what it was made of, once; what is made
after it was dropped is nobody's, so no second model stays in memory. Driven by weight_routes.py,
on its loop.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.model import Model

DROPPED = "not staged: other weights came meanwhile"

Saying = tuple[list[str], str | None]
"""What a model is made of, and its version."""


class _Staged(NamedTuple):
    says: Saying
    model: asyncio.Future[Model]
    """Done once it is made."""


class Staging:
    """See the module."""

    def __init__(self) -> None:
        self._staged: _Staged | None = None

    async def stage(self, says: Saying, make: Callable[[], Model]) -> None:
        """Returns once it is made, or was taken; ModelError where it is none, or was dropped."""
        self.drop()  # its memory first
        making = asyncio.get_running_loop().run_in_executor(None, make)
        staged = self._staged = _Staged(says, making)
        try:
            await making
        except ModelError:
            if self._staged is staged:
                self.drop()
            raise
        if self._staged is not staged:
            raise ModelError(DROPPED)

    def take(self, says: Saying) -> asyncio.Future[Model] | None:
        """What says the same, made or under way; what says another thing is dropped."""
        staged, self._staged = self._staged, None
        return staged.model if staged and staged.says == says else None

    def drop(self) -> None:
        """It is not what comes next."""
        self._staged = None
