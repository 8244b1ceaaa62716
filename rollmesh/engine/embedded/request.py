"""One request on its way through the engine: what was asked, what is computed, what came out.

Invariant: positions below `num_computed` have keys and values in memory, those from there to
`num_tokens` are known tokens still to be computed; a request with one such token is decoding.
Scheduler, Memory and Runner pass it around; the HTTP side only reads below the counts of a
Progress that it was handed.

    WAITING -> RUNNING -> FINISHED
       ^----------'  (retracted: its memory was needed, or a pause said so)
    WAITING -> FINISHED  (aborted before it ran)
"""

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.engine.embedded.adapters import Adapter
from rollmesh.engine.embedded.grammars import Grammar
from rollmesh.engine.embedded.prefix_tree import Node
from rollmesh.engine.embedded.shaping import Shaping
from rollmesh.engine.embedded.stops import StopRule

Tokens = NDArray[np.int32]
Top = list[tuple[float, int]]
"""(log-prob, token) of the likeliest tokens at one position, the likeliest first."""


class Phase(enum.Enum):
    """Where a request stands; transitions in the module's docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn; SGLang's names and defaults, checked when decoded."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means all."""
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own and, unless it ignores them, the model's end tokens."""
    stop: StopRule | None = None
    shaping: Shaping | None = None
    """Penalties, biases and the like; None where nothing is asked."""
    grammar: Grammar | None = None
    seed: int = 0
    """With the position it determines each draw."""
    adapter: Adapter | None = None
    """Over the model's weights."""


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request ended, in the shape of SGLang's `finish_reason`."""

    type: str
    """stop, length or abort."""
    matched: int | str | None = None
    """The stop token, string or pattern."""
    length: int | None = None
    message: str = ""
    """Of an abort."""
    status_code: int | None = None
    """Of an abort that is a refusal: the HTTP status it is told with."""

    def as_json(self) -> dict[str, Any]:
        """SGLang's object of this reason."""
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


ABORTED = Finish("abort", message="Aborted")
QUEUE_FULL = Finish("abort", message="The request queue is full.", status_code=503)


class VersionSpan(msgspec.Struct):
    """Output tokens from `start` on were sampled by `policy_version`, up to the next span."""

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
        """`logprob_start`: score the prompt from this position; None scores nothing of it.

        `num_top`: so many of the likeliest tokens are told at each position, with their log-probs.
        """
        self.rid = rid
        self.sampling = sampling
        self.adapter = adapter = sampling.adapter
        self.extra_key = f"{adapter.key}/{extra_key}" if adapter else extra_key
        """Prefixes are shared under the same key only; what an adapter computed is its own."""
        self.logprob_start = logprob_start
        self.num_top = num_top
        self.streams = streams
        self.phase = Phase.WAITING
        self.num_prompt_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + sampling.max_new_tokens, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.logprobs: list[float] = []
        """Of the output tokens."""
        self.prompt_logprobs: list[float] = []
        """Of the prompt tokens from logprob_start + 1 on, as far as computed."""
        self.tops: list[Top] = []
        """Of the output tokens, if num_top asks for any."""
        self.prompt_tops: list[Top] = []
        """Beside prompt_logprobs, likewise."""
        self.guide = sampling.grammar.begin() if sampling.grammar else None
        self._fault = ""
        """Why the grammar could not go on."""
        self._stops = sampling.stop.begin() if sampling.stop else None
        # The step loop asks these of every row at every step, so they are no properties.
        self.is_shaped = self.guide is not None or sampling.shaping is not None
        """Whether its logits are changed before a token is drawn."""
        self.tells = streams
        """Whether its reader hears of the last token: not while that may begin a stop string."""
        self.versions: list[VersionSpan] = []
        self.num_retractions = 0
        self.num_cached = 0
        """Prompt tokens that were found in memory when it first ran."""
        # Memory's part
        self.row = -1
        self.num_computed = 0
        self.num_shared = 0
        """Leading positions whose slots belong to the prefix tree; held through `node`."""
        self.node: Node | None = None

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
        """How many leading tokens may come from memory, rather than be computed.

        The last one is always computed, as its logits are wanted; nothing that is scored may come
        from memory, as its log-prob needs the logits before it.
        """
        known = self.num_tokens - 1
        if self.is_scoring:
            assert self.logprob_start is not None
            return min(known, self.logprob_start)
        return known

    @property
    def is_scoring(self) -> bool:
        """Whether prompt log-probs are wanted and not all computed yet."""
        if self.logprob_start is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1 - self.logprob_start

    def retract(self) -> None:
        """Back to waiting; memory has taken its slots back."""
        self.phase = Phase.WAITING
        self.num_retractions += 1
        if self.is_scoring:
            self.prompt_logprobs.clear()
            self.prompt_tops.clear()

    def append(
        self, token: int, logprob: float, policy_version: str, top: Top | None = None
    ) -> None:
        """Take a sampled token."""
        if not self.versions or self.versions[-1].policy_version != policy_version:
            self.versions.append(VersionSpan(policy_version, self.num_output_tokens))
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.logprobs.append(logprob)
        if top is not None:
            self.tops.append(top)
        if self.guide is not None:
            self._fault = self.guide.take(token)

    def finish(self, token: int) -> Finish | None:
        """Whether `token`, just appended, ends the request.

        A stop string wins over a stop token, and both over the length; a grammar that cannot go on
        aborts it.
        """
        if self._fault:
            return Finish("abort", message=self._fault)
        if self._stops is not None:
            matched = self._stops.feed(token)
            if matched is not None:
                return Finish("stop", matched=matched)
            self.tells = self.streams and not self._stops.is_undecided
        if token in self.sampling.stop_token_ids:
            return Finish("stop", matched=token)
        if self.num_output_tokens >= self.sampling.max_new_tokens:
            return Finish("length", length=self.sampling.max_new_tokens)
        return None


class Progress(msgspec.Struct, frozen=True):
    """What the step loop tells the request's reader: so far is settled and safe to read."""

    request: Request
    num_output_tokens: int
    policy_version: str
    """The engine's weights at this moment."""
    finish: Finish | None = None
