"""One engine under contract, and short ways to ask it things.

Invariant: nothing here knows which engine it is; what differs is read from its own answers. Driven
by the tests of the contract.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

Json = dict[str, Any]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
"""Seconds of generation: what is ordered meanwhile comes in its middle."""
WAIT_S = 60.0


class EngineUnderContract:
    """HTTP calls in few words."""

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
        """A whole answer to one prompt."""
        body.setdefault("sampling_params", {"max_new_tokens": 4, "temperature": 0})
        response = await self.post("/generate", input_ids=prompt, **body)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    async def refusal(self, prompt: list[int], **sampling: Any) -> str:
        """The message of a 400."""
        response = await self.post("/generate", input_ids=prompt, sampling_params=sampling)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    @asynccontextmanager
    async def streaming(self, prompt: list[int], **body: Any) -> AsyncIterator[AsyncIterator[Json]]:
        """The events of a stream; its end is checked to be [DONE]."""
        asked = {"input_ids": prompt, "stream": True, **body}
        async with self.client.stream("POST", "/generate", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events(response)

    async def num_running(self) -> int:
        (load,) = (await self.get("/v1/loads"))["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    async def until_idle(self) -> None:
        """Ask, without pause, until nothing runs."""
        await self.until_running(0)

    async def until_running(self, num: int) -> None:
        """Ask, without pause, until so many requests run."""
        async with asyncio.timeout(WAIT_S):
            while await self.num_running() != num:
                pass


def logprobs_of(answer: Json) -> list[float]:
    """Log-probs of the output tokens of an answer, or of an event."""
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def lines_of(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The lines of a stream. httpx's own also end where Python's splitlines end one, at a U+2028 or
    U+0085 that was sampled."""
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
