"""Tensors are stored where they are made, fetched once per consumer, and freed when cleared."""

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollmesh.core.errors import FetchMismatch, OwnerGone, ShardMissing, StoreFull, TensorError
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor, collect, pack, unpack
from rollmesh.tensors.plane import Plane, current
from rollmesh.tensors.torch_bridge import ReadOnlyTensor
from tests.unit.tensors.relaying_peers import MAX_BYTES, Mesh, StoreBackend, process_of


class Batch(msgspec.Struct, frozen=True):
    tensors: dict[str, Any]
    name: str


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    made = Mesh(tmp_path)
    yield made
    made.close()


def rollouts() -> list[Any]:
    """A batch like that of a trainer."""
    return [
        {
            "input_ids": torch.arange(10 * n, dtype=torch.int32),
            "logprobs": torch.full((10 * n,), -1.5).bfloat16(),
            "reward": 1.0,
            "image": None,
            "extra": Batch({"mask": torch.ones(3, n, dtype=torch.bool)}, "extra"),
        }
        for n in range(1, 5)
    ]


def assert_same(got: Any, wanted: Any) -> None:
    """Compare two nests: equal tensors in equal places."""
    tensors, others = collect(got, torch.Tensor), collect(wanted, torch.Tensor)
    assert len(tensors) == len(others) > 0
    assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))
    assert [each.dtype for each in tensors] == [each.dtype for each in others]


def stored_bytes(plane: Plane) -> int:
    storage = plane.stats().storage
    assert storage is not None
    return storage.total_bytes


def kept(plane: Plane) -> int:
    buffer = plane.stats().buffer
    assert buffer is not None
    return buffer.num_tensors


