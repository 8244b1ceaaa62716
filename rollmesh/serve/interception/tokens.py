"""Capture in exact tokens: the gateway's sessions are the runtime's, as in a worker.

Invariants: each session is a group of its own, so that it can end alone; what a sealed session says
of itself is made from its record each time it is asked, and nothing else is kept. Driven by
book.py.
"""

import secrets
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.ids import GroupId, RolloutId, new_id
from rollmesh.core.types import SamplingPolicy
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.samples import images_on
from rollmesh.runtime.session import Session
from rollmesh.serve.interception.capture import (
    NO_COUNTS,
    CapturedSession,
    Opened,
    Rewards,
    SessionWish,
)
from rollmesh.serve.interception.cutting import cut_samples, unused_turns

SEED_BITS = 62


class TokenSession:
    """Satisfies CapturedSession."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def num_calls(self) -> int:
        return self.session.num_calls

    @property
    def is_busy(self) -> bool:
        return self.session.num_running > 0

    @property
    def held_bytes(self) -> int:
        return self.session.held_bytes

    @property
    def fault(self) -> str:
        return self.session.engine_fault

    @property
    def forks(self) -> Mapping[str, int]:
        rows = self.session.fork_report().forks
        return Counter([row.cause for row in rows]) if rows else NO_COUNTS

    @property
    def healed(self) -> Mapping[str, int]:
        return self.session.fork_report().healed

    def node_of(self, name: int | str) -> int:
        if isinstance(name, int):
            if not self.session.is_sampled(name):
                raise LookupError(name)
            return name
        # Each dialect puts its own prefix before the reply's id.
        at = name.find(self.session_id)
        if at < 0:
            raise LookupError(name)
        try:
            return self.session.node_of(name[at:])
        except SessionError:
            raise LookupError(name) from None

    def seal(self, reason: str) -> None:
        self.session.seal(reason)

    def account(self, rewards: Rewards) -> dict[str, Any]:
        record = self.session.record()
        token_ids, logprobs = array("i"), array("f")
        token_ids.frombytes(record.token_ids)
        logprobs.frombytes(record.logprobs)
        samples = cut_samples(record.nodes, token_ids, logprobs, rewards)
        for sample in samples:
            sample["images"] = images_on(record.nodes, sample["nodes"])
        return {
            "samples": samples,
            "unused": unused_turns(record.nodes),
            "messages": record.messages,
            "images": record.images,
            "forks": [msgspec.structs.asdict(row) for row in record.forks],
            "healed": record.healed,
            "num_calls": record.num_calls,
            "capture": "tokens",
        }


class TokenCapture:
    """Satisfies Capture."""

    def __init__(self, runtime: Runtime, sampling: SamplingPolicy) -> None:
        """`sampling` is for sessions that wish for no other."""
        self._runtime = runtime
        self._sampling = sampling
        self._name = new_id("gw")
        self._num_opened = 0

    def open(self, wish: SessionWish) -> Opened:
        group = GroupId(self._name, self._num_opened)
        self._num_opened += 1
        seed = secrets.randbits(SEED_BITS) if wish.seed is None else wish.seed
        rollout_id = RolloutId(group, 0)
        opened = self._runtime.open_session(rollout_id, wish.sampling or self._sampling, seed)
        return Opened(TokenSession(opened.session), opened.api_key, opened.path_secret)

    def close(self, captured: CapturedSession) -> None:
        assert isinstance(captured, TokenSession)
        self._runtime.end_group(captured.session.rollout_id.group_id)
