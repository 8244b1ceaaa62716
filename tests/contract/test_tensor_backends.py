"""Every tensor backend returns tensors as they were stored, or names the missing one and why."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import pytest
import torch

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import FetchMismatch, OwnerGone, ShardMissing, TensorError
from rollmesh.tensors.fetch_buffer import FetchBuffer, TensorBackend, check_fetched
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.store import OwnerStore, StoreSettings
from tests.contract.tensor_backends import HAS_RAY, Mesh, OwnerProcess, RayMesh
from tests.contract.tensor_owner import Kind, shards
from tests.unit.tensors.fetches import ThreadCall

PROMPT_S = 25.0
"""Shorter than the timeout of a line."""
BEGUN_S = 60.0
"""Ray is slow to remove an owner's actor on a busy machine."""
KINDS: list[Kind] = [
    ("float32", (3, 5)),
    ("bfloat16", (7,)),
    ("float8_e4m3fn", (2, 2, 2)),
    ("bool", (9,)),
    ("int64", ()),
    ("uint8", (0, 4)),
]


@pytest.fixture(scope="module", params=["ours", "ray"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    if request.param == "ray" and not HAS_RAY:
        pytest.skip("Ray is not installed: make test-ray")
    mesh = Mesh() if request.param == "ours" else RayMesh()
    yield mesh
    mesh.close()


@pytest.fixture(scope="module")
def owner(mesh: Mesh) -> Iterator[OwnerProcess]:
    with mesh.owner() as owner:
        yield owner


@pytest.fixture
def backend(mesh: Mesh, owner: OwnerProcess) -> Iterator[TensorBackend]:
    """A connected backend; shards that a test stores are cleared."""
    backend = mesh.connect()
    yield backend
    backend.close()
    assert owner.count() == (0, 0)


def fetch(backend: TensorBackend, handles: Sequence[RTensor]) -> list[Content]:
    (address,) = {each.owner for each in handles}
    contents = backend.fetch(address, [*handles])
    check_fetched(handles, contents)
    return contents


def assert_same_contents(contents: Sequence[Content], stored: Sequence[Content]) -> None:
    for found, put in zip(contents, stored, strict=True):
        assert (found.dtype, found.shape) == (put.dtype, put.shape)
        assert found.data.tobytes() == put.data.tobytes()


def held(plane: Plane) -> tuple[int, int]:
    """Tensors in its store, and in its buffer."""
    stats = plane.stats()
    assert stats.buffer is not None
    return stats.storage.num_tensors if stats.storage else 0, stats.buffer.num_tensors


def test_every_kind_arrives_as_it_was_stored(backend: TensorBackend, owner: OwnerProcess) -> None:
    handles = owner.put(KINDS, seed=1)
    assert {each.owner for each in handles} == {owner.address}
    contents = fetch(backend, handles)
    assert_same_contents(contents, shards(KINDS, 1))
    with pytest.raises(ValueError, match="read-only"):
        contents[0].data[0] = 1
    owner.clear(handles)


def test_thousands_arrive_in_the_requested_order(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    kinds: list[Kind] = [("uint8", (number % 40,)) for number in range(3000)]
    handles, stored = owner.put(kinds, seed=2), shards(kinds, 2)
    assert_same_contents(fetch(backend, handles[::-3]), stored[::-3])
    owner.clear(handles)


def test_large_tensors_arrive_intact(backend: TensorBackend, owner: OwnerProcess) -> None:
    kinds: list[Kind] = [("float32", (1000, 1176)), ("uint8", (1,)), ("float32", (999, 1176))]
    handles = owner.put(kinds, seed=3)
    assert_same_contents(fetch(backend, handles), shards(kinds, 3))
    owner.clear(handles)


def test_a_call_of_many_parts_arrives_in_order(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mesh.parts())
    handles = owner.put(KINDS * 3, seed=11)
    assert_same_contents(fetch(backend, handles), shards(KINDS * 3, 11))
    assert backend.clear(owner.address, [each.shard_id for each in handles]) == len(handles)


def test_released_tensors_leave_nothing(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess
) -> None:
    kinds: list[Kind] = [("float32", (1000, 1176))] * 4
    handles, stored = owner.put(kinds, seed=12), shards(kinds, 12)
    for _ in range(20):  # 376 MB, through an object store of 100 MB
        contents = fetch(backend, handles)
    assert_same_contents(contents, stored)
    assert mesh.is_at_rest()
    owner.clear(handles)
    del contents
    give_up_s = time.monotonic() + PROMPT_S
    while owner.retained_bytes():  # the owner gets the release a moment later
        assert time.monotonic() < give_up_s


def test_fetched_tensors_outlive_the_shard_and_the_backend(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess
) -> None:
    handles = owner.put(KINDS, seed=4)
    leaving = mesh.connect()
    contents = fetch(leaving, handles)
    owner.clear(handles)
    leaving.close()
    # Later data overwrites the freed memory.
    later = owner.put(KINDS, seed=5)
    assert_same_contents(contents, shards(KINDS, 4))
    assert_same_contents(fetch(backend, later), shards(KINDS, 5))
    owner.clear(later)


def test_a_consumer_frees_at_the_owner(backend: TensorBackend, owner: OwnerProcess) -> None:
    handles = owner.put(KINDS)
    ids = [each.shard_id for each in handles]
    assert backend.clear(owner.address, ids[:2]) == 2
    assert owner.count()[0] == len(KINDS) - 2
    assert backend.clear(owner.address, ids) == len(KINDS) - 2
    assert backend.clear(owner.address, [*ids, 5]) == 0
    assert backend.clear(owner.address, []) == 0


def test_a_missing_shard_is_named_with_its_reason(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    cleared, there = owner.put(KINDS[:2])
    owner.clear([cleared])
    never = RTensor(there.shard_id + 1000, there.owner, -1, "uint8", (1,), 1)
    older = RTensor(there.shard_id ^ 1 << 40, there.owner, -1, "uint8", (1,), 1)
    missing = {"cleared": cleared, "never_seen": never, "owner_restarted": older}
    for reason, handle in missing.items():
        with pytest.raises(ShardMissing) as caught:
            fetch(backend, [there, handle])
        error = caught.value
        named = (error.shard_id, error.owner, error.reason)
        assert named == (handle.shard_id, owner.address, reason)
    owner.clear([there])


def test_a_handle_of_another_size_is_a_mismatch(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    (handle,) = owner.put([("uint8", (8,))])
    wrong = RTensor(handle.shard_id, handle.owner, handle.step, "uint8", (9,), 9)
    with pytest.raises(FetchMismatch, match=r"8 bytes there, and 9 by its handle"):
        fetch(backend, [wrong])
    owner.clear([handle])


def test_a_failed_fetch_keeps_nothing(backend: TensorBackend, owner: OwnerProcess) -> None:
    buffer = FetchBuffer(10**6)
    handles = owner.put(KINDS, seed=6)
    owner.clear(handles[1:2])
    with pytest.raises(ShardMissing):
        buffer.get_many(handles, partial(backend.fetch, owner.address))
    assert buffer.stats().num_tensors == 0
    here = [handles[0], *handles[2:]]
    contents = buffer.get_many(here, partial(backend.fetch, owner.address))
    assert_same_contents(contents, [shards(KINDS, 6)[0], *shards(KINDS, 6)[2:]])
    owner.clear(handles)


def test_several_threads_fetch_and_clear_at_once(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    def work(seed: int, handles: list[RTensor]) -> None:
        assert_same_contents(fetch(backend, handles), shards(KINDS, seed))
        ids = [each.shard_id for each in handles]
        assert backend.clear(owner.address, ids) == len(ids)

    stored = [(seed, owner.put(KINDS, seed)) for seed in range(6)]
    for thread in [ThreadCall(partial(work, *each)) for each in stored]:
        thread.result()


def test_an_owner_that_also_consumes_drops_both_copies(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess
) -> None:
    store = OwnerStore(StoreSettings(max_bytes=2**20), SystemClock())
    with closing(store), mesh.serving(store):
        plane = Plane(store, FetchBuffer(2**20), backend)
        own: list[RTensor] = plane.remotize([torch.arange(9), torch.ones(4)])
        others = owner.put([("float32", (2, 2))] * 3)
        handles = [*own, *others]
        assert {each.owner for each in own} == {store.owner}
        assert len(plane.localize(handles)) == 5
        # It reads its own in its store: the buffer has only the others.
        assert held(plane) == (2, 3)
        assert plane.clear([own[0].shard_id, others[0].shard_id]) == 1
        assert held(plane) == (1, 2)
        assert plane.clear_at(owner.address, [each.shard_id for each in others]) == 3
        assert held(plane) == (1, 0)
        assert plane.clear([each.shard_id for each in handles]) == 1
        assert held(plane) == (0, 0)


def test_the_end_of_a_step_frees_at_owner_and_consumer(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    plane = Plane(None, FetchBuffer(2**20), backend)
    kinds: list[Kind] = [("float32", (2, 2))]
    ended, later = owner.put(kinds, step=3), owner.put(kinds, step=4)
    plane.localize([*ended, *later])
    for step in (3, 4):
        plane.end_step(step)
        assert held(plane) == (0, 4 - step)
        assert owner.end_step(step) == 1
    with pytest.raises(ShardMissing, match="cleared"):
        plane.localize(ended)
    assert held(plane) == (0, 0)


def test_a_consumers_step_takes_shards_at_their_owner_and_frees_them_there(
    backend: TensorBackend, owner: OwnerProcess
) -> None:
    plane = Plane(None, FetchBuffer(2**20), backend)
    taken, untaken = owner.put(KINDS[:2]), owner.put(KINDS[:2])
    plane.take(taken, 5)
    assert plane.end_step_at(owner.address, 4) == 0
    assert plane.end_step_at(owner.address, 5) == 2
    with pytest.raises(ShardMissing, match="cleared"):
        plane.take([*taken, *untaken], 6)
    assert plane.end_step_at(owner.address, 6) == 2, "what is there was taken all the same"
    with pytest.raises(TensorError, match="step 6 has ended"):
        plane.take(untaken, 6)


def test_a_step_takes_available_shards_even_if_other_owners_are_gone(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess
) -> None:
    plane = Plane(None, FetchBuffer(2**20), backend)
    with mesh.owner() as other:
        lost, there = other.put(KINDS[:1]), owner.put(KINDS[:2])
        other.kill()
        with pytest.raises(OwnerGone) as caught:
            plane.take([*lost, *there], 7)
        assert caught.value.owner == other.address
    assert plane.end_step_at(owner.address, 7) == 2


def test_two_owners_are_distinguished(
    mesh: Mesh, backend: TensorBackend, owner: OwnerProcess
) -> None:
    with mesh.owner() as other:
        mine, others = owner.put(KINDS, seed=7), other.put(KINDS, seed=8)
        assert owner.address != other.address
        assert_same_contents(fetch(backend, others), shards(KINDS, 8))
        assert_same_contents(fetch(backend, mine), shards(KINDS, 7))
        assert backend.clear(other.address, [each.shard_id for each in mine]) == 0
    owner.clear(mine)


def test_a_killed_owner_is_reported_at_once_and_fetched_tensors_stay(
    mesh: Mesh, backend: TensorBackend
) -> None:
    with mesh.owner() as other:
        handles = other.put(KINDS, seed=9)
        contents = fetch(backend, handles[:3])
        other.kill()
        began_s = time.monotonic()
        for ask in (
            lambda: fetch(backend, handles),
            lambda: backend.clear(other.address, [handles[0].shard_id]),
        ):
            with pytest.raises(OwnerGone) as caught:
                ask()
            assert caught.value.owner == other.address
        assert time.monotonic() - began_s < PROMPT_S
        assert_same_contents(contents, shards(KINDS[:3], 9))


def test_an_owner_killed_during_a_fetch_is_reported(mesh: Mesh, backend: TensorBackend) -> None:
    with mesh.owner() as other:
        handles = other.put([("float32", (1000, 1176))] * 4)
        has_begun = threading.Event()

        def fetch_on() -> None:
            while True:
                fetch(backend, handles)
                has_begun.set()

        fetching = ThreadCall(fetch_on)
        assert has_begun.wait(BEGUN_S)
        other.kill()
        with pytest.raises(OwnerGone):
            fetching.result()


def test_a_restarted_owner_is_reported_as_restarted(mesh: Mesh, backend: TensorBackend) -> None:
    with mesh.owner() as first:
        handles = first.put(KINDS)
        fetch(backend, handles)
        first.kill()
        with mesh.owner(first.address) as second:
            assert second.address == first.address
            with pytest.raises(ShardMissing) as caught:
                fetch(backend, handles)
            assert caught.value.reason == "owner_restarted"
            again = second.put(KINDS, seed=10)
            assert_same_contents(fetch(backend, again), shards(KINDS, 10))


def test_an_address_without_an_owner_is_reported(mesh: Mesh, backend: TensorBackend) -> None:
    with pytest.raises(OwnerGone):
        backend.take(mesh.absent(), [1], 0)
    with pytest.raises(OwnerGone):
        backend.end_step(mesh.absent(), 0)
    absent = mesh.absent()
    with pytest.raises(OwnerGone) as caught:
        fetch(backend, [RTensor(1 << 32, absent, -1, "uint8", (1,), 1)])
    assert caught.value.owner == absent


def test_a_closed_backend_raises(mesh: Mesh, owner: OwnerProcess) -> None:
    handles = owner.put(KINDS)
    closed = mesh.connect()
    fetch(closed, handles)
    closed.close()
    closed.close()
    with pytest.raises(TensorError, match="closing"):
        fetch(closed, handles)
    owner.clear(handles)
