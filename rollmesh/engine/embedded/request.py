"""One request in the engine: parameters, computed tokens and output.

    WAITING -> RUNNING -> FINISHED
       ^----------'  (retracted: its memory was needed, or by a pause)
    WAITING -> FINISHED  (aborted before it ran)

- Positions below `num_computed` have keys and values in memory; those up to `num_tokens` are known
  and not computed yet. A request with one such token is decoding.
- The HTTP side reads only below the counts of a Progress.
"""

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.engine.embedded.model import Adapter
from rollmesh.engine.embedded.prefix_tree import PrefixNode
from rollmesh.engine.embedded.shaping import CompiledGrammar, Shaping
from rollmesh.engine.embedded.text import StopRule

Tokens = NDArray[np.int32]
Top = list[tuple[float, int]]
"""(log-prob, token) of the likeliest tokens at one position, the likeliest first."""


class RequestPhase(enum.Enum):
    """State of a request; transitions are in the module's docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled; SGLang's names and defaults, checked when parsed."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is all."""
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own and, unless it ignores them, the model's end tokens."""
    stop: StopRule | None = None
    shaping: Shaping | None = None
    """Penalties, biases and minimum length; None if none is set."""
    grammar: CompiledGrammar | None = None
    seed: int = 0
    """Determines each draw together with the position."""
    adapter: Adapter | None = None
    """Applied over the model's weights."""


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended, in the form of SGLang's `finish_reason`."""

    type: str
    """stop, length or abort."""
    matched: int | str | None = None
    """The stop token, string or pattern."""
    length: int | None = None
    message: str = ""
    """Reason of an abort."""
    status_code: int | None = None
    """HTTP status of an abort that is a refusal."""

    def as_json(self) -> dict[str, Any]:
        """Return SGLang's object."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        return {
            "type": "abort",
            "message": self.message,
            "status_code": self.status_code,
            "err_type": "BadRequestError" if self.status_code == 400 else None,
        }


ABORTED = FinishReason("abort", message="Aborted")
QUEUE_FULL = FinishReason("abort", message="The request queue is full.", status_code=503)


class VersionSpan(msgspec.Struct):
    """Output tokens from `start` up to the next span were sampled by `policy_version`."""

    policy_version: str
    start: int


class Request:
    """Mutable state of one request; owned by the step loop once submitted."""

    def __init__(
        self,
        rid: str,
        prompt: Tokens,
        sampling: Sampling,
        *,
        extra_key: str = "",
        logprob_start: int | None = None,
        num_top: int = 0,
        streams: bool = False,
    ) -> None:
        """`logprob_start`: score the prompt from this position; None scores none of it.

        `num_top`: number of likeliest tokens to report at each position, with their log-probs.
        """
        self.rid = rid
        self.sampling = sampling
        self.adapter = adapter = sampling.adapter
        self.extra_key = f"{adapter.key}/{extra_key}" if adapter else extra_key
        """Prefixes are shared under the same key only; those of an adapter are its own."""
        self.logprob_start = logprob_start
        self.num_top = num_top
        self.streams = streams
        self.phase = RequestPhase.WAITING
        self.num_prompt_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + sampling.max_new_tokens, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.logprobs: list[float] = []
        """Log-probs of the output tokens."""
        self.prompt_logprobs: list[float] = []
        """Log-probs of prompt tokens from logprob_start + 1 on, as far as computed."""
        self.tops: list[Top] = []
        """Likeliest tokens at the output positions, if num_top > 0."""
        self.prompt_tops: list[Top] = []
        """Likeliest tokens at the positions of prompt_logprobs, if num_top > 0."""
        self.matcher = sampling.grammar.start() if sampling.grammar else None
        self._fault = ""
        """Why the grammar could not continue."""
        self._stops = sampling.stop.start() if sampling.stop else None
        # Plain attributes, since the step loop reads them for every row at every step.
        self.is_shaped = self.matcher is not None or sampling.shaping is not None
        """Whether its logits are changed before sampling."""
        self.reports_progress = streams
        """Whether the last token is reported: not while it may begin a stop string."""
        self.versions: list[VersionSpan] = []
        self.num_retractions = 0
        self.num_cached = 0
        """Prompt tokens that were cached when it first ran."""
        # used by Memory
        self.row = -1
        self.num_computed = 0
        self.num_shared = 0
        """Leading positions whose slots belong to the prefix tree, pinned through `node`."""
        self.node: PrefixNode | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Known tokens without keys and values yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from the cache.

        The last one is always computed, since its logits are needed; scored tokens are too, since a
        log-prob needs the logits before it.
        """
        known = self.num_tokens - 1
        if self.is_scoring:
            assert self.logprob_start is not None
            return min(known, self.logprob_start)
        return known

    @property
    def is_scoring(self) -> bool:
        """Whether prompt log-probs are requested and not all computed."""
        if self.logprob_start is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1 - self.logprob_start

    def retract(self) -> None:
        """Return to waiting; memory has freed its slots."""
        self.phase = RequestPhase.WAITING
        self.num_retractions += 1
        if self.is_scoring:
            self.prompt_logprobs.clear()
            self.prompt_tops.clear()

    def append(
        self, token: int, logprob: float, policy_version: str, top: Top | None = None
    ) -> None:
        """Add a sampled token."""
        if not self.versions or self.versions[-1].policy_version != policy_version:
            self.versions.append(VersionSpan(policy_version, self.num_output_tokens))
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.logprobs.append(logprob)
        if top is not None:
            self.tops.append(top)
        if self.matcher is not None:
            self._fault = self.matcher.take(token)

    def finish(self, token: int) -> FinishReason | None:
        """Return why `token`, just appended, ends the request; None if it continues.

        A stop string takes precedence over a stop token, and both over the length; a grammar that
        cannot continue aborts.
        """
        if self._fault:
            return FinishReason("abort", message=self._fault)
        if self._stops is not None:
            matched = self._stops.feed(token)
            if matched is not None:
                return FinishReason("stop", matched=matched)
            self.reports_progress = self.streams and not self._stops.is_undecided
        if token in self.sampling.stop_token_ids:
            return FinishReason("stop", matched=token)
        if self.num_output_tokens >= self.sampling.max_new_tokens:
            return FinishReason("length", length=self.sampling.max_new_tokens)
        return None


class Progress(msgspec.Struct, frozen=True):
    """State of a request for its reader: everything up to here is final and safe to read."""

    request: Request
    num_output_tokens: int
    policy_version: str
    """Policy version of the engine at this moment."""
    finish: FinishReason | None = None
