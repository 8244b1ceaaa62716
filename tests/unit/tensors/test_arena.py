"""Arenas and segments: slots do not overlap, the budget holds, an array that fits finds room, and
closed or forgotten segments leave no file behind.
"""

import errno
import mmap
import os
import random
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.tensors.arena import ALIGN_BYTES, LONG_COPY_BYTES, PAGE_BYTES, Arena, ArenaSlot
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment, Segment, sweep

MIB = 2**20


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of 64 pages."""
    arena = Arena(64 * PAGE_BYTES)
    yield arena
    arena.close()


@pytest.fixture(params=["shared", "private"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """An arena of 64 pages, in a file and without one."""
    is_shared = request.param == "shared"
    arena = Arena(64 * PAGE_BYTES, SHARED_MEMORY if is_shared else tmp_path / "absent")
    assert (arena.path is not None) == is_shared
    yield arena
    arena.close()


class SmallFolder:
    """Behaves like `os.posix_fallocate` on a file system with room for that many pages."""

    def __init__(self, arena: Arena, num_pages: int) -> None:
        self._arena, self._num_pages = arena, num_pages
        self._posix_fallocate = os.posix_fallocate

    def back(self, descriptor: int, start: int, num_bytes: int) -> None:
        assert self._arena.path is not None
        blocks_of_512 = self._arena.path.stat().st_blocks
        if blocks_of_512 * 512 + num_bytes > self._num_pages * PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._posix_fallocate(descriptor, start, num_bytes)


def filled(arena: Arena, number: int, num_bytes: int) -> ArenaSlot:
    """A slot full of `number`."""
    (slot,) = arena.allocate([num_bytes])
    arena.write(slot, np.full(num_bytes, number % 256, np.uint8))
    return slot


def holds(arena: Arena, slot: ArenaSlot, number: int) -> bool:
    return bool((arena.read_only(slot) == number % 256).all())


def test_slots_of_one_call_are_adjacent_in_whole_cache_lines(either: Arena) -> None:
    slots = either.allocate([100, 0, 64, 1])
    assert [slot.num_bytes for slot in slots] == [100, 0, 64, 1]
    assert [slot.offset - slots[0].offset for slot in slots] == [0, 128, 128, 192]
    assert slots[0].offset % ALIGN_BYTES == 0
    assert either.held_bytes == 256
    either.free(slots)
    assert either.held_bytes == 0


def test_slots_without_a_gap_between_them_are_one_view(either: Arena) -> None:
    sizes = [128, 0, 64, 1, 0, 64, 128]
    slots = either.allocate(sizes)
    views = either.writable(slots)
    assert [view.nbytes for view in views] == [193, 192]
    number = iter(range(sum(sizes)))
    for view in views:
        view[:] = bytes(next(number) % 256 for _ in range(view.nbytes))
    content = b"".join(bytes(either.read_only(slot)) for slot in slots)
    assert content == bytes(each % 256 for each in range(sum(sizes)))
    readable = either.readable(reversed(slots))
    assert b"".join(readable) == b"".join(bytes(either.read_only(each)) for each in slots[::-1])
    assert all(view.readonly for view in readable)
    assert either.writable([]) == []


@pytest.mark.parametrize("num_bytes", [0, 1, LONG_COPY_BYTES - 1, LONG_COPY_BYTES + 1])
def test_written_bytes_are_read_and_readers_cannot_write(num_bytes: int) -> None:
    arena = Arena(MIB)
    data = np.random.default_rng(3).integers(0, 256, num_bytes, np.uint8)
    before, slot, behind = arena.allocate([7, num_bytes, 7])
    for each in (before, behind):
        arena.write(each, np.full(7, 9, np.uint8))
    arena.write(slot, data)
    seen = arena.read_only(slot)
    assert (seen == data).all()
    assert holds(arena, before, 9)
    assert holds(arena, behind, 9)
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        seen.flags.writeable = True


def test_memory_of_freed_slots_is_used_again(either: Arena) -> None:
    slots = either.allocate([PAGE_BYTES] * 10)
    backed = either.backed_bytes
    either.free(slots)
    assert either.allocate([5 * PAGE_BYTES, 5 * PAGE_BYTES])[0].offset == slots[0].offset
    assert either.backed_bytes == backed


def test_a_writer_to_a_slot_waits_for_no_page(tmp_path: Path) -> None:
    for folder in (SHARED_MEMORY, tmp_path / "absent"):
        arena = Arena(2**24, folder)
        (slot,) = arena.allocate([2**23])
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arena.view(slot)[::PAGE_BYTES] = 1
        num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert num_faults < 2**23 // PAGE_BYTES // 10
        arena.close()


def test_a_request_that_does_not_fit_names_its_size_and_takes_nothing(either: Arena) -> None:
    either.allocate([60 * PAGE_BYTES])
    with pytest.raises(StoreFull, match="raise the budget") as raised:
        either.allocate([3 * PAGE_BYTES, 3 * PAGE_BYTES])
    full = raised.value
    assert full.wanted_bytes == 6 * PAGE_BYTES
    assert (full.held_bytes, full.max_bytes) == (60 * PAGE_BYTES, 64 * PAGE_BYTES)
    either.allocate([4 * PAGE_BYTES])


def test_scattered_freed_space_makes_room_for_a_large_slot(
    either: Arena,
) -> None:
    slots = [filled(either, number, PAGE_BYTES) for number in range(64)]
    either.free(slots[::2])
    large = filled(either, 200, 32 * PAGE_BYTES)
    assert either.backed_bytes == either.held_bytes == 64 * PAGE_BYTES
    assert holds(either, large, 200)
    assert all(holds(either, slots[number], number) for number in range(1, 64, 2))
    either.free([large])
    again = [filled(either, number, PAGE_BYTES) for number in range(32)]
    assert all(holds(either, slot, number) for number, slot in enumerate(again))


def test_if_memory_cannot_be_returned_scattered_space_counts_as_full(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "MADV_REMOVE", 9999)
    slots = [filled(arena, number, PAGE_BYTES) for number in range(64)]
    arena.free(slots[::2])
    with pytest.raises(StoreFull, match="too few whole pages"):
        arena.allocate([32 * PAGE_BYTES])
    assert all(holds(arena, slots[number], number) for number in range(1, 64, 2))
    assert arena.held_bytes == 32 * PAGE_BYTES
    again = [filled(arena, number, PAGE_BYTES) for number in range(32)]
    assert all(holds(arena, slot, number) for number, slot in enumerate(again))


def test_pages_allocated_ahead_are_returned_when_others_need_them() -> None:
    arena = Arena(600 * PAGE_BYTES)
    first, last = arena.allocate([200 * PAGE_BYTES, PAGE_BYTES])
    assert arena.backed_bytes > arena.held_bytes
    arena.free([first])
    large = filled(arena, 1, 599 * PAGE_BYTES)
    assert holds(arena, large, 1)
    assert arena.backed_bytes == 600 * PAGE_BYTES
    arena.free([large, last])
    assert arena.held_bytes == 0


@pytest.mark.parametrize("seed", range(6))
def test_slots_never_overlap_and_the_budget_holds(either: Arena, seed: int) -> None:
    chance, held = random.Random(seed), dict[int, list[ArenaSlot]]()
    sizes_of = [1, 60, 64, 500, PAGE_BYTES, 3 * PAGE_BYTES, 12 * PAGE_BYTES]
    wanted_too_much: list[bool] = []
    for number in range(800):
        if chance.random() < 0.55:
            sizes = chance.choices(sizes_of, k=chance.randrange(1, 5))
            try:
                slots = either.allocate(sizes)
            except StoreFull as full:
                # The budget beside the slots is pages that small slots use partly.
                corners = 2 * PAGE_BYTES * (1 + sum(map(len, held.values())))
                wanted_too_much.append(full.held_bytes + sum(sizes) + corners > either.max_bytes)
                continue
            for slot in slots:
                arena_bytes = np.full(slot.num_bytes, number % 256, np.uint8)
                either.write(slot, arena_bytes)
            held[number] = slots
        elif held:
            gone = chance.choice([*held])
            assert all(holds(either, slot, gone) for slot in held[gone])
            either.free(held.pop(gone))
        assert either.backed_bytes <= either.max_bytes
        lines = [-(-slot.num_bytes // 64) for slots in held.values() for slot in slots]
        assert either.held_bytes == 64 * sum(lines)
    assert len(wanted_too_much) > 20
    assert all(wanted_too_much)
    for number, slots in held.items():
        assert all(holds(either, slot, number) for slot in slots)


def test_steps_of_varying_sizes_use_little_more_memory_than_they_need() -> None:
    chance, arena = random.Random(5), Arena(64 * MIB)
    steps: list[list[ArenaSlot]] = []
    most_held = 0
    for step in range(500):
        size = chance.randrange(50_000, 110_000)
        # A step is not stored at once, nor freed in the order in which it was stored.
        batch = arena.allocate([size + chance.randrange(9000) for _ in range(16)])
        batch += [slot for _ in range(16) for slot in arena.allocate([size])]
        steps.append(batch)
        most_held = max(most_held, arena.held_bytes)
        if step % 7 == 0:
            arena.free(steps[0][::3])
            del steps[0][::3]
        if len(steps) == 3:
            arena.free(steps.pop(0))
    assert arena.backed_bytes < 1.2 * most_held


def test_an_attached_process_sees_a_slot_in_memory_that_was_returned_before(arena: Arena) -> None:
    assert arena.path is not None
    attached = AttachedSegment(arena.path)
    slots = [filled(arena, number, PAGE_BYTES) for number in range(64)]
    assert (attached.view(slots[9].offset, PAGE_BYTES) == 9).all()
    arena.free(slots[::2])
    large = filled(arena, 100, 32 * PAGE_BYTES)
    assert (attached.view(large.offset, large.num_bytes) == 100).all()
    arena.free([large])
    slot = filled(arena, 7, 20 * PAGE_BYTES)
    assert (attached.view(slot.offset, slot.num_bytes) == 7).all()


def test_a_full_folder_is_an_error_that_names_it_and_takes_nothing() -> None:
    all_bytes = os.statvfs(SHARED_MEMORY).f_blocks * os.statvfs(SHARED_MEMORY).f_frsize
    with structlog.testing.capture_logs() as logs:
        arena = Arena(2 * all_bytes)
    assert [each["event"] for each in logs] == ["arena.beyond_folder"]
    with pytest.raises(StoreFull, match="/dev/shm has no space left") as raised:
        arena.allocate([all_bytes + PAGE_BYTES])
    assert (raised.value.wanted_bytes, raised.value.held_bytes) == (all_bytes + PAGE_BYTES, 0)
    assert (arena.held_bytes, arena.backed_bytes) == (0, 0)
    assert holds(arena, filled(arena, 1, 100), 1)
    arena.close()


def test_if_the_folder_is_smaller_than_the_budget_scattered_space_is_still_found(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SmallFolder(arena, 32)
    monkeypatch.setattr(os, "posix_fallocate", room.back)
    slots = [filled(arena, number, PAGE_BYTES) for number in range(32)]
    with pytest.raises(StoreFull, match="/dev/shm has no space left"):
        arena.allocate([PAGE_BYTES])
    arena.free(slots[::2])
    large = filled(arena, 100, 16 * PAGE_BYTES)
    assert holds(arena, large, 100)
    assert all(holds(arena, slots[number], number) for number in range(1, 32, 2))
    assert arena.backed_bytes == 32 * PAGE_BYTES


def test_without_a_folder_the_cost_is_logged(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        Arena(MIB, tmp_path / "absent")
    (entry,) = logs
    assert entry["event"] == "arena.private"
    assert "absent: no such file" in entry["why"]


def test_a_budget_beyond_all_addresses_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^no .* cannot allocate memory; .* lower the budget$"):
        Arena(2**46, tmp_path / "absent")


def test_closing_an_arena_removes_its_file_and_keeps_views() -> None:
    arena = Arena(MIB)
    assert arena.path is not None
    seen = arena.read_only(filled(arena, 3, 100))
    arena.close()
    assert not arena.path.exists()
    del arena
    assert (seen == 3).all()


def test_concurrent_threads_never_share_a_slot(either: Arena) -> None:
    faults: list[str] = []

    def use_slots(number: int) -> None:
        chance = random.Random(number)
        for _ in range(200):
            sizes = [chance.randrange(1, 6 * PAGE_BYTES) for _ in range(3)]
            try:
                slots = either.allocate(sizes)
            except StoreFull:
                continue
            for slot in slots:
                either.write(slot, np.full(slot.num_bytes, number, np.uint8))
            if not all(holds(either, slot, number) for slot in slots):
                faults.append(f"thread {number}")
            either.free(slots)

    threads = [threading.Thread(target=use_slots, args=(number,)) for number in range(1, 6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert faults == []
    assert either.held_bytes == 0
    assert either.backed_bytes <= either.max_bytes


NUM_BYTES = 1 << 16
MINE = f"rollmesh-{os.getuid()}-"


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    segment = Segment(tmp_path, NUM_BYTES)
    segment.back(0, NUM_BYTES)
    segment.memory[100:105] = b"hello"
    return segment


def test_an_attached_segment_shows_later_writes(segment: Segment) -> None:
    seen = AttachedSegment(segment.path).view(100, 5)
    assert seen.tobytes() == b"hello"
    segment.memory[101:102] = b"a"
    assert seen.tobytes() == b"hallo"


def test_an_attached_segment_is_read_only(segment: Segment) -> None:
    seen = AttachedSegment(str(segment.path)).view(100, 5)
    assert not seen.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        seen.flags.writeable = True


def test_only_its_user_can_open_a_segment(segment: Segment) -> None:
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_a_place_beyond_the_end_of_a_segment_is_refused(segment: Segment) -> None:
    attached = AttachedSegment(segment.path)
    for offset, num_bytes in [(NUM_BYTES - 4, 5), (NUM_BYTES + 1, 0), (-1, 1)]:
        with pytest.raises(ValueError, match=r"buffer|offset"):
            attached.view(offset, num_bytes)
    assert attached.view(NUM_BYTES, 0).nbytes == 0


def test_views_stay_valid_when_the_segment_is_closed(segment: Segment) -> None:
    seen = AttachedSegment(segment.path).view(100, 5)
    segment.close()
    segment.close()
    assert not segment.path.exists()
    with pytest.raises(FileNotFoundError):
        AttachedSegment(segment.path)
    del segment
    assert seen.tobytes() == b"hello"


def test_a_forgotten_segment_leaves_no_file(tmp_path: Path) -> None:
    segment = Segment(tmp_path, NUM_BYTES)
    assert [*tmp_path.iterdir()] == [segment.path]
    del segment
    assert [*tmp_path.iterdir()] == []


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Segment(tmp_path / "absent", NUM_BYTES)


def test_a_sweep_removes_only_our_unused_segments(segment: Segment, tmp_path: Path) -> None:
    orphan = tmp_path / f"{MINE}1"
    others = [tmp_path / f"rollmesh-{os.getuid() + 1}-1", tmp_path / "rollmesh.toml"]
    for path in (orphan, *others):
        path.touch()
    link = tmp_path / f"{MINE}2"
    link.symlink_to(others[1])
    assert sweep(tmp_path) == 1
    assert {*tmp_path.iterdir()} == {segment.path, link, *others}


def test_a_new_segment_sweeps_first(tmp_path: Path) -> None:
    (tmp_path / f"{MINE}1").touch()
    segment = Segment(tmp_path, NUM_BYTES)
    assert [*tmp_path.iterdir()] == [segment.path]


def test_no_sweep_removes_a_segment_before_it_is_locked(tmp_path: Path) -> None:
    is_over = threading.Event()

    def sweep_on() -> None:
        while not is_over.is_set():
            sweep(tmp_path)

    sweepers = [threading.Thread(target=sweep_on) for _ in range(3)]
    for each in sweepers:
        each.start()
    try:
        segments = [Segment(tmp_path, 4096) for _ in range(200)]
    finally:
        is_over.set()
        for each in sweepers:
            each.join()
    assert {*tmp_path.iterdir()} == {each.path for each in segments}
