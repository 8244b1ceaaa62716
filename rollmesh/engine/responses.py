"""Decoders of SGLang's responses: `/generate` bodies and events, and the control replies.

- Bytes from outside become typed values or raise an EngineError.
- A chunk has as many log-probs as ids, and no token between two chunks is missing.
- Sources: SGLang's tokenizer_manager.py (meta_info) and io_struct.py.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from rollmesh.core.errors import (
    DECODE_ERRORS,
    EngineBroke,
    EngineError,
    EngineOverloaded,
    EngineRefused,
    EngineUnavailable,
)
from rollmesh.core.types import UNVERSIONED, VersionRun, policy_version_of
from rollmesh.engine.backend import EngineLoad, Finish, ModelInfo, TokenChunk, TopLogprobs


class _FinishReason(msgspec.Struct):
    type: str = ""
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class _Span(msgspec.Struct, rename={"weight_version": "version"}):
    weight_version: str
    start: int
    end: int


class _SampledToken(msgspec.Struct, array_like=True, gc=False):
    """Log-prob of one sampled token; its id is in `output_ids`."""

    logprob: float


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    completion_tokens: int = 0
    weight_version: str = ""
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[_SampledToken] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None
    """Status that a plain call would have had, if the stream had already begun."""


class GenerateResponse(msgspec.Struct):
    """One `/generate` response, or one event of a stream."""

    output_ids: list[int] = []
    meta_info: _MetaInfo = msgspec.field(default_factory=_MetaInfo)
    error: _Error | None = None

    @property
    def num_before(self) -> int:
        """Tokens of the request before `output_ids`; 0 if the response holds them all."""
        return self.meta_info.completion_tokens - len(self.output_ids)


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str = ""
    architectures: list[str] | None = None


class _Update(msgspec.Struct):
    success: bool = False
    message: str = ""


class _Refusal(msgspec.Struct):
    error_message: str | None = None


class _LoadReply(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[_LoadReply] = []


class _Card(msgspec.Struct):
    id: str = ""
    parent: str | None = None
    """Base model of an adapter."""


class _Cards(msgspec.Struct):
    data: list[_Card] = []


_answers = msgspec.json.Decoder(GenerateResponse)
_model_infos = msgspec.json.Decoder(_ModelInfo)
_loads = msgspec.json.Decoder(_Loads)
_updates = msgspec.json.Decoder(_Update)
_refusals = msgspec.json.Decoder(_Refusal)
_cards = msgspec.json.Decoder(_Cards)


OF_ADAPTERS = "LoRA adapter"
"""Part of the engine's error text if it lacks the requested adapter: the request is valid, and the
engine was restarted."""


MAX_TEXT = 300
"""Maximum characters of an engine's error text that an agent receives."""
UNAUTHORIZED = 401
_WANTS_KEY = "the engine requires an API key, or a different one; set ROLLMESH_ENGINE_KEY_FILE"
_DESCRIPTIONS = (
    (OF_ADAPTERS, f"the {OF_ADAPTERS} is not loaded"),
    ("already exists", "it already exists"),
    ("already open", "a weight update is already open"),
    ("no weight-update session", "no weight update is open"),
    ("must run between", "no weight update is open"),
    ("to join", "not all ranks of the group joined"),
    ("process group", "the process group cannot be formed"),
    ("load_format", "load_format is not supported"),
    ("Not Found", "the route is unknown"),
)
"""Substrings of known error texts, and the descriptions reported for them."""


def is_refusal(status: int) -> bool:
    """Whether an HTTP status means that the request itself is wrong, so that a retry cannot
    help."""
    return 400 <= status < 500 and status not in (408, 425, 429)


def is_overload(status: int) -> bool:
    """Whether an HTTP status means that the engine's queue is full, as SGLang's 503 does."""
    return status in (429, 503)


