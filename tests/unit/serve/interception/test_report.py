"""A report is rendered in pieces with the current rewards, its samples are exact, and long parts
are blobs."""

from array import array
from typing import Any

import msgspec

from rollmesh.core.types import NodeRow, SamplingParams, VersionRun
from rollmesh.runtime.blobs import Blob, hold
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES, cut, equals, joined
from rollmesh.serve.interception.report import (
    ReportWriter,
    RewardSlot,
    SessionReport,
    SessionRewards,
    cut_samples,
    unused_turns,
)

LONG = b"A" * 50_000


def render(account: SessionReport, *rewards: Any) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(
        joined(account.render(SessionRewards(*rewards), a=1))
    )
    return read


def test_a_samples_reward_is_that_of_the_newest_rewarded_turn_of_its_path() -> None:
    writer = ReportWriter()
    paths = [(0, 1, 2, 3), (0, 1, 2, 4)]
    writer.rows(
        "samples", [(RewardSlot(path, has_default=True), {"n": path[-1]}) for path in paths]
    )
    writer.rows("calls", [(RewardSlot((number,), has_default=False), {}) for number in (1, 3)])
    account = writer.build("s", {}, ())
    assert render(account, 0.5, {1: 0.25, 4: 1.0}) == {
        "session_id": "s",
        "a": 1,
        "samples": [{"reward": 0.25, "n": 3}, {"reward": 1.0, "n": 4}],
        "calls": [{"reward": 0.25}, {"reward": None}],
    }
    assert [sample["reward"] for sample in render(account, 0.5)["samples"]] == [0.5, 0.5]
    assert [sample["reward"] for sample in render(account)["samples"]] == [None, None]


def test_long_parts_are_not_copied_into_a_report() -> None:
    image, writer = hold(LONG), ReportWriter()
    writer.listed("messages", [(b'{"n":"', image, b'"}'), (b"7",)])
    writer.named("images", [("d", (b'"', image, b'"')), ("e", (b"null",))])
    writer.field("tokens", list(range(MIN_BLOB_BYTES)))
    writer.ready("more", (b"[]",))
    account = writer.build("s", {"r1": 1}, (1,))
    pieces = account.render(SessionRewards())
    assert [piece for piece in pieces if isinstance(piece, Blob)] == [image, image]
    assert isinstance(account.text, Blob)
    assert account.num_bytes == len(b'{"r1":1}')
    text = LONG.decode()
    assert render(account) == {
        "session_id": "s",
        "a": 1,
        "messages": [{"n": text}, 7],
        "images": {"d": text, "e": None},
        "tokens": list(range(MIN_BLOB_BYTES)),
        "more": [],
    }


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


def test_turns_that_do_not_train_are_listed_with_reasons() -> None:
    assert unused_turns(NODES) == [
        {"node": 5, "num_tokens": 1, "reason": "void"},
        {"node": 6, "num_tokens": 1, "reason": "superseded"},
    ]


def test_pieces_of_a_text_join_to_the_same_text() -> None:
    quotes = b'"x' * MIN_BLOB_BYTES
    for raw in (
        b"",
        b"{}",
        LONG,
        b'{"a":"' + LONG + b'","b":"' + LONG + b'"}',
        quotes,
        LONG + b'"',
    ):
        pieces = cut(raw)
        assert joined(pieces) == raw
        assert equals(pieces, memoryview(raw))
        assert not equals(pieces, memoryview(raw + b"x"))
        assert not equals(pieces, memoryview(b"x" + raw))
        assert sum(len(p) for p in pieces if isinstance(p, bytes)) < MIN_BLOB_BYTES
    one, other = cut(b'{"a":"' + LONG + b'"}'), cut(b'{"a":"' + LONG + b'","marked":true}')
    assert one[1] is other[1]
