"""A node table as plain samples: masks, versions, turns that train nowhere."""

from array import array

from rollmesh.core.types import NodeRow, SamplingParams, VersionRun
from rollmesh.serve.interception.cutting import cut_samples, unused_turns


def context(parent: int, num_tokens: int) -> NodeRow:
    return NodeRow(parent, num_tokens, False)


def turn(
    parent: int, *runs: tuple[int, int], finish: str = "stop", superseded: bool = False
) -> NodeRow:
    versions = tuple(VersionRun(*run) for run in runs)
    num_tokens = sum(num for _, num in runs)
    params = SamplingParams(max_tokens=9)
    return NodeRow(parent, num_tokens, True, versions, "main", params, finish, superseded)


NODES = [
    context(-1, 2),
    turn(0, (7, 1), (8, 1)),
    context(1, 1),
    turn(2, (8, 1)),
    turn(2, (9, 2)),
    turn(2, (9, 1), finish="void"),
    turn(2, (9, 1), superseded=True),
]
IDS = array("i", range(10, 20))
LOGPROBS = array("f", [-1, -2, -3, -4, -5, -6, -7])


def test_each_sampled_token_trains_in_exactly_one_sample() -> None:
    one, other = cut_samples(NODES, IDS, LOGPROBS)
    assert one["token_ids"] == [10, 11, 12, 13, 14, 15]
    assert (one["loss_mask"], one["nodes"]) == ([0, 0, 0, 0, 0, 1], [0, 1, 2, 3])
    assert one["logprobs"] == [0, 0, 0, 0, 0, -3]
    assert other["token_ids"] == [10, 11, 12, 13, 14, 16, 17]
    assert other["loss_mask"] == [0, 0, 1, 1, 0, 1, 1]
    assert other["logprobs"] == [0, 0, -1, -2, 0, -4, -5]
    assert other["policy_versions"] == [-1, -1, 7, 8, -1, 9, 9]
    assert other["sampling"] == SamplingParams(max_tokens=9)


def test_turns_that_train_nowhere_are_named() -> None:
    assert unused_turns(NODES) == [
        {"node": 5, "num_tokens": 1, "reason": "void"},
        {"node": 6, "num_tokens": 1, "reason": "superseded"},
    ]
