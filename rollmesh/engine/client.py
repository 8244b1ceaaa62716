"""A client of one engine: the subset of SGLang's native HTTP protocol that rollmesh uses.

    /generate /abort_request /pause_generation /continue_generation /flush_cache
    /update_weights_from_disk /update_weight_version /load_lora_adapter /unload_lora_adapter
    /release_memory_occupation /resume_memory_occupation
    /model_info /server_info /v1/loads /v1/models

Invariant: every failure is EngineUnavailable (worth a retry) or EngineRefused (it would fail
alike), and names the engine. Sources: SGLang's http_server.py and io_struct.py. Driven by
runtime/sampler.py, probe.py and the publisher.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollmesh.core.engine_url import why_no_engine_url
from rollmesh.core.errors import AddressError, EngineRefused
from rollmesh.core.handed import process_engine_key
from rollmesh.core.logs import get_logger
from rollmesh.engine import answers
from rollmesh.engine.answers import EngineLoad, ModelInfo
from rollmesh.engine.connection import Call
from rollmesh.engine.http import HttpClient, target
from rollmesh.engine.leg import (
    LegAnswer,
    LegReceiver,
    LegRequest,
    LegStream,
    encode_leg,
    encode_score,
)
from rollmesh.engine.occupation import EngineMemory

CONTROL_TIMEOUT_S = 30.0
"""For pause, flush, update and continue; SGLang's pause alone polls each second."""
OUTCOME_S = 86_400.0
"""For what must not be given up on its way, since it would count whenever it arrives: whoever
orders it waits until the engine answers, or its connection ends."""
READ_TIMEOUT_S = 5.0
"""For what an engine answers by heart."""

_JSON = (("Content-Type", "application/json"),)

log = get_logger()


class EngineClient:
    """Talks to the engine at `url` over a shared `http`."""

    def __init__(
        self, url: str, http: HttpClient, vocab_size: int = 2**31, key: str | None = None
    ) -> None:
        """Token ids, sent or received, must be below `vocab_size`; by default any id is good.

        `key` is the engine's API key; by default that of the process's environment, if any.
        AddressError, before any request, for a URL that is more than scheme, host and port.
        """
        if why := why_no_engine_url(url):
            raise AddressError(f"{url[:200]!a}: {why}")
        self.url = url.rstrip("/")
        self._http = http
        self._vocab_size = vocab_size
        key = process_engine_key() if key is None else key
        bearer = (("Authorization", f"Bearer {key}"),) if key else ()
        self._headers = (*_JSON, *bearer)
        self._generate_target = target("POST", f"{self.url}/generate", self._headers)
        self._has_warned = False
        self.memory = EngineMemory(lambda path: self._post(path, {}, OUTCOME_S))

    def generate(self, leg: LegRequest, receiver: LegReceiver) -> Call:
        """Begin a leg; `receiver` hears its tokens, as they come if `leg.stream`, else all at once.

        EngineRefused, at once, for an id that is no token. There is no time-out: whoever drives the
        leg aborts it. Closing the call hangs up, and the receiver hears nothing more.
        """
        body = encode_leg(leg, self._vocab_size)
        kind = LegStream if leg.stream else LegAnswer
        answer = kind(self.url, receiver, self._on_costly, self._vocab_size)
        call = self._http.send(self._generate_target, body, answer)
        answer.attend(call)
        return call

    async def score(
        self, token_ids: Sequence[int], extra_key: str, adapter: str = ""
    ) -> list[float]:
        """Log-probs of all of `token_ids` but the first, under the engine's current weights, and
        those of `adapter` over them."""
        body = encode_score(token_ids, extra_key, self._vocab_size, adapter)
        raw = await self._call("POST", "/generate", body, CONTROL_TIMEOUT_S)
        return answers.scores_of(answers.decode_answer(raw))

    async def abort(self, rid: str) -> None:
        """End `rid` with what it has; no effect, and no error, if the engine does not know it."""
        await self._post("/abort_request", {"rid": rid}, READ_TIMEOUT_S)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating; what comes from now on waits for `resume`."""
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Generate again; no effect if the engine is not paused."""
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def flush(self) -> None:
        """Forget all prefixes; EngineRefused while requests run."""
        await self._post("/flush_cache", {}, CONTROL_TIMEOUT_S)

    async def order(
        self, path: str, body: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Send a command whose answer is only whether it succeeded; EngineRefused if not."""
        why = answers.update_of(await self._post(path, body, timeout_s))
        if why:
            raise EngineRefused(f"{self.url}: {path}: {why}")

    async def update_from_disk(
        self, path: Path, policy_version: int, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Load the weights in folder `path` as `policy_version`; prefixes are forgotten."""
        body = {
            "model_path": str(path),
            "weight_version": str(policy_version),
            "flush_cache": True,
        }
        raw = await self._post("/update_weights_from_disk", body, timeout_s)
        why = answers.update_of(raw)
        if why:
            raise EngineRefused(f"{self.url}: cannot load {path}: {why}")

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter in folder `path` (PEFT's layout); requests may name it from now on."""
        await self._post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, CONTROL_TIMEOUT_S
        )

    async def unload_adapter(self, name: str) -> None:
        """Forget it, once the requests that name it have ended."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)

    async def adapters(self) -> list[str]:
        """Names of those that are loaded; an engine that lists no models has none."""
        try:
            return answers.adapters_of(await self._get("/v1/models"))
        except EngineRefused:
            return []

    async def model_info(self) -> ModelInfo:
        """What it serves; answered also while paused."""
        return answers.model_info_of(await self._get("/model_info"))

    async def server_info(self) -> dict[str, Any]:
        """How it was started; for `incremental_streaming_output` and the like."""
        return answers.server_info_of(await self._get("/server_info"))

    async def loads(self) -> EngineLoad:
        """How busy it is; answered also while paused."""
        return answers.load_of(await self._get("/v1/loads"))

    def _on_costly(self) -> None:
        """A stream of this engine is cumulative: said once."""
        if not self._has_warned:
            self._has_warned = True
            remedy = "start the engine with --incremental-streaming-output"
            log.warning("engine.streams_cumulatively", url=self.url, remedy=remedy)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> bytes:
        return await self._call("POST", path, [msgspec.json.encode(body)], timeout_s)

    async def _get(self, path: str) -> bytes:
        return await self._call("GET", path, (), READ_TIMEOUT_S)

    async def _call(self, method: str, path: str, body: Sequence[bytes], timeout_s: float) -> bytes:
        to = target(method, self.url + path, self._headers)
        response = await self._http.fetch(to, body, timeout_s=timeout_s)
        if response.status != 200:
            error = answers.refusal_of(response.status, response.body)
            raise type(error)(f"{self.url}: {error}")
        return response.body