def test_a_batch_is_passed_between_processes_as_handles(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize(rollouts(), step=3)
    assert collect(handles, torch.Tensor) == []
    assert handles[0]["reward"] == 1.0
    assert handles[0]["image"] is None
    assert type(handles[0]["extra"]) is Batch
    assert_same(consumer.localize(handles), rollouts())


def test_a_handle_describes_its_tensor(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = owner.remotize(torch.zeros(2, 3, dtype=torch.float8_e4m3fn), step=5)
    assert handle == RTensor(handle.shard_id, "tcp://127.0.0.1:7001", 5, "float8_e4m3fn", (2, 3), 6)
    assert owner.store is not None
    assert handle.incarnation == owner.store.incarnation
    assert owner.remotize(torch.zeros(1)).step == UNTAGGED


def test_packed_handles_lead_to_the_same_tensors(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = collect(owner.remotize(rollouts()), RTensor)
    assert_same(consumer.localize(unpack(pack(handles))), rollouts())


def test_an_owner_reads_its_own_shards_without_a_fetch(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    assert_same(owner.localize(owner.remotize(rollouts())), rollouts())
    assert mesh.backend.fetches == []
    assert kept(owner) == 0


def test_an_owner_recognises_its_own_shards_under_any_address(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = msgspec.structs.replace(owner.remotize(torch.ones(2)), owner="tcp://here:7001")
    assert owner.localize(handle).tolist() == [1, 1]
    assert mesh.backend.fetches == []


def test_one_tensor_at_two_places_is_stored_and_localized_as_one(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    shared = torch.arange(1000)
    handles = owner.remotize({"a": shared, "b": [shared]})
    assert stored_bytes(owner) == 8000
    for plane in (owner, consumer):
        back = plane.localize(handles)
        assert back["a"] is back["b"][0]


def test_one_shard_under_two_handles_is_fetched_once(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handle = owner.remotize(torch.ones(4))
    again = handle.tagged(9)
    back = consumer.localize([handle, again, handle])
    assert back[0] is back[1] is back[2]
    assert mesh.backend.fetches == [("tcp://127.0.0.1:7001", 1)]


def test_a_slice_holds_its_own_bytes_only(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    padded = torch.zeros(8, 8192)
    handles = owner.remotize({"attention_mask": torch.ones(8, 512), "rows": padded[:, :16]})
    assert handles["rows"].num_bytes == 8 * 16 * 4
    assert stored_bytes(owner) == 8 * 16 * 4 + 8 * 512 * 4


def test_a_padded_batch_is_not_cut(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    batch = {"input_ids": torch.ones(2, 16), "attention_mask": torch.zeros(2, 16)}
    assert_same(owner.localize(owner.remotize(batch)), batch)


def test_a_stored_tensor_does_not_change_with_its_source(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    source = torch.ones(4, requires_grad=True)
    handle = owner.remotize(source)
    with torch.no_grad():
        source.zero_()
    back = owner.localize(handle)
    assert back.tolist() == [1, 1, 1, 1]
    assert not back.requires_grad


def test_tensors_and_other_things_pass_when_localized(mesh: Mesh) -> None:
    consumer = mesh.consumer()
    batch: list[Any] = [torch.ones(1), None, 3, "text", {}]
    assert consumer.localize(batch) is batch


def test_handles_pass_when_remotized(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = owner.remotize(torch.ones(1))
    nested = owner.remotize([handle, torch.zeros(1)])
    assert nested[0] is handle
    assert owner.localize(nested)[1].tolist() == [0]


@pytest.mark.parametrize("nested", [[], {}, None, 1.5, {"loss": 0.5}, [None, None]])
def test_values_without_tensors_pass_unchanged(mesh: Mesh, nested: object) -> None:
    owner = mesh.process(7001)
    assert owner.localize(owner.remotize(nested)) == nested
    assert stored_bytes(owner) == 0


def test_a_localized_tensor_is_remotized_like_any_other(mesh: Mesh) -> None:
    first, second = mesh.process(7001), mesh.process(7002)
    handle = second.remotize(second.localize(first.remotize(torch.arange(5))))
    assert handle.owner == "tcp://127.0.0.1:7002"
    assert first.localize(handle).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("buffer", [True, False])
def test_several_owners_are_asked_once_each(mesh: Mesh, buffer: bool) -> None:
    owners = [mesh.process(port) for port in (7001, 7002, 7003)]
    mixed = [each.remotize(torch.full((4,), float(n))) for n in range(6) for each in owners]
    consumer = mesh.process(7004, buffer=buffer)
    back = consumer.localize(mixed)
    assert [int(each[0]) for each in back] == [n for n in range(6) for _ in owners]
    assert sorted(mesh.backend.fetches) == [(f"tcp://127.0.0.1:700{n}", 6) for n in (1, 2, 3)]


def test_a_second_localize_serves_from_the_buffer(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(4), torch.zeros(4)])
    consumer.localize(handles[0])
    consumer.localize(handles)
    consumer.localize(handles)
    assert [count for _, count in mesh.backend.fetches] == [1, 1]
    assert kept(consumer) == 2


def test_a_localized_tensor_survives_its_shard(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handle = owner.remotize(torch.arange(1000), step=1)
    own, copy = owner.localize(handle), consumer.localize(handle)
    for plane in (owner, consumer):
        plane.end_step(1)
    other = owner.remotize(torch.zeros(1000, dtype=torch.long), step=2)
    assert torch.equal(own, torch.arange(1000))
    assert torch.equal(copy, torch.arange(1000))
    assert torch.equal(owner.localize(other), torch.zeros(1000, dtype=torch.long))


def test_the_end_of_a_step_frees_owners_and_consumers(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    old = owner.remotize(rollouts(), step=4)
    new = owner.remotize(rollouts(), step=5)
    untagged = owner.remotize(torch.ones(2))
    consumer.localize([old, new])
    for plane in (owner, consumer):
        plane.end_step(4)
    with pytest.raises(ShardMissing) as caught:
        consumer.localize(old)
    assert caught.value.reason == "cleared"
    consumer.localize([new, untagged])


def test_the_end_of_a_step_frees_the_copies_of_every_role(mesh: Mesh) -> None:
    actor, teacher, evaluation, idle = mesh.process(7001), *(mesh.consumer() for _ in range(3))
    batch = actor.remotize(rollouts(), step=7)
    results = teacher.localize(batch), evaluation.localize(batch)
    del results
    for plane in (actor, teacher, evaluation, idle):
        plane.end_step(7)
    assert stored_bytes(actor) == kept(teacher) == kept(evaluation) == kept(idle) == 0


def test_a_clear_drops_the_copy_of_an_owner_that_consumes(mesh: Mesh) -> None:
    first, second = mesh.process(7001), mesh.process(7002)
    own, fetched = second.remotize(torch.ones(2)), first.remotize(torch.ones(2))
    second.localize([own, fetched])
    assert second.clear([own.shard_id, fetched.shard_id]) == 1
    assert stored_bytes(second) == kept(second) == 0
    assert stored_bytes(first) == 8


def test_a_clear_at_its_owner_evicts_the_copies_first(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handle = owner.remotize(torch.ones(2))
    consumer.localize(handle)
    assert consumer.clear_at(handle.owner, [handle.shard_id]) == 1
    assert stored_bytes(owner) == kept(consumer) == 0
    handle = owner.remotize(torch.ones(2))
    consumer.localize(handle)
    mesh.backend.stores.clear()
    with pytest.raises(OwnerGone):
        consumer.clear_at(handle.owner, [handle.shard_id])
    assert kept(consumer) == 0


def test_an_owner_clears_its_own_shards_without_a_backend(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = owner.remotize(torch.ones(2))
    assert owner.clear_at(handle.owner, [handle.shard_id]) == 1
    assert mesh.backend.cleared == []


def test_a_handle_of_an_earlier_incarnation_is_missing_at_once(mesh: Mesh) -> None:
    old = mesh.process(7001).remotize(torch.ones(2))
    owner, consumer = mesh.process(7001), mesh.consumer()
    for plane in (owner, consumer):
        with pytest.raises(ShardMissing) as caught:
            plane.localize(old)
        assert caught.value.reason == "owner_restarted"
    assert [owner for owner, _ in mesh.backend.fetches] == [old.owner]


def test_one_missing_shard_fails_the_call_and_keeps_nothing(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.ones(2), torch.zeros(2)])
    owner.clear([handles[1].shard_id])
    with pytest.raises(ShardMissing) as caught:
        consumer.localize(handles)
    assert caught.value.shard_id == handles[1].shard_id
    assert kept(consumer) == 0


class LosesLastShard(StoreBackend):
    """A backend that loses the last shard of each fetch."""

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        return super().fetch(owner, handles)[:-1]


@pytest.mark.parametrize("num_owners", [1, 2])
@pytest.mark.parametrize("buffer", [FetchBuffer(MAX_BYTES), None], ids=["buffer", "no buffer"])
def test_a_backend_that_returns_too_few_shards_is_a_mismatch(
    mesh: Mesh, buffer: FetchBuffer | None, num_owners: int
) -> None:
    backend = LosesLastShard()
    backend.stores = mesh.backend.stores
    owners = [mesh.process(7001 + number) for number in range(num_owners)]
    handles = [each.remotize([torch.ones(2), torch.zeros(2)]) for each in owners]
    with pytest.raises(FetchMismatch, match=r"2 shards were asked of .*, 1 came"):
        Plane(None, buffer, backend).localize(handles)
    assert buffer is None or buffer.stats().num_tensors == 0


def test_a_batch_beyond_the_budget_stores_nothing(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    too_much = [torch.ones(MAX_BYTES // 8) for _ in range(3)]
    with pytest.raises(StoreFull):
        owner.remotize(too_much)
    assert stored_bytes(owner) == 0


def test_a_process_without_a_backend_names_the_owner(mesh: Mesh) -> None:
    handle = mesh.process(7001).remotize(torch.ones(2))
    for owner, why in ((handle.owner, handle.owner), ("", "no server")):
        with pytest.raises(TensorError, match=why):
            Plane().localize(msgspec.structs.replace(handle, owner=owner))


def test_without_a_plane_tensors_pass_unchanged() -> None:
    plane = current()
    batch = rollouts()
    assert plane.remotize(batch, step=1) is batch
    assert plane.localize(batch) is batch
    plane.end_step(1)
    assert plane.clear([1, 2]) == plane.evict(None) == 0
    assert (plane.stats().storage, plane.stats().buffer) == (None, None)


def test_a_handle_finds_its_tensor_by_the_process_plane(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = owner.remotize(torch.arange(3))
    with process_of(mesh.consumer()):
        assert handle.to_local().tolist() == [0, 1, 2]
        assert isinstance(handle.to_local(), ReadOnlyTensor)
        assert len(mesh.backend.fetches) == 1
    with pytest.raises(TensorError, match="no way"):
        handle.to_local()


def test_threads_that_localize_the_same_share_one_fetch_each(mesh: Mesh) -> None:
    owner, consumer = mesh.process(7001), mesh.consumer()
    handles = owner.remotize([torch.full((16,), float(n)) for n in range(64)])
    with ThreadPoolExecutor(8) as pool:
        backs = list(pool.map(consumer.localize, [handles] * 32))
    assert all([int(each[0]) for each in back] == [*range(64)] for back in backs)
    assert sum(count for _, count in mesh.backend.fetches) == 64


def test_a_handle_of_a_missing_shard_names_the_reason(mesh: Mesh) -> None:
    owner = mesh.process(7001)
    handle = owner.remotize(torch.ones(2))
    owner.clear([handle.shard_id])
    with process_of(mesh.consumer()), pytest.raises(ShardMissing, match="cleared") as caught:
        handle.to_local()
    assert (caught.value.shard_id, caught.value.owner) == (handle.shard_id, handle.owner)


@pytest.mark.parametrize("seed", range(3))
def test_threads_of_many_processes_store_read_and_free_at_once(mesh: Mesh, seed: int) -> None:
    planes = [mesh.process(7001 + number) for number in range(3)]
    handles: list[tuple[int, RTensor]] = []
    begin = threading.Barrier(6)

    def hammer(number: int) -> int:
        rng = random.Random(f"{seed} {number}")
        plane, num_read = planes[number % len(planes)], 0
        begin.wait()
        for step in range(60):
            value = rng.randrange(10**6)
            tensor = torch.full((rng.randrange(1, 50),), value)
            handles.append((value, plane.remotize(tensor, step)))
            wanted = rng.sample(handles[-20:], min(8, len(handles)))
            with contextlib.suppress(ShardMissing):
                got = plane.localize([handle for _, handle in wanted])
                assert [int(each[0]) for each in got] == [value for value, _ in wanted]
                num_read += len(got)
            if step % 10 == 0:
                plane.clear([handle.shard_id for _, handle in rng.choices(handles, k=5)])
        return num_read

    with ThreadPoolExecutor(6) as pool:
        assert min(pool.map(hammer, range(6))) > 0
    for plane in planes:
        plane.end_step(60)
    for plane in planes:
        storage = plane.stats().storage
        assert storage is not None
        assert (storage.num_tensors, storage.total_bytes, storage.retained_bytes) == (0, 0, 0)
        assert kept(plane) == 0


def test_a_step_takes_shards_of_all_owners(mesh: Mesh) -> None:
    own, other = mesh.process(1), mesh.process(2)
    handles = [*own.remotize([torch.ones(2)]), *other.remotize([torch.ones(3)])]
    own.take(handles, 7)
    assert [own.end_step_at(each.owner, 7) for each in handles] == [1, 1]
