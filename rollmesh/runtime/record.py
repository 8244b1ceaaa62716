"""The record of a sealed session, made from its holdings.

Its rows and arrays are those of the token graph, each token once. Its messages are those of the
main line's last delivered answer (branches.py).
"""

from collections.abc import Callable, Collection

import msgspec

from rollmesh.core.types import ForkRow, NodeRow
from rollmesh.runtime.branches import branches_of
from rollmesh.runtime.deltas import Answer
from rollmesh.runtime.holdings import Holdings, as_message
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.reply import Reply


class SessionRecord(msgspec.Struct, frozen=True):
    """See the module."""

    nodes: list[NodeRow]
    token_ids: memoryview
    """Bytes of int32: all nodes' tokens in row order."""
    logprobs: memoryview
    """Bytes of float32: the sampled nodes' in row order."""
    engines: list[str]
    """That sampled them; see RolloutRecord."""
    messages: msgspec.Raw
    """The main line's messages, a JSON array, for people."""
    num_calls: int
    forks: list[ForkRow]
    images: dict[str, ImageRef]
    """That its nodes show, by their digests; not read."""
    healed: dict[str, int]
    """Differences that did not fork, by kind."""

    @property
    def num_forks(self) -> int:
        return len(self.forks)


def record_of(
    held: Holdings, delivered: Collection[Reply], num_calls: int, parse: Callable[[Reply], Answer]
) -> SessionRecord:
    """The record of a session with these delivered replies; `parse` reads one of them."""
    branches, nodes = branches_of(held.graph, held.root_kinds), held.graph.nodes
    last = max(
        delivered,
        key=lambda reply: (branches[nodes[reply.node].root] == "main", reply.node),
        default=None,
    )
    messages: list[bytes] = []
    if last is not None:
        line = held.history.raws_to(last.source.context)
        messages = [*line, as_message(parse(last)).as_json()]
    report = held.fork_report()
    return SessionRecord(
        nodes=held.graph.rows(branches),
        token_ids=memoryview(held.graph.token_ids).cast("B"),
        logprobs=memoryview(held.graph.logprobs).cast("B"),
        engines=held.graph.engines,
        messages=msgspec.Raw(b"[" + b",".join(messages) + b"]"),
        num_calls=num_calls,
        forks=report.forks,
        images=dict(held.history.images),
        healed=report.healed,
    )
