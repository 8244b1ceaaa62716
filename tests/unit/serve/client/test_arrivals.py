"""Arrivals: a result is decoded by its taker, and a bad one is a drop with its reason."""

import msgspec
import numpy as np
import pytest
from msgspec import structs

from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    ErrorPlace,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    Task,
    VersionRun,
)
from rollmesh.serve.client.arrivals import Dropped, Finished, RawResult, booked_of, open_result
from rollmesh.serve.client.journal_entries import decode_entry, encode_entry
from rollmesh.wire.bodies import encode_record

IDS = np.array([7, 8, 9], np.int32).tobytes()
LOGPROBS = np.array([-0.5, -1.5], np.float32).tobytes()


def record(reason: str = "") -> GroupRecord:
    rollout = RolloutRecord(
        index=0,
        outcome=Outcome.COMPLETED,
        reward=1.0,
        nodes=[NodeRow(-1, 1, False), NodeRow(0, 2, True, (VersionRun(3, 2),))],
        num_tokens=3,
        num_logprobs=2,
        messages=msgspec.Raw(b'[{"role":"user","content":"hi \\u00e9"}]'),
    )
    return GroupRecord(task=Task(id="t"), rollouts=[rollout], reason=reason)


def raw(
    body: bytes, buffers: tuple[bytes, ...] = (IDS, LOGPROBS), complete: bool = True
) -> RawResult:
    return RawResult(GroupId("r1", 1), 2, "w1", complete, body, buffers, 99)


def test_result_comes_with_its_record_and_arrays() -> None:
    finished = open_result(raw(encode_record(record())))
    assert isinstance(finished, Finished)
    assert finished.token_ids.tolist() == [7, 8, 9]
    assert finished.logprobs.tolist() == [-0.5, -1.5]
    assert (finished.attempt, finished.worker_id, finished.position) == (2, "w1", 99)
    assert bytes(finished.record.rollouts[0].messages).startswith(b'[{"role":"user"')


def test_incomplete_result_is_dropped_with_the_workers_reason() -> None:
    dropped = open_result(raw(encode_record(record("infra_error: gone")), complete=False))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "infra_error: gone"
    assert dropped.record is not None


def test_the_place_of_an_error_reaches_the_drop_log() -> None:
    """That of a rollout's own error, or else of the error in the scoring of its group."""
    came, place = record("infra_error: score_group"), ErrorPlace("KeyError", "/h/e.py", 9, "score")
    come = structs.replace(came, place=place)
    dropped = open_result(raw(encode_record(come), complete=False))
    assert isinstance(dropped, Dropped)
    assert [each.place for each in booked_of(dropped, 0).rollouts] == [place]
    failed = structs.replace(
        came.rollouts[0], outcome=Outcome.INFRA_ERROR, error="KeyError: x", place=place
    )
    beside = structs.replace(came.rollouts[0], index=1, outcome=Outcome.CANCELLED)
    come = structs.replace(come, rollouts=[failed, beside])
    dropped = open_result(raw(encode_record(come), complete=False))
    assert isinstance(dropped, Dropped)
    booked = booked_of(dropped, 0)
    assert [(each.error, each.place) for each in booked.rollouts] == [
        ("KeyError: x", place),
        ("", None),
    ]
    assert decode_entry([encode_entry(booked)]) == booked


@pytest.mark.parametrize(
    ("body", "buffers"),
    [
        (b"not json", (IDS, LOGPROBS)),
        (encode_record(record()), (IDS,)),
        (encode_record(record()), (IDS[:5], LOGPROBS)),
        (encode_record(record()), (IDS[:4], LOGPROBS)),
    ],
)
def test_malformed_result_is_dropped_with_its_reason(
    body: bytes, buffers: tuple[bytes, ...]
) -> None:
    dropped = open_result(raw(body, buffers))
    assert isinstance(dropped, Dropped)
    assert dropped.reason.startswith("malformed: ")
