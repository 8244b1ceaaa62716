"""Engine backends: the protocol between rollmesh and an inference engine, and its factory.

- Every failure is EngineUnavailable (retry may help) or EngineRefused (retry fails the same way),
  and names the engine.
- Only what runs once per engine request crosses the protocol; tokens arrive by direct callbacks.

SGLang cannot report whether its memory is released, but keeps the name of its weights until its
process ends, so the name carries the state:

    7 --coordinator renames it--> moving-7 --memory released--> released-7
    released-7 --renamed--> moving-7 --memory taken again--> moving-7 --weights loaded--> 8

Such a name is no policy version, so no request is sent there.
"""

import enum
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from rollmesh.core.config import EngineConfig
from rollmesh.core.errors import ConfigError, EngineError
from rollmesh.core.types import SamplingParams, VersionRun
from rollmesh.engine.connection import Piece, Unread
from rollmesh.engine.http import HttpClient

CONTROL_TIMEOUT_S = EngineConfig().control_timeout_s
"""For clients without settings. SGLang's pause alone polls each second."""
UNBOUNDED_S = 86_400.0
"""For commands that take effect whenever they arrive and so must not be abandoned: the caller waits
until the engine answers or its connection ends."""
READ_TIMEOUT_S = 5.0
"""For what an engine answers from memory, where no setting limits it."""


TopLogprobs = tuple[tuple[float, int], ...]
"""(log-prob, token id) of the likeliest tokens at one position, likeliest first."""

Image = str | Unread
"""A `data:` or http(s) address. An unread one is a `data:` address by its holder's guarantee, and
is valid inside JSON unescaped."""


class Finish(msgspec.Struct, frozen=True):
    """Why the engine stopped."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None


class TokenChunk(msgspec.Struct, frozen=True):
    """New tokens of an engine request; each token is delivered once."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    policy_version: int
    finish: Finish | None = None
    policy_versions: tuple[VersionRun, ...] = ()
    """In the last chunk, if the engine reports them: the versions of all tokens of the request."""
    top_logprobs: Sequence[TopLogprobs] = ()
    """One per token, if requested."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sampling request: the tokens to continue, and how."""

    rid: str
    params: SamplingParams
    max_new_tokens: int
    extra_key: str
    """Prefixes are shared only under the same key."""
    stream: bool
    prompt_ids: Sequence[int] = ()
    prompt_json: Piece = b""
    """`1,2,3`: the prompt's ids as JSON that the caller has checked; used instead of
    `prompt_ids`."""
    sampled_ids: Sequence[int] = ()
    """Tokens that earlier requests of the generation sampled; they follow the prompt."""
    num_top_logprobs: int = 0
    """Likeliest tokens to report at each position."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in the prompt."""
    adapter: str = ""
    """LoRA adapter to apply; SGLang's `lora_path`, which holds its name."""


class TokenReceiver(Protocol):
    """Callbacks for one engine request. They run on the event loop and do not raise."""

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Receive new tokens; the last chunk has a finish."""

    def on_end(self) -> None:
        """The connection is free again; a chunk with a finish came before."""

    def on_error(self, error: EngineError) -> None:
        """No finish will come: EngineRefused, or EngineUnavailable if a retry may help."""


class RunningRequest(Protocol):
    """An engine request in progress."""

    def close(self) -> None:
        """Hang up; the receiver gets no further callback."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that an engine serves."""

    model_path: str
    policy_version: int
    weight_version: str = ""
    """The engine's own name of its weights."""
    architecture: str = ""
    """The model's class, such as Qwen3ForCausalLM; '' if the engine does not report it."""


class EngineLoad(msgspec.Struct, frozen=True):
    """Load of an engine, summed over its data-parallel ranks."""

    num_running: int
    num_waiting: int
    num_tokens: int = 0
    """Tokens whose keys and values are held for running requests."""
    max_running: int = 0
    """Requests that run at a time; 0 if the engine does not report it."""


class MemoryState(enum.StrEnum):
    """Whether an engine holds its memory."""

    HELD = "held"
    MOVING = "moving"
    """In transition; unknown until it is released again."""
    RELEASED = "released"


class EngineMemory(Protocol):
    """The memory of an engine's weights, keys and values."""

    async def release(self) -> None:
        """Free the memory; the weights are lost.

        Only while the engine is paused and flushed: SGLang crashes on a request that still runs.
        """

    async def resume(self) -> None:
        """Allocate the memory again; weights must be loaded before it generates."""


