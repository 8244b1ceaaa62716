"""The pioneer's names do what their users know, where that was right."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.core.errors import OwnerGone, TensorError
from rollmesh.tensors.compat import (
    clear_fetch_buffer,
    clear_node,
    collect_shards,
    fetch_buffer_stats,
    flatten_shard_ids,
    storage_stats,
)
from tests.unit.tensors.neighbours import Mesh, process_of

NONE = {"num_tensors": 0, "total_bytes": 0}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    made.close()


def test_shards_are_collected_by_owner_and_once(mesh: Mesh) -> None:
    first, second = mesh.process(7001), mesh.process(7002)
    a, b = first.remotize([torch.ones(1), torch.ones(2)])
    c = second.remotize(torch.ones(3))
    nested = {"x": [b, a], "y": (c, {"again": b}), "z": [None, 1.0]}
    assert collect_shards(nested) == {
        "tcp://127.0.0.1:7001": [b.shard_id, a.shard_id],
        "tcp://127.0.0.1:7002": [c.shard_id],
    }
    assert flatten_shard_ids(nested) == [b.shard_id, a.shard_id, c.shard_id]
    assert flatten_shard_ids([nested, nested]) == flatten_shard_ids(nested)


def test_what_holds_no_handle_has_no_shards() -> None:
    assert collect_shards([torch.ones(1), {"x": None}]) == {}
    assert flatten_shard_ids([]) == []


def test_stats_count_bytes_on_both_sides(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    with process_of(owner):
        assert storage_stats() == fetch_buffer_stats() == NONE
        handles = owner.remotize([torch.ones(8, 512)[:, :2], torch.zeros(4, dtype=torch.bfloat16)])
        assert storage_stats() == {"num_tensors": 2, "total_bytes": 64 + 8}
        assert fetch_buffer_stats() == NONE
    with process_of(consumer):
        consumer.localize(handles)
        assert fetch_buffer_stats() == {"num_tensors": 2, "total_bytes": 64 + 8}
        assert storage_stats() == NONE


def test_clearing_the_buffer_is_selective(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(1) for _ in range(4)])
    with process_of(consumer):
        consumer.localize(handles)
        assert clear_fetch_buffer([]) == 0
        assert fetch_buffer_stats()["num_tensors"] == 4
        assert clear_fetch_buffer([handles[1].shard_id, 12345]) == 1
        assert fetch_buffer_stats()["num_tensors"] == 3
        assert clear_fetch_buffer(None) == 3
        assert fetch_buffer_stats() == NONE
        assert clear_fetch_buffer() == 0


def test_clearing_a_node_clears_here_and_there(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(1) for _ in range(4)])
    with process_of(consumer):
        consumer.localize(handles)
        for node, ids in collect_shards(handles[:3]).items():
            assert clear_node(node, ids) == 3
        assert fetch_buffer_stats()["num_tensors"] == 1
    with process_of(owner):
        assert storage_stats()["num_tensors"] == 1
        assert clear_node(handles[3].owner, [handles[3].shard_id]) == 1
        assert storage_stats() == NONE


def test_a_failed_clear_is_not_swallowed(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handle = owner.remotize(torch.ones(1))
    mesh.neighbours.stores.clear()
    with process_of(consumer), pytest.raises(OwnerGone, match=handle.owner):
        clear_node(handle.owner, [handle.shard_id])


def test_who_clears_handles_is_told_to_clear_ids(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handles: Any = owner.remotize([torch.ones(1)])
    with process_of(owner):
        for clear in (clear_fetch_buffer, partial(clear_node, handles[0].owner)):
            with pytest.raises(TensorError, match=r"flatten_shard_ids\(handles\)"):
                clear(handles)
        assert storage_stats()["num_tensors"] == 1
