"""Buckets hold every byte once; one address is reachable by all engines. Groups: tests/flow."""

from typing import Any

import pytest

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece
from rollmesh.trainer.weights.transports.distributed import (
    ExpectedEngines,
    buckets,
    check_ranks,
    common_address,
)


def piece(name: str, num_bytes: int) -> TensorPiece:
    return TensorPiece(name, "uint8", (num_bytes,), 0, num_bytes)


PARTS = [
    SharedSegment("/a", (piece("a", 6), piece("nothing", 0), piece("b", 5), piece("large", 30))),
    SharedSegment("/b", (piece("c", 1), piece("d", 1))),
    SharedSegment("/c", (piece("empty", 0),)),
]


@pytest.mark.parametrize("max_bytes", [1, 11, 12, 1000])
def test_buckets_hold_every_byte_once_and_in_order(max_bytes: int) -> None:
    found = [
        each for bucket in buckets(PARTS, max_bytes) for part in bucket for each in part.pieces
    ]
    assert [each.name for each in found] == ["a", "b", "large", "c", "d"]
    for bucket in buckets(PARTS, max_bytes):
        pieces = [each for part in bucket for each in part.pieces]
        assert len(pieces) == 1 or sum(each.num_bytes for each in pieces) <= max_bytes


def test_bucket_names_its_ranks_memory() -> None:
    paths = [part.path for bucket in buckets(PARTS, 1000) for part in bucket]
    assert paths == ["/a", "/b"]


def test_engines_of_this_host_are_met_on_loopback() -> None:
    assert common_address(["http://127.0.0.1:30000", "http://localhost:30001"]) == "127.0.0.1"


@pytest.mark.parametrize("info", [{}, {"tp_size": 4}, {"dp_size": 2, "enable_dp_attention": True}])
def test_ranks_of_one_tensor_parallel_group_are_accepted(info: dict[str, Any]) -> None:
    check_ranks("http://a", info)


@pytest.mark.parametrize("info", [{"dp_size": 2}, {"tp_size": 2, "pp_size": 2}])
def test_replicas_and_pipelines_are_refused_before_a_group_is_formed(info: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused, match="http://a: "):
        check_ranks("http://a", info)


def test_engines_that_arrived_for_a_version_are_expected_at_the_next() -> None:
    expected = ExpectedEngines()
    for policy_version, (first, second) in enumerate([("a", "b"), ("a", "b"), ("b", "a")]):
        expected.add(first, policy_version)
        assert not expected.is_complete
        expected.add(second, policy_version)
        assert expected.is_complete is (policy_version > 0), "at the first the engines are unknown"


def test_missing_engine_is_expected_once_and_a_refusing_one_never() -> None:
    expected = ExpectedEngines()
    for url in ("a", "b", "c"):
        expected.add(url, 1)
    expected.discard("c")
    complete: list[bool] = []
    for policy_version, url in ((2, "a"), (3, "a"), (3, "b"), (4, "a")):
        expected.add(url, policy_version)
        complete.append(expected.is_complete)
    assert complete == [False, True, True, False], "b may come; it has not; it is there; it is back"