class EngineBackend(Protocol):
    """A client of one engine."""

    url: str
    memory: EngineMemory

    def generate(self, request: EngineRequest, receiver: TokenReceiver) -> RunningRequest:
        """Start a request; `receiver` gets tokens as they come if `request.stream`, else at once.

        EngineRefused, immediately, for an id outside the vocabulary. There is no timeout: the
        caller aborts or closes.
        """

    async def abort(self, rid: str) -> None:
        """End `rid` with the tokens it has; no effect if the engine does not know it."""

    async def score(
        self, token_ids: Sequence[int], extra_key: str, adapter: str = ""
    ) -> list[float]:
        """Return log-probs of `token_ids[1:]` under the current weights and `adapter`."""

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating; new requests wait for `resume`."""

    async def resume(self) -> None:
        """Generate again; no effect if the engine is not paused."""

    async def flush(self) -> None:
        """Drop all cached prefixes; EngineRefused while requests run."""

    async def command(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> None:
        """Send a step of a weight transfer, such as SGLang's /update_weights_from_tensor;
        EngineRefused if it fails. The limit is the factory's `control_timeout_s` if None."""

    async def update_from_disk(
        self, path: Path, policy_version: int, timeout_s: float | None = None
    ) -> None:
        """Load the weights in folder `path` as `policy_version`; cached prefixes are dropped."""

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the LoRA adapter in folder `path` (PEFT layout) as `name`."""

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter once the requests that use it have ended."""

    async def adapters(self) -> list[str]:
        """Return the names of loaded adapters; empty if the engine has no such list."""

    async def model_info(self) -> ModelInfo:
        """Return the served model; answered also while paused."""

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's start-up settings, such as `incremental_streaming_output`."""

    async def loads(self) -> EngineLoad:
        """Return the engine's load; answered also while paused."""


class BackendFactory(Protocol):
    """Makes clients of engines of one kind."""

    def __call__(
        self,
        url: str,
        http: HttpClient,
        *,
        vocab_size: int = 2**31,
        key: str | None = None,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> EngineBackend:
        """Return a client of the engine at `url` that uses `http`.

        Token ids, sent or received, must be below `vocab_size`; by default any id is valid. `key`
        is the engine's API key (default: the one given to this process, if any).
        `control_timeout_s` is `engine.control_timeout_s`. `read_timeout_s` limits each of
        `model_info`, `server_info`, `loads` and `adapters`; the probe of an engine passes
        `engine.probe_timeout_s`. AddressError if `url` is more than scheme, host and port.
        """


DEFAULT_BACKEND = "sglang"
_backends: dict[str, str | BackendFactory] = {
    "sglang": "rollmesh.engine.sglang:SglangBackend",
    "embedded": "rollmesh.engine.sglang:SglangBackend",
}
"""Factories, or where to import them from. The embedded engine serves SGLang's protocol."""


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make `engine.backend = name` use `factory`."""
    _backends[name] = factory


def backend_factory(name: str = DEFAULT_BACKEND) -> BackendFactory:
    """Return the factory registered as `name`, or the one that `name` locates as
    `module:attribute`; ConfigError if there is none."""
    entry = _backends.get(name, name)
    if not isinstance(entry, str):
        return entry
    module_name, _, attribute = entry.partition(":")
    if not attribute:
        known = ", ".join(sorted(_backends))
        raise ConfigError(f"engine.backend: {name!r} is unknown; use {known} or module:attribute")
    try:
        factory: BackendFactory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine.backend: cannot import {entry!r}: {error}") from None
    return factory


def configured_backend(engine: EngineConfig) -> BackendFactory:
    """Return the factory of `engine.backend`, which passes on the time limit of `engine`."""
    factory = backend_factory(engine.backend)
    return functools.partial(factory, control_timeout_s=engine.control_timeout_s)


def weights_name(state: MemoryState, weights: str) -> str:
    """Return the engine's new name of its weights, formerly `weights`, in memory state `state`."""
    return weights if state is MemoryState.HELD else f"{state.value}-{weights}"


def memory_state_of(name: str) -> tuple[MemoryState, str]:
    """Return the memory state in a weights name, and the plain name of the weights."""
    for state in (MemoryState.MOVING, MemoryState.RELEASED):
        if name.startswith(f"{state.value}-"):
            return state, name.removeprefix(f"{state.value}-")
    return MemoryState.HELD, name
