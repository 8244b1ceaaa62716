"""The built-in agent's client: one chat completion per call, over one connection pool.

    POST {base_url}/chat/completions --200--> ChatReply
        408, 429, 5xx, broken connection --attempts left--> wait, post again with a retry mark
                                         --none left------> InfraError
        400 context_length_exceeded -----------------------> ContextFull
        any other status ----------------------------------> AgentFailed

- A failed call is an exception, never an empty answer that an environment could score.
- A retry carries `x-stainless-retry-count`, so that the endpoint attaches it to the generation it
  may still be sampling.
- One client serves all rollouts of an event loop.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
import orjson
from yarl import URL

from rollmesh.core.errors import AgentFailed, ContextFull, InfraError
from rollmesh.core.types import Json
from rollmesh.envs.env import Endpoint

Message = Mapping[str, Json]
"""A chat message in the OpenAI API's form."""

FULL = ("context_length_exceeded", "session_over_limit")
"""Error codes after which no further call of the conversation can succeed."""


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and retries of a client."""

    num_attempts: int = 6
    backoff_s: float = 0.25
    """Wait before the second attempt; doubles from there. A longer Retry-After header wins."""
    max_wait_s: float = 20.0
    """Maximum of a single wait, whatever Retry-After requests."""
    timeout_s: float = 600.0
    """For one whole attempt."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call by the model."""

    id: str
    name: str
    arguments: str
    """Text that the model wrote; JSON if it is valid."""


class ChatReply(msgspec.Struct, frozen=True):
    """The model's answer."""

    text: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    message: Message
    """The unchanged message with its reasoning; append it to the history as it is."""
    calls: tuple[ToolCall, ...] = ()


class ChatClient:
    """A chat client. It connects on the first call, on the running loop; `close` it on the same
    loop."""

    def __init__(self, settings: ChatSettings | None = None) -> None:
        self._settings = settings or ChatSettings()
        self._session: aiohttp.ClientSession | None = None

    async def complete(
        self, endpoint: Endpoint, messages: Sequence[Message], **fields: Json
    ) -> ChatReply:
        """Return the model's answer to `messages`; `fields` are added to the body.

        Raises AgentFailed if the endpoint refuses the request (ContextFull if it exceeds the
        model's context or a session limit), InfraError if it does not answer within the bounded
        number of attempts.
        """
        body = orjson.dumps({"model": endpoint.model, "messages": messages, **fields})
        url = _chat_url(endpoint.on_this_machine().base_url)
        headers = _headers(endpoint.api_key)
        fault = ""
        for attempt in range(self._settings.num_attempts):
            if attempt:
                headers = {**headers, "x-stainless-retry-count": str(attempt)}
            retry_after_s = 0.0
            try:
                async with self._open_session().post(url, data=body, headers=headers) as response:
                    payload = await response.read()
                    status = response.status
                    retry_after_s = _seconds(response.headers.get("Retry-After"))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                fault = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return _parse(payload)
                fault = f"HTTP {status}: {_error_text(payload)}"
                if _error_code(payload) in FULL:
                    raise ContextFull(fault)
                if status not in (408, 429) and status < 500:
                    raise AgentFailed(f"the endpoint refused the agent's call: {fault}")
            if attempt + 1 < self._settings.num_attempts:
                await asyncio.sleep(self._wait_s(attempt, retry_after_s))
        raise InfraError(f"no answer after {self._settings.num_attempts} attempts: {fault}")

    async def close(self) -> None:
        """Close the pooled connections; a later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                auto_decompress=False,
            )
        return self._session

    def _wait_s(self, attempt: int, retry_after_s: float) -> float:
        wait_s = max(self._settings.backoff_s * 2.0**attempt, retry_after_s)
        return min(wait_s, self._settings.max_wait_s)


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _ReplyMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Json]
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Completion)


def _parse(payload: bytes) -> ChatReply:
    """Return the first choice; InfraError if the answer is no chat completion."""
    try:
        choice = _decoder.decode(payload).choices[0]
        parsed = msgspec.convert(choice.message, _ReplyMessage)
    except (msgspec.MsgspecError, IndexError) as error:
        raise InfraError(f"the endpoint's answer is no chat completion: {error}") from None
    calls = (ToolCall(c.id, c.function.name, c.function.arguments) for c in parsed.tool_calls or ())
    message = {"role": "assistant", **choice.message}
    return ChatReply(parsed.content or "", choice.finish_reason or "stop", message, tuple(calls))


@functools.lru_cache(maxsize=1024)
def _chat_url(base_url: str) -> URL:
    return URL(base_url.rstrip("/") + "/chat/completions")


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}


def _seconds(header: str | None) -> float:
    """Parse Retry-After in seconds; a date counts as absent."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0


def _error_text(payload: bytes) -> str:
    """Return the message of an OpenAI-style error, or the beginning of any other body."""
    try:
        return str(orjson.loads(payload)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return payload[:200].decode("utf-8", "replace")


def _error_code(payload: bytes) -> str:
    """Return the code of an OpenAI-style error; '' if there is none."""
    try:
        return str(orjson.loads(payload)["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
