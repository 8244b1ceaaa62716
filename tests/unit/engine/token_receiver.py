"""A token receiver that records its calls, and requests to a scripted engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from rollmesh.core.errors import EngineError
from rollmesh.core.types import SamplingParams
from rollmesh.engine.backend import EngineRequest, TokenChunk
from rollmesh.testing.engine import endless_token

PROMPT = [5, 6, 7]
PATIENCE_S = 60.0


class TokenRecorder:
    """Record the chunks and the end of one request; wait for them."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.ends: list[EngineError | None] = []
        self._moved = asyncio.Event()

    def on_chunk(self, chunk: TokenChunk) -> None:
        assert not self.ends
        self.chunks.append(chunk)
        self._moved.set()

    def on_end(self) -> None:
        self.ends.append(None)
        self._moved.set()

    def on_error(self, error: EngineError) -> None:
        self.ends.append(error)
        self._moved.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a call has made `condition` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def until_tokens(self, num_tokens: int) -> None:
        """Wait for `num_tokens` tokens."""
        await self.until(lambda: len(self.token_ids) >= num_tokens)

    async def until_ended(self) -> None:
        """Wait for the end of the request."""
        await self.until(lambda: self.ends)


def engine_request(*, num_tokens: int = 5, **fields: Any) -> EngineRequest:
    """A request for PROMPT, with these fields replaced."""
    plain = EngineRequest(
        rid="r",
        prompt_ids=PROMPT,
        params=SamplingParams(max_tokens=num_tokens),
        max_new_tokens=num_tokens,
        extra_key="0",
        stream=False,
    )
    return msgspec.structs.replace(plain, **fields)


def expected(num_tokens: int, policy_version: int = 0) -> list[int]:
    """The tokens that an engine of `endless_token` samples after PROMPT."""
    context = list(PROMPT)
    for _ in range(num_tokens):
        context.append(endless_token(policy_version, context))
    return context[len(PROMPT) :]
