"""Chooses what one step computes: every decoding request, and chunks of prompts beside them.

Owns who waits and who runs. Invariants: a decoding request is in every step, so a long prompt never
stalls it; first come, first served; when memory runs out the youngest goes back to the queue, so
the oldest always ends. Driven by Engine.step, between whose calls nothing runs.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollmesh.engine.embedded.memory import Memory
from rollmesh.engine.embedded.request import ABORTED, Finish, Phase, Progress, Request, Top


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start:stop` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step draws the request's next token."""
        return self.stop == self.request.num_tokens and self.request.sampling.max_new_tokens > 0


Sampled = tuple[int, float, Top | None]
"""A drawn token, its log-prob and, where they are asked for, the likeliest tokens there."""
Batch = list[Chunk]
"""One step's chunks: those of one token first."""


class Scheduler:
    """Two queues and the rule that moves requests between them."""

    def __init__(self, memory: Memory, max_step_tokens: int) -> None:
        """`max_step_tokens`: prompt tokens that one step computes, beside those that decode."""
        self._memory = memory
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def schedule(self) -> Batch:
        """The next step's chunks; empty if there is nothing to do."""
        singles = self._decoding_chunks()
        prompts = self._prompt_chunks()
        while not singles and not prompts and len(self.running) > 1:
            self._retract_youngest()  # prompts alone have filled memory; the oldest must go on
            prompts = self._prompt_chunks()
        # A prompt with one unknown token is computed like a decoding request.
        singles += [chunk for chunk in prompts if chunk.stop - chunk.start == 1]
        return singles + [chunk for chunk in prompts if chunk.stop - chunk.start > 1]

    def settle(
        self, batch: Batch, sampled: Iterable[Sampled], policy_version: str
    ) -> list[Progress]:
        """Take the step's tokens; what readers should know, finished requests released."""
        progress = []
        draws = iter(sampled)
        for chunk in batch:
            request = chunk.request
            if chunk.stop < request.num_tokens:
                continue
            finish = None
            if chunk.samples:
                token, logprob, top = next(draws)
                request.append(token, logprob, policy_version, top)
                finish = request.finish(token)
            else:
                finish = Finish("length", length=0)
            if finish is not None:
                self._end(request)
            if finish is not None or request.tells:
                progress.append(
                    Progress(request, request.num_output_tokens, policy_version, finish)
                )
        if any(update.finish is not None for update in progress):
            self.running = [r for r in self.running if r.phase is Phase.RUNNING]
        return progress

    def abort(self, chosen: Callable[[Request], bool], policy_version: str) -> list[Progress]:
        """End the chosen requests, waiting or running, with what they have."""
        progress = []
        for request in [r for r in (*self.waiting, *self.running) if chosen(r)]:
            if request.phase is Phase.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._end(request)
            progress.append(Progress(request, request.num_output_tokens, policy_version, ABORTED))
        return progress

    def retract_all(self) -> None:
        """Send all running requests back to the queue, in their order."""
        while self.running:
            self._retract_youngest()

    def _decoding_chunks(self) -> Batch:
        """One token of each decoding request, the youngest retracted until memory suffices."""
        chunks: Batch = []
        at = 0
        while at < len(self.running):
            request = self.running[at]
            if request.num_pending > 1 or request.num_output_tokens == 0:
                at += 1
            elif self._memory.extend(request, request.num_tokens):
                chunks.append(Chunk(request, request.num_tokens - 1, request.num_tokens))
                at += 1
            else:
                assert len(self.running) > 1, "one request alone always fits"
                self._retract_youngest()
        return chunks

    def _prompt_chunks(self) -> Batch:
        """Chunks of prompts that are being computed, then of requests that begin."""
        chunks: Batch = []
        budget = self._max_step_tokens
        for request in self.running:
            if budget > 0 and request.num_pending > 0:
                budget -= self._add_chunk(chunks, request, budget)
        while budget > 0 and self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.phase = Phase.RUNNING
            self.running.append(request)
            self._memory.admit(request)
            if request.num_retractions == 0:
                request.num_cached = request.num_computed
            budget -= self._add_chunk(chunks, request, budget)
        return chunks

    def _add_chunk(self, chunks: Batch, request: Request, budget: int) -> int:
        """Schedule up to `budget` tokens of a prompt; how many, 0 if memory is full."""
        self._memory.reuse(request)
        start = request.num_computed
        stop = min(request.num_tokens, start + budget)
        if not self._memory.extend(request, stop):
            return 0
        self._memory.share(request)
        chunks.append(Chunk(request, start, stop))
        return stop - start

    def _fits(self, request: Request) -> bool:
        """Whether to begin `request`: its tokens fit, with a step of growth for all that run."""
        if not self._memory.has_free_row:
            return False
        return (
            request.num_tokens + len(self.running) < self._memory.num_available or not self.running
        )

    def _retract_youngest(self) -> None:
        request = self.running.pop()
        self._memory.release(request)
        request.retract()
        self.waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        if request.phase is Phase.RUNNING:
            self._memory.release(request)
        request.phase = Phase.FINISHED
