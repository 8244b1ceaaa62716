"""Blobs: contents are stored once, read back whole, and counted; the spill file reuses free
ranges."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import structlog

from rollmesh.core.errors import ConfigError, ContentLost
from rollmesh.runtime.blobs import PAGE_BYTES, Blob, BlobStore, Extent, SpillFile
from tests.disks import full_disk, lose_files


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore()
    store.settle(20_000, tmp_path)
    yield store
    gc.collect()
    store.close()
    assert (store.held_bytes(), store.spilled_bytes(), store.num_blobs()) == (0, 0, 0)


def content(number: int, num_bytes: int = 6000) -> bytes:
    return random.Random(number).randbytes(num_bytes)


def test_equal_contents_are_one_blob(store: BlobStore) -> None:
    one, two = store.hold(content(1)), store.hold(content(1))
    assert one is two
    assert (one.num_bytes, one.read(), one.part(2, 5)) == (6000, content(1), content(1)[2:5])
    assert (store.num_blobs(), store.held_bytes()) == (1, 6000)


@pytest.mark.parametrize("seed", range(4))
def test_the_store_behaves_like_a_dictionary_with_any_spilling(store: BlobStore, seed: int) -> None:
    chance, held = random.Random(seed), dict[int, Blob]()
    sizes = {number: chance.randrange(1, 9000) for number in range(30)}
    for _ in range(1000):
        number = chance.randrange(len(sizes))
        match chance.choice(["hold", "hold", "read", "drop", "spill"]):
            case "hold":
                blob = store.hold(content(number, sizes[number]))
                assert held.setdefault(number, blob) is blob
                del blob
            case "read" if number in held:
                start, stop = chance.randrange(sizes[number]), chance.randrange(9000)
                part = held[number].part(start, stop)
                assert part == content(number, sizes[number])[start:stop]
                del part
            case "drop":
                held.pop(number, None)
            case "spill":
                freed = store.freed_bytes()
                moved = store.spill_over()
                assert store.held_bytes() <= 20_000
                assert store.freed_bytes() == freed + moved
        bytes_held = sum(sizes[each] for each in held)
        assert store.held_bytes() + store.spilled_bytes() == bytes_held
        spilled = sum(sizes[n] for n, blob in held.items() if blob.is_spilled)
        assert (store.spilled_bytes(), store.num_blobs()) == (spilled, len(held))
    for number, blob in held.items():
        assert blob.read() == content(number, sizes[number])
    assert any(blob.is_spilled for blob in held.values())
    held.clear()
    del blob


def test_the_least_recently_used_blobs_are_spilled_first(store: BlobStore) -> None:
    blobs = [store.hold(content(number)) for number in range(5)]
    blobs[0].read()
    store.hold(content(2))
    assert store.spill_over() == 12_000
    assert [blob.is_spilled for blob in blobs] == [False, True, False, True, False]
    assert store.spill_over() == 0


def test_a_spilled_blob_is_still_found_by_its_content(store: BlobStore) -> None:
    store.settle(0, None)
    blob = store.hold(content(1))
    assert store.spill_over() == 6000
    assert blob.is_spilled
    assert store.hold(content(1)) is blob
    assert (store.held_bytes(), store.spilled_bytes()) == (0, 6000)


def test_another_content_of_the_same_hash_is_another_blob(store: BlobStore) -> None:
    class Colliding(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    store.settle(0, None)
    one = store.hold(Colliding(content(1)))
    two = store.hold(Colliding(content(2)))
    store.spill_over()
    three = store.hold(Colliding(content(3)))
    assert [each.read() for each in (one, two, three)] == [content(n) for n in (1, 2, 3)]
    assert store.held_bytes() + store.spilled_bytes() == 18_000


def test_the_spill_file_is_no_larger_than_the_live_blobs(store: BlobStore, tmp_path: Path) -> None:
    store.settle(0, tmp_path)
    for wave in range(20):
        blobs = [store.hold(content(10 * wave + n)) for n in range(10)]
        store.spill_over()
        assert store.spilled_bytes() == 60_000
        (size,) = _open_files(tmp_path)
        assert size <= 10 * 8192
        del blobs
    store.spill_over()
    assert _open_files(tmp_path) == [0]


def test_a_full_disk_is_logged_once_and_nothing_is_lost(store: BlobStore) -> None:
    blobs = [store.hold(content(number)) for number in range(5)]
    with structlog.testing.capture_logs() as logs, full_disk(7000):
        for _ in range(3):
            store.spill_over()
        assert [log["event"] for log in logs] == ["blobs.not_spilled"]
        assert "File too large" in logs[0]["error"]
    assert store.held_bytes() + store.spilled_bytes() == 30_000
    assert [blob.read() for blob in blobs] == [content(number) for number in range(5)]
    store.spill_over()
    assert store.held_bytes() <= 20_000


def test_a_disk_that_stays_full_is_logged_once_while_blobs_change(store: BlobStore) -> None:
    blobs = [store.hold(content(number)) for number in range(8)]
    with structlog.testing.capture_logs() as logs:
        with full_disk(7000):
            for number in range(8, 16):
                assert store.spill_over() == 6000
                blobs = [each for each in blobs if not each.is_spilled]
                blobs.append(store.hold(content(number)))
        assert [log["event"] for log in logs] == ["blobs.not_spilled"]
        assert store.spill_over() > 20_000
        blobs += [store.hold(content(number)) for number in range(16, 20)]
        with full_disk(0):
            store.spill_over()
    assert [log["event"] for log in logs] == ["blobs.not_spilled"] * 2


def test_an_unwritable_spill_folder_is_a_one_line_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in tmp_path / "missing", tmp_path / "file":
        message = rf"^interception.spill_folder = {folder}: \w.*; name a folder in which"
        with pytest.raises(ConfigError, match=message):
            BlobStore().settle(1000, folder)


def test_contents_of_a_closed_spill_file_are_lost_and_are_stored_again_when_they_recur(
    store: BlobStore, tmp_path: Path
) -> None:
    store.settle(0, tmp_path)
    lost = store.hold(content(1))
    store.spill_over()
    store.close()
    again = store.hold(content(1))
    assert again.read() == content(1)
    with pytest.raises(ContentLost, match="closed file"):
        lost.read()
    del lost


def test_lost_contents_are_an_error_and_are_stored_again_when_they_recur(
    store: BlobStore, tmp_path: Path
) -> None:
    store.settle(0, tmp_path)
    lost = store.hold(content(1))
    store.spill_over()
    lose_files(tmp_path)
    with pytest.raises(ContentLost, match="of 6000 bytes was on disk and cannot be read back: "):
        lost.part(0, 10)
    again = store.hold(content(1))
    assert again is not lost
    assert again.read() == content(1)
    assert store.hold(content(1)) is again
    with pytest.raises(ContentLost):
        lost.read()
    assert (store.held_bytes(), store.spilled_bytes()) == (6000, 6000)


def test_blobs_of_a_closed_file_free_nothing_in_the_next_one(
    store: BlobStore, tmp_path: Path
) -> None:
    store.settle(0, tmp_path)
    old = store.hold(content(1))
    store.spill_over()
    store.close()
    blobs = [store.hold(content(2))]
    store.spill_over()
    del old
    blobs += [store.hold(content(3))]
    for _ in range(2):
        store.spill_over()
    assert [blob.read() for blob in blobs] == [content(2), content(3)]


def test_threads_can_use_blobs_while_another_thread_spills(store: BlobStore) -> None:
    contents = [content(number, 2000) for number in range(20)]
    store.settle(10_000, None)
    is_over = threading.Event()
    faults: list[str] = []

    def use(seed: int) -> None:
        chance, held = random.Random(seed), dict[int, Blob]()
        for _ in range(3000):
            number = chance.randrange(len(contents))
            if chance.random() < 0.3:
                held.pop(number, None)
            elif held.setdefault(number, store.hold(contents[number])).read() != contents[number]:
                faults.append(f"{number} is garbled")

    def spill() -> None:
        while not is_over.is_set():
            store.spill_over()

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    spiller = threading.Thread(target=spill)
    for thread in [*users, spiller]:
        thread.start()
    for thread in users:
        thread.join()
    is_over.set()
    spiller.join()
    assert faults == []
    assert store.freed_bytes() > 100_000


def _open_files(folder: Path) -> list[int]:
    """Return the sizes of the files in `folder` that this process has open, including unnamed
    ones.
    """
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [
        link.stat().st_size
        for link in links
        if link.is_symlink() and str(link.readlink()).startswith(str(folder))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_contents_share_no_page_and_the_file_ends_with_its_last_extent(
    seed: int, tmp_path: Path
) -> None:
    rng, file, taken = random.Random(seed), SpillFile(tmp_path), list[Extent]()
    for _ in range(500):
        if rng.random() < 0.5 or not taken:
            taken.append(file.write(bytes(rng.randrange(1, 5 * PAGE_BYTES))))
        else:
            file.free(taken.pop(rng.randrange(len(taken))))
        runs = sorted((each.start, each.stop) for each in taken)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(runs))
        assert all(start % PAGE_BYTES == 0 for start, _ in runs)
        assert file.num_bytes == max([stop for _, stop in runs], default=0)
    for each in taken:
        file.free(each)
    assert (file.num_bytes, file.write(b"a").start) == (0, 0)
    file.close()


def test_free_pages_are_reused_before_the_file_grows(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    small, _, large, _ = [file.write(bytes(n * PAGE_BYTES)) for n in (1, 1, 3, 1)]
    file.free(large)
    file.free(small)
    num_bytes = file.num_bytes
    assert file.write(bytes(PAGE_BYTES)).start == small.start
    assert file.write(bytes(2 * PAGE_BYTES + 1)).start == large.start
    assert file.num_bytes == num_bytes
    file.close()


def test_parts_can_be_read_and_the_file_shrinks_with_its_contents(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    one, two = file.write(b"a" * 10_000), file.write(b"bcd")
    assert file.read(one, 0, 1 << 40) == b"a" * 10_000
    assert (file.read(two, 1, 3), file.read(two, 2, 99), file.read(two, 3, 3)) == (b"cd", b"d", b"")
    assert file.num_bytes == 4 * PAGE_BYTES
    file.free(two)
    assert file.num_bytes == 3 * PAGE_BYTES
    file.free(one)
    assert file.num_bytes == 0
    file.close()


def test_a_full_disk_stores_nothing_and_loses_nothing(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    held = file.write(b"a" * PAGE_BYTES)
    with full_disk(2 * PAGE_BYTES), pytest.raises(OSError, match="File too large"):
        file.write(b"b" * 3 * PAGE_BYTES)
    assert file.num_bytes == PAGE_BYTES
    assert file.read(held, 0, PAGE_BYTES) == b"a" * PAGE_BYTES
    assert file.read(file.write(b"c"), 0, 1) == b"c"
    file.close()


def test_bytes_that_the_disk_has_lost_are_an_error(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    held = file.write(b"a" * 10)
    os.ftruncate(file.fileno(), 5)
    with pytest.raises(OSError, match="shorter"):
        file.read(held, 0, 10)
    file.close()


KILLED = """
import sys
from itertools import pairwise
from pathlib import Path
from rollmesh.runtime.blobs import SpillFile
folder = Path(sys.argv[1])
file = SpillFile(folder)
file.write(b"a" * 1000)
print(len(list(folder.iterdir())), flush=True)
sys.stdin.read()
"""


def test_the_file_is_invisible_and_gone_when_its_process_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"0\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
