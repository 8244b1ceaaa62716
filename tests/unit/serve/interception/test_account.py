"""An account is told in pieces, with the rewards of now."""

from typing import Any

import msgspec

from rollmesh.runtime.blobs import Blob, hold
from rollmesh.serve.interception.account import Account, Hole, Rewards, Writer
from rollmesh.serve.interception.pieces import MIN_BLOB_BYTES, joined

LONG = b"A" * 50_000


def told(account: Account, *rewards: Any) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(joined(account.told(Rewards(*rewards), a=1)))
    return read


def test_a_samples_reward_is_that_of_the_newest_rewarded_turn_on_its_path() -> None:
    writer = Writer()
    paths = [(0, 1, 2, 3), (0, 1, 2, 4)]
    writer.rows("samples", [(Hole(path, has_default=True), {"n": path[-1]}) for path in paths])
    writer.rows("calls", [(Hole((number,), has_default=False), {}) for number in (1, 3)])
    account = writer.account("s", {}, ())
    assert told(account, 0.5, {1: 0.25, 4: 1.0}) == {
        "session_id": "s",
        "a": 1,
        "samples": [{"reward": 0.25, "n": 3}, {"reward": 1.0, "n": 4}],
        "calls": [{"reward": 0.25}, {"reward": None}],
    }
    assert [sample["reward"] for sample in told(account, 0.5)["samples"]] == [0.5, 0.5]
    assert [sample["reward"] for sample in told(account)["samples"]] == [None, None]


def test_what_is_long_is_never_joined_and_an_account_is_small_beside_it() -> None:
    image, writer = hold(LONG), Writer()
    writer.listed("messages", [(b'{"n":"', image, b'"}'), (b"7",)])
    writer.named("images", [("d", (b'"', image, b'"')), ("e", (b"null",))])
    writer.field("tokens", list(range(MIN_BLOB_BYTES)))
    writer.ready("more", (b"[]",))
    account = writer.account("s", {"r1": 1}, (1,))
    pieces = account.told(Rewards())
    assert [piece for piece in pieces if isinstance(piece, Blob)] == [image, image]
    assert isinstance(account.text, Blob)
    assert account.num_bytes == len(b'{"r1":1}')
    text = LONG.decode()
    assert told(account) == {
        "session_id": "s",
        "a": 1,
        "messages": [{"n": text}, 7],
        "images": {"d": text, "e": None},
        "tokens": list(range(MIN_BLOB_BYTES)),
        "more": [],
    }
