"""A running `rollmesh gateway` and its admin client, for the flow tests."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson

from rollmesh.core.process import Ready
from rollmesh.testing.engine import ScriptedEngine, endless_token
from rollmesh.testing.model_folder import write_model_folder

PATIENCE_S = 60.0
CONTEXT_TOKENS = 200


def argv_of(*args: str) -> list[str]:
    return [sys.executable, "-m", "rollmesh.cli.main", "gateway", *args]


def next_token(policy_version: int, context: Sequence[int]) -> int:
    """Sample a byte of the test's vocabulary; never end the turn."""
    return endless_token(policy_version, context) % 250


class Gateway:
    """A running gateway and its admin client."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, token: str) -> None:
        self.process = process
        self.address = address
        self.token = token
        self.client = aiohttp.ClientSession()

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        raw = None if body is None else msgspec.json.encode(body)
        url = self.address + path
        async with self.client.request(method, url, data=raw, headers=headers) as response:
            answer = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, orjson.loads(answer) if is_json else answer.decode()

    async def open(self, **body: Any) -> dict[str, str]:
        status, opened = await self.admin("POST", "/admin/sessions", body)
        assert status == 201
        return dict(opened)

    async def call(self, opened: dict[str, str], body: Any, **headers: str) -> tuple[int, Any]:
        auth = {"Authorization": f"Bearer {opened['api_key']}", **headers}
        url = opened["base_url"] + "/chat/completions"
        async with self.client.post(url, data=msgspec.json.encode(body), headers=auth) as response:
            return response.status, orjson.loads(await response.read())

    async def until_ready(self) -> None:
        """Poll until an engine is ready."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.admin("GET", "/healthz"))[1]["status"] != "ok":
                pass


@asynccontextmanager
async def serving(folder: Path, *args: str) -> AsyncIterator[Gateway]:
    reading, writing = os.pipe()
    token_file = folder / "token"
    fixed = ["--port", "0", "--admin-token-file", str(token_file), "--ready-fd", str(writing)]
    settings = ["--set", f"run.folder={folder}"]
    argv = argv_of(*args, *fixed, *settings)
    process = await asyncio.create_subprocess_exec(
        *argv, pass_fds=[writing], stdout=asyncio.subprocess.PIPE
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        line = await asyncio.to_thread(pipe.readline)
    address = msgspec.json.decode(line, type=Ready).address
    assert process.stdout
    assert (await process.stdout.readline()).startswith(f"rollmesh gateway: {address} ".encode())
    gateway = Gateway(process, address, token_file.read_text().strip())
    try:
        yield gateway
    finally:
        await gateway.client.close()
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0


@asynccontextmanager
async def sampling(
    folder: Path, *engines: ScriptedEngine, engine_wait_s: float = 0.2
) -> AsyncIterator[Gateway]:
    model = write_model_folder(folder / "model")
    settings = orjson.loads((model / "config.json").read_bytes())
    settings["max_position_embeddings"] = CONTEXT_TOKENS
    (model / "config.json").write_bytes(orjson.dumps(settings))
    args = ["--model-dir", str(model)]
    for engine in engines:
        args += ["--engine", engine.url]
    args += ["--set", "sampling.max_tokens=8"]
    args += ["--set", f"interception.engine_wait_s={engine_wait_s}"]
    async with serving(folder, *args) as gateway:
        await gateway.until_ready()
        yield gateway


async def chat(gateway: Gateway, opened: dict[str, str], body: Any) -> dict[str, str]:
    """Return the assistant message that answers a call, plain or streamed."""
    auth = {"Authorization": f"Bearer {opened['api_key']}"}
    url = opened["base_url"] + "/chat/completions"
    async with gateway.client.post(url, data=orjson.dumps(body), headers=auth) as response:
        assert response.status == 200
        raw = await response.read()
    if not body["stream"]:
        return dict(orjson.loads(raw)["choices"][0]["message"])
    events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": text}


async def finish(gateway: Gateway, opened: dict[str, str]) -> Any:
    path = f"/admin/sessions/{opened['session_id']}/finish"
    status, account = await gateway.admin("POST", path)
    assert status == 200
    return account