def error_of(status: int, raw: bytes, *, is_generation: bool = False) -> EngineError:
    """Return the error for a response whose `status` is not 200.

    Its text is the status and our own description, never the body, since the peer may be no engine.
    The agent that asked for a generation gets `error.message` of an engine's typed response, as one
    bounded line.
    """
    text = error_text(raw)
    if status == UNAUTHORIZED:
        return EngineUnavailable(f"HTTP {status}: {_WANTS_KEY}")
    why = f"HTTP {status}: {one_line(text) if is_generation and text else describe(text)}"
    if is_overload(status):
        return EngineOverloaded(why)
    if status == 500:
        return EngineBroke(why)
    is_wrong = is_refusal(status) and OF_ADAPTERS not in text
    return EngineRefused(why) if is_wrong else EngineUnavailable(why)


def describe(text: str) -> str:
    """Describe the subject of an engine's error text without quoting it."""
    known = (description for mark, description in _DESCRIPTIONS if mark in text)
    return next(known, "the engine's log has the reason")


def one_line(text: str) -> str:
    """Return the first line of `text`, printable and at most `MAX_TEXT` characters."""
    line = next(iter(text.splitlines()), "")[:MAX_TEXT]
    return "".join(each if each.isprintable() else "?" for each in line)


def decode_response(
    raw: bytes | bytearray | memoryview, kind: type[EngineError] = EngineUnavailable
) -> GenerateResponse:
    """Decode `raw`; EngineUnavailable if it is malformed, `kind` if it reports an error."""
    try:
        answer = _answers.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"sent a malformed answer: {error}") from None
    if answer.error:
        code = answer.error.code
        is_full = isinstance(code, int) and is_overload(code)
        if OF_ADAPTERS in answer.error.message:
            kind = EngineUnavailable
        raise (EngineOverloaded if is_full else kind)(one_line(answer.error.message))
    return answer


def chunk_of(answer: GenerateResponse, num_seen: int) -> TokenChunk:
    """Return the tokens of `answer` after the first `num_seen` of its request.

    Serves both stream forms, where `completion_tokens` counts from the request's start: cumulative
    answers hold all tokens so far, incremental ones only new ones. EngineUnavailable if tokens are
    missing; EngineRefused if the engine aborted because the request is wrong.
    """
    meta = answer.meta_info
    reason = meta.finish_reason
    num_new = meta.completion_tokens - num_seen
    logprobs = meta.output_token_logprobs
    token_ids = answer.output_ids
    is_short = num_new > len(token_ids) or num_new > len(logprobs)
    is_uncounted = not num_seen and not num_new and token_ids
    if num_new < 0 or is_short or is_uncounted:
        found = f"{meta.completion_tokens} tokens, {len(token_ids)} ids, {len(logprobs)} log-probs"
        raise EngineUnavailable(f"sent {found} after the first {num_seen}")
    if num_new != len(token_ids):
        token_ids = token_ids[len(token_ids) - num_new :]
    if num_new != len(logprobs):
        logprobs = logprobs[len(logprobs) - num_new :]
    finish = _finish(reason) if reason else None
    return TokenChunk(
        token_ids=token_ids,
        logprobs=[entry.logprob for entry in logprobs],
        policy_version=policy_version_of(meta.weight_version),
        finish=finish,
        policy_versions=_runs(meta) if finish else (),
        top_logprobs=_top(meta.output_top_logprobs, num_new) if meta.output_top_logprobs else (),
    )


def chunks_of(events: Sequence[GenerateResponse], num_seen: int) -> list[TokenChunk]:
    """Return the chunks of consecutive events, joined where the same weights sampled them."""
    if len(events) == 1:
        return [chunk_of(events[0], num_seen)]
    parts: list[TokenChunk] = []
    for answer in events:
        parts.append(chunk_of(answer, num_seen))
        num_seen += len(parts[-1].token_ids)
    return [_joined(list(run)) for _, run in groupby(parts, lambda part: part.policy_version)]


