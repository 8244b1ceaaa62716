"""One engine under contract, and short ways to call it.

Nothing here depends on which engine it is; differences are read from its answers.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

Json = dict[str, Any]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
"""Number of tokens that take seconds, so that an order arrives during the generation."""
WAIT_S = 60.0


class EngineUnderContract:
    """An engine and short HTTP calls to it."""

    def __init__(self, client: httpx.AsyncClient, model_path: str, is_incremental: bool) -> None:
        self.client = client
        self.model_path = model_path
        self.is_incremental = is_incremental

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.client.post(route, json=body)

    async def get(self, route: str) -> Json:
        response = await self.client.get(route)
        assert response.status_code == 200, response.text
        found: Json = response.json()
        return found

    async def generate(self, prompt: list[int], **body: Any) -> Json:
        """Return the whole answer to one prompt."""
        body.setdefault("sampling_params", {"max_new_tokens": 4, "temperature": 0})
        response = await self.post("/generate", input_ids=prompt, **body)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    async def refusal(self, prompt: list[int], **sampling: Any) -> str:
        """Return the message of a 400."""
        response = await self.post("/generate", input_ids=prompt, sampling_params=sampling)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    @asynccontextmanager
    async def streaming(self, prompt: list[int], **body: Any) -> AsyncIterator[AsyncIterator[Json]]:
        """Yield the events of a stream; check that it ends with [DONE]."""
        asked = {"input_ids": prompt, "stream": True, **body}
        async with self.client.stream("POST", "/generate", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events(response)

    async def num_running(self) -> int:
        (load,) = (await self.get("/v1/loads"))["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    async def until_idle(self) -> None:
        """Poll until nothing runs."""
        await self.until_running(0)

    async def until_running(self, num: int) -> None:
        """Poll until `num` requests run."""
        async with asyncio.timeout(WAIT_S):
            while await self.num_running() != num:
                pass


def logprobs_of(answer: Json) -> list[float]:
    """Log-probs of the output tokens of an answer, or of an event."""
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def lines_of(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The lines of a stream. httpx's own reader also splits at a sampled U+2028 or U+0085, as
    Python's splitlines does.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()


async def events(response: httpx.Response) -> AsyncIterator[Json]:
    """The JSON of each event up to [DONE]."""
    async for line in lines_of(response):
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
