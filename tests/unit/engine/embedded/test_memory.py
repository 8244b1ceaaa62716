"""Slots: each has one owner, none is lost, and siblings share their common prefix."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmesh.engine.embedded.checkpoint import Architecture, RopeScaling
from rollmesh.engine.embedded.request import Request, Sampling
from rollmesh.engine.embedded.scheduler import Memory

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=16,
    width=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    norm_eps=1e-6,
    max_context=64,
    ties_embeddings=False,
    rope=RopeScaling(),
    eos_token_ids=(),
    name="",
)


def make_memory(num_slots: int = 32, num_rows: int = 4) -> Memory:
    return Memory(ARCHITECTURE, torch.float32, num_slots, num_rows)


def make_request(tokens: Sequence[int], extra_key: str = "", start: int | None = None) -> Request:
    sampling = Sampling(max_new_tokens=8)
    prompt = np.array(tokens, dtype=np.int32)
    return Request("r", prompt, sampling, extra_key=extra_key, logprob_start=start)


def compute(memory: Memory, request: Request) -> None:
    memory.reuse(request)
    assert memory.extend(request, request.num_tokens)
    memory.share(request)


def slots_of(memory: Memory, request: Request) -> list[int]:
    found: list[int] = memory.table[request.row, : request.num_computed].tolist()
    return found


def test_siblings_that_run_together_share_all_but_their_last_token() -> None:
    memory = make_memory()
    first, second = make_request([1, 2, 3, 4]), make_request([1, 2, 3, 4])
    for request in (first, second):
        memory.admit(request)
        compute(memory, request)
    left, right = slots_of(memory, first), slots_of(memory, second)
    assert left[:3] == right[:3]
    assert left[3] != right[3]
    assert memory.num_held == 5


def test_a_released_request_leaves_its_tokens_for_the_next_turn() -> None:
    memory = make_memory()
    first = make_request([1, 2, 3])
    memory.admit(first)
    compute(memory, first)
    memory.release(first)
    assert memory.num_held == 0
    second = make_request([1, 2, 3, 4, 5])
    memory.admit(second)
    assert second.num_computed == 3


def test_extra_key_keeps_policies_apart() -> None:
    memory = make_memory()
    first, second = make_request([1, 2, 3], "v1"), make_request([1, 2, 3, 4], "v2")
    memory.admit(first)
    compute(memory, first)
    memory.admit(second)
    assert second.num_computed == 0


def test_a_scored_prompt_reuses_only_the_tokens_before_its_start() -> None:
    memory = make_memory()
    first = make_request([1, 2, 3, 4, 5])
    memory.admit(first)
    compute(memory, first)
    second = make_request([1, 2, 3, 4, 5], start=2)
    memory.admit(second)
    assert second.num_computed == 2
    compute(memory, second)
    memory.release(first)
    memory.release(second)
    assert memory.num_available == memory.num_slots


def test_a_full_memory_refuses_and_changes_nothing() -> None:
    memory = make_memory(num_slots=4)
    first, second = make_request([1, 2, 3]), make_request([4, 5, 6])
    for request in (first, second):
        memory.admit(request)
    compute(memory, first)
    assert not memory.extend(second, 3)
    assert second.num_computed == 0
    memory.release(first)
    assert memory.extend(second, 3), "tokens without an owner are evicted"


class OwnershipMachine(RuleBasedStateMachine):
    """Random admissions, chunks, growth and releases; each slot has one owner throughout."""

    @initialize()
    def begin(self) -> None:
        self.memory = make_memory(num_slots=24, num_rows=3)
        self.requests: list[Request] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        extra_key=st.sampled_from(["", "v"]),
        start=st.sampled_from([None, None, 0, 3]),
    )
    def admit(self, tokens: list[int], extra_key: str, start: int | None) -> None:
        if self.memory.has_free_row:
            request = make_request(tokens, extra_key, start)
            self.memory.admit(request)
            self.requests.append(request)

    @rule(at=st.integers(0, 2), size=st.integers(1, 10))
    def compute(self, at: int, size: int) -> None:
        if at < len(self.requests):
            request = self.requests[at]
            if request.num_output_tokens and request.num_pending <= 1:
                # A sampled token: the scheduler uses the tree for prompts only.
                self.memory.extend(request, request.num_tokens)
                return
            self.memory.reuse(request)
            if self.memory.extend(request, min(request.num_tokens, request.num_computed + size)):
                self.memory.share(request)

    @rule(at=st.integers(0, 2), token=st.integers(0, 1))
    def grow(self, at: int, token: int) -> None:
        if at < len(self.requests):
            request = self.requests[at]
            if request.num_pending == 0 and request.num_output_tokens < 8:
                request.append(token, -1.0, "0")

    @rule(at=st.integers(0, 2))
    def release(self, at: int) -> None:
        if at < len(self.requests):
            self.memory.release(self.requests.pop(at))

    @invariant()
    def no_slot_is_owned_twice(self) -> None:
        if not hasattr(self, "memory"):
            return
        own = [
            slot
            for request in self.requests
            for slot in slots_of(self.memory, request)[request.num_shared :]
        ]
        shared = {
            slot
            for request in self.requests
            for slot in slots_of(self.memory, request)[: request.num_shared]
        }
        assert len(set(own)) == len(own)
        assert not shared & set(own)
        assert self.memory.num_held == len(own) + len(shared)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for request in self.requests:
                self.memory.release(request)
            assert self.memory.num_available == self.memory.num_slots
            self.memory.reset()


TestOwnership = OwnershipMachine.TestCase
TestOwnership.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
