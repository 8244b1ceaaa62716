"""Builds SGLang's `{text, output_ids, meta_info}` objects from a request's progress.

- Field names and meanings are those of /generate of SGLang 0.5.21.
- A response reads a request only below the count in its Progress, since the step loop may be
  appending.
"""

import time
from typing import Any

from tokenizers import Tokenizer

from rollmesh.engine.embedded.request import Progress, Request, Top
from rollmesh.engine.embedded.request_parser import PromptRequest
from rollmesh.engine.embedded.text import IncrementalDecoder

ResponseJson = dict[str, Any]


class ResponseBuilder:
    """Builds the response to one request: once, or piece by piece."""

    def __init__(
        self, prompt: PromptRequest, tokenizer: Tokenizer | None, is_incremental: bool
    ) -> None:
        """With `is_incremental` each piece holds new tokens only, else all so far."""
        self._prompt = prompt
        self._is_incremental = is_incremental
        self._tail = (
            IncrementalDecoder(tokenizer, prompt.skip_special) if tokenizer is not None else None
        )
        self._num_sent = 0
        self._text_sent = ""
        self._started_s = time.monotonic()

    def answer(self, progress: Progress) -> ResponseJson:
        """Return the next piece."""
        request = progress.request
        start, stop = self._num_sent, progress.num_output_tokens
        self._num_sent = stop
        answer: ResponseJson = {}
        if self._tail is not None:
            text = self._text(self._tail, progress, start, stop)
            answer["text"] = text[len(self._text_sent) :] if self._is_incremental else text
            self._text_sent = text
        first = start if self._is_incremental else 0
        answer["output_ids"] = output_ids(request, first, stop)
        answer["meta_info"] = self._meta_info(progress, first, stop)
        return answer

    def _text(self, tail: IncrementalDecoder, progress: Progress, start: int, stop: int) -> str:
        """Return the text so far, by default without what stopped it."""
        matched = progress.finish.matched if progress.finish is not None else None
        trims = self._prompt.trims_stop
        if isinstance(matched, int) and trims:
            stop -= 1
        ids = output_ids(progress.request, start, max(start, stop))
        tail.feed(ids, is_last=progress.finish is not None)
        if not isinstance(matched, str) or matched not in tail.text:
            return tail.text
        before, _, _ = tail.text.partition(matched)
        return before if trims else before + matched

    def _meta_info(self, progress: Progress, first: int, stop: int) -> dict[str, Any]:
        request, finish = progress.request, progress.finish
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None if finish is None else finish.as_json(),
            "prompt_tokens": request.num_prompt_tokens,
            "weight_version": progress.policy_version,
            "num_retractions": request.num_retractions,
            "reasoning_tokens": 0,
            "completion_tokens": stop,
            "cached_tokens": request.num_cached,
            "weight_versions": version_spans(progress),
            "dp_rank": None,
        }
        if self._prompt.wants_logprobs:
            ids = output_ids(request, first, stop)
            pairs = zip(request.logprobs[first:stop], ids, strict=True)
            meta["input_token_logprobs"] = prompt_logprobs(request)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
            meta["output_token_logprobs_length"] = stop
            if request.num_top:
                meta["input_top_logprobs"] = prompt_tops(request)
                meta["output_top_logprobs"] = [top_json(top) for top in request.tops[first:stop]]
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._started_s
        return meta


def output_ids(request: Request, start: int, stop: int) -> list[int]:
    """Return output tokens `start:stop`."""
    first = request.num_prompt_tokens
    ids: list[int] = request.tokens[first + start : first + stop].tolist()
    return ids


def prompt_logprobs(request: Request) -> list[tuple[float | None, int, None]]:
    """Return [(None, first id), (log-prob, id)...] from logprob_start on; empty if nothing was
    scored."""
    start = request.logprob_start
    if start is None or start >= request.num_prompt_tokens:
        return []
    ids = request.tokens[start : request.num_prompt_tokens].tolist()
    scores = [None, *request.prompt_logprobs]
    # An aborted request may be scored in part.
    return [(score, token, None) for score, token in zip(scores, ids, strict=False)]


def prompt_tops(request: Request) -> list[list[tuple[float, int, None]] | None]:
    """Return None for the first scored token, then the likeliest tokens; empty if nothing was
    scored."""
    if not request.prompt_tops:
        return []
    return [None, *map(top_json, request.prompt_tops)]


def top_json(top: Top) -> list[tuple[float, int, None]]:
    """Return the likeliest tokens in SGLang's form, with an empty place for their text."""
    return [(logprob, token, None) for logprob, token in top]


def version_spans(progress: Progress) -> list[dict[str, Any]]:
    """Return the policy versions of the output tokens as half-open spans."""
    stop = progress.num_output_tokens
    spans = [span for span in progress.request.versions if span.start < stop]
    if not spans:
        return [{"version": progress.policy_version, "start": 0, "end": 0}]
    ends = [span.start for span in spans[1:]] + [stop]
    return [
        {"version": span.policy_version, "start": span.start, "end": end}
        for span, end in zip(spans, ends, strict=True)
    ]
