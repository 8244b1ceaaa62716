"""Which rows of a node table make which training sample: paths, cut so that no token trains twice.

A sample is the path from a root to one sampled node; it claims those rows of the path that nobody
claimed before, and they train in it alone. Owns that choice and the reasons why a row does not
train. Invariant: each row that trains is claimed by exactly one sample. Pure, without arrays: the
intake lays numpy over it, the stand-alone gateway plain lists.
"""

from collections.abc import Collection, Sequence

import msgspec

from rollmesh.core.types import Branch, NodeRow


class Claim(msgspec.Struct, frozen=True):
    """One sample's rows."""

    path: list[int]
    """From the root down to its last node."""
    trained: set[int]
    """Those of the path that train here."""


def claims_of(nodes: Sequence[NodeRow], trains: Sequence[bool]) -> list[Claim]:
    """The samples of a table whose rows in `trains` train, by creation of their last node.

    Children stand after their parents, so that going backwards every last node comes before what
    it stands on; each claims what nobody below claimed. A row sampled at another temperature ends
    a sample of its own.
    """
    claimed = [False] * len(nodes)
    claims = []
    for last in range(len(nodes) - 1, -1, -1):
        if not trains[last] or claimed[last]:
            continue
        path = path_to(nodes, last)
        temperature = temperature_of(nodes[last])
        trained = {
            row
            for row in path
            if trains[row] and not claimed[row] and temperature_of(nodes[row]) == temperature
        }
        for row in trained:
            claimed[row] = True
        claims.append(Claim(path, trained))
    return claims[::-1]


def path_to(nodes: Sequence[NodeRow], row: int) -> list[int]:
    """The rows from the root down to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = nodes[row].parent
    return path[::-1]


def images_on(nodes: Sequence[NodeRow], path: Sequence[int]) -> tuple[str, ...]:
    """Digests of the images that a path's tokens have placeholders for, in order."""
    return tuple([digest for row in path for digest in nodes[row].images])


def reasons_of(nodes: Sequence[NodeRow], branches: Collection[Branch]) -> list[str]:
    """Why each row does not train; '' for those that do. `branches` says which branches train."""
    with_children = {node.parent for node in nodes}
    return [_reason(node, row in with_children, branches) for row, node in enumerate(nodes)]


def temperature_of(node: NodeRow) -> float:
    """What a row was sampled with; its log-probs are of that distribution."""
    return node.params.temperature if node.params else 1.0


def _reason(node: NodeRow, has_children: bool, branches: Collection[Branch]) -> str:
    if not node.sampled or not node.num_tokens:
        return "context"
    if node.finish_reason == "void":
        return "void"
    if node.superseded and not has_children:
        return "superseded"
    if node.branch not in branches:
        return f"branch: {node.branch}"
    return ""
