"""The samples of a finished session as plain lists, for the gateway's answers.

T is the number of tokens of one sample. Invariants: samples are those of the intake, as cut by
runtime/token_graph.py, so each sampled token has mask 1 in exactly one of them; void and superseded
turns train nowhere; rewards are put in later (account.py), since they may change. Driven by
tokens.py and relay/account.py.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from rollmesh.core.types import Branch, NodeRow
from rollmesh.runtime.token_graph import reasons_of, sample_paths, temperature_of

BRANCHES: tuple[Branch, ...] = get_args(Branch)


def cut_samples(
    nodes: Sequence[NodeRow],
    token_ids: "array[int]",
    logprobs: "array[float]",
) -> Iterator[dict[str, Any]]:
    """One JSON object for each sample, all branches, in the order of their last turns, made one by
    one, since of a long session each is large.

    `token_ids`, `loss_mask` (0 or 1), `logprobs` (0 where masked) and `policy_versions` (-1 where
    masked, or where the weights have none) are lists of length T; `nodes` are the rows of the path,
    and `sampling` is what the last of them was sampled with.
    """
    ids_of = _spans(nodes, token_ids, lambda node: node.num_tokens)
    logprobs_of = _spans(nodes, logprobs, lambda node: node.num_tokens if node.sampled else 0)
    trains = [not reason for reason in reasons_of(nodes, BRANCHES)]
    for claim in sample_paths(nodes, trains):
        last = nodes[claim.path[-1]]
        sample: dict[str, Any] = {
            "token_ids": [],
            "logprobs": [],
            "loss_mask": [],
            "policy_versions": [],
            "branch": last.branch,
            "temperature": temperature_of(last),
            "sampling": last.params,
            "nodes": claim.path,
        }
        for row in claim.path:
            num_tokens, is_trained = nodes[row].num_tokens, row in claim.trained
            zeros = [0] * num_tokens
            sample["token_ids"] += ids_of[row]
            sample["logprobs"] += logprobs_of[row] if is_trained else zeros
            sample["loss_mask"] += [1] * num_tokens if is_trained else zeros
            sample["policy_versions"] += _versions(nodes[row]) if is_trained else [-1] * num_tokens
        yield sample


def unused_turns(nodes: Sequence[NodeRow]) -> list[dict[str, Any]]:
    """Sampled turns that train nowhere, and why: `void` or `superseded`."""
    reasons = reasons_of(nodes, BRANCHES)
    return [
        {"node": row, "num_tokens": node.num_tokens, "reason": reasons[row]}
        for row, node in enumerate(nodes)
        if node.sampled and node.num_tokens and reasons[row]
    ]


def _spans(nodes: Sequence[NodeRow], flat: Any, num_of: Any) -> list[list[Any]]:
    """Each row's part of a flat array."""
    spans, at = [], 0
    for node in nodes:
        end = at + num_of(node)
        spans.append(flat[at:end].tolist())
        at = end
    return spans


def _versions(node: NodeRow) -> list[int]:
    versions: list[int] = []
    for run in node.policy_versions:
        versions += [run.policy_version] * run.num_tokens
    return versions
