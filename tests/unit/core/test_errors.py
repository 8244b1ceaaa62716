"""An error is one line with its subject and its remedy."""

import copy
from typing import get_args

import pytest

from rollmesh.core.errors import (
    CallFailed,
    ConfigError,
    MissReason,
    Overloaded,
    OwnerGone,
    RankGone,
    RollmeshError,
    ShardMissing,
    StoreFull,
)

OWNER = "tcp://10.0.0.1:7000"


@pytest.mark.parametrize("reason", get_args(MissReason))
def test_a_missing_shard_is_reported_with_its_id_and_reason(reason: MissReason) -> None:
    error = ShardMissing(0x7_0000_0001, OWNER, reason)
    assert str(error).startswith(f"shard 0x700000001 of {OWNER} is not there ({reason}): ")
    assert (error.shard_id, error.owner, error.reason) == (0x7_0000_0001, OWNER, reason)
    assert "\n" not in str(error)


def test_each_reason_has_its_own_message() -> None:
    messages = {str(ShardMissing(1, "", each)).rpartition(": ")[2] for each in get_args(MissReason)}
    assert len(messages) == 4


def test_an_owner_that_is_gone_is_named() -> None:
    error = OwnerGone(OWNER, "it hung up")
    assert str(error).startswith(f"{OWNER} is gone: it hung up; ")
    assert (error.owner, error.why) == (OWNER, "it hung up")


def test_a_full_store_is_reported_with_its_size_and_the_remedy() -> None:
    error = StoreFull(300, 900, 1000, "/dev/shm has room for 20")
    assert str(error).startswith(
        "300 bytes do not fit: 900 of 1000 are held, /dev/shm has room for 20; "
    )
    assert "raise the budget" in str(StoreFull(300, 900, 1000))
    assert (error.wanted_bytes, error.held_bytes, error.max_bytes) == (300, 900, 1000)


@pytest.mark.parametrize(
    "error",
    [
        ShardMissing(1, OWNER, "expired"),
        OwnerGone(OWNER, "it hung up"),
        StoreFull(300, 900, 1000),
        RankGone(1, "killed by signal 9"),
        CallFailed("actor.step", 1, "no"),
        Overloaded("later", 3.0),
        ConfigError("no such key"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copied_error_equals_the_original(error: RollmeshError) -> None:
    again = copy.copy(error)  # through __reduce__, as process pools and Ray do
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