def scores_of(answer: GenerateResponse) -> list[float]:
    """Return log-probs of all prompt tokens but the first."""
    scores = [entry[0] for entry in answer.meta_info.input_token_logprobs[1:]]
    numbers = [score for score in scores if score is not None]
    if not numbers or len(numbers) != len(scores):
        raise EngineUnavailable("did not score the tokens it was asked to")
    return numbers


def model_info_of(raw: bytes) -> ModelInfo:
    """Decode /model_info; EngineUnavailable if `raw` is malformed."""
    try:
        info = _model_infos.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"sent malformed model info: {error}") from None
    called, classes = info.weight_version, info.architectures or [""]
    return ModelInfo(info.model_path, policy_version_of(called), called, classes[0])


def server_info_of(raw: bytes) -> dict[str, Any]:
    """Decode /server_info; EngineUnavailable if `raw` is malformed."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"sent malformed server info: {error}") from None


def load_of(raw: bytes) -> EngineLoad:
    """Decode /v1/loads, summed over ranks; EngineUnavailable if `raw` is malformed."""
    try:
        loads = _loads.decode(raw).loads
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"sent a malformed load: {error}") from None
    running = sum(load.num_running_reqs for load in loads)
    waiting = sum(load.num_waiting_reqs for load in loads)
    num_tokens = sum(load.num_used_tokens for load in loads)
    return EngineLoad(
        running, waiting, num_tokens, sum(load.max_running_requests for load in loads)
    )


def update_error(raw: bytes) -> str:
    """Return why a weight update failed, or ''."""
    try:
        update = _updates.decode(raw)
    except msgspec.MsgspecError as error:
        return f"an unknown answer: {error}"
    return "" if update.success else describe(update.message)


def adapters_of(raw: bytes) -> list[str]:
    """Return the names of the adapters in an engine's list of models."""
    try:
        return [card.id for card in _cards.decode(raw).data if card.parent]
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"sent a malformed list of models: {error}") from None


def error_text(raw: bytes) -> str:
    """Return the message of an error body in any of its forms; '' for anything else."""
    for decoder in (_answers, _updates, _refusals):
        try:
            answer = decoder.decode(raw)
        except DECODE_ERRORS:
            continue
        text = answer.error.message if isinstance(answer, GenerateResponse) and answer.error else ""
        text = text or getattr(answer, "message", "") or getattr(answer, "error_message", "")
        if text:
            return str(text)
    return ""


def _finish(reason: _FinishReason) -> Finish:
    matched = reason.matched
    if isinstance(matched, list):
        matched = matched[-1] if matched else None
    if reason.type == "stop":
        return Finish("stop", matched)
    if reason.type == "length":
        return Finish("length")
    if reason.status_code is not None:
        if is_refusal(reason.status_code):
            raise EngineRefused(one_line(reason.message))
        if is_overload(reason.status_code):
            raise EngineOverloaded(one_line(reason.message))
    return Finish("abort")


def _joined(parts: list[TokenChunk]) -> TokenChunk:
    last = parts[-1]
    return TokenChunk(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        policy_version=last.policy_version,
        finish=last.finish,
        policy_versions=last.policy_versions,
        top_logprobs=[place for part in parts for place in part.top_logprobs],
    )


def _top(
    reported: list[list[tuple[float, int, str | None]] | None], num_new: int
) -> list[TopLogprobs]:
    new = reported[len(reported) - num_new :]
    if len(new) != num_new:
        raise EngineUnavailable(f"sent top log-probs of {len(new)} positions, not of {num_new}")
    return [tuple((entry[0], entry[1]) for entry in place or ()) for place in new]


def _runs(meta: _MetaInfo) -> tuple[VersionRun, ...]:
    """Return the spans as runs; () if they do not cover all tokens or none has a number."""
    at = 0
    runs: list[VersionRun] = []
    for span in meta.weight_versions or ():
        if span.start != at:
            return ()
        runs.append(VersionRun(policy_version_of(span.weight_version), span.end - span.start))
        at = span.end
    is_numbered = any(run.policy_version != UNVERSIONED for run in runs)
    return tuple(runs) if is_numbered and at == meta.completion_tokens else ()
