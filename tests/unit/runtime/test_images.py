"""Images are stored once, only while they are used, and never confused."""

import base64
import gc
import hashlib
import random
import weakref
from pathlib import Path

import pytest

from rollmesh.core.errors import ContentLost
from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import BlobStore
from rollmesh.runtime.images import ImageTable, hold_image, images
from tests.disks import lose_files


def shot(number: int, num_bytes: int = 3000) -> str:
    """Return the address of a screenshot, different for each number."""
    raw = b"\x89PNG" + random.Random(number).randbytes(num_bytes)
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def test_equal_images_are_stored_once_and_freed_with_their_last_holder() -> None:
    one, two = hold_image(shot(1)), hold_image(shot(1))
    assert one is two
    assert (one.text(), one.num_bytes) == (shot(1), len(shot(1)))
    seen = weakref.ref(one)
    del one, two
    gc.collect()
    assert seen() is None


def test_a_known_address_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold_image(shot(1))
    with monkeypatch.context() as patch:
        patch.setattr(base64, "b64decode", None)
        assert hold_image(shot(1)) is held
    assert held.digest == hashlib.sha256(base64.b64decode(shot(1).partition(",")[2])).hexdigest()


def test_one_image_under_two_addresses_is_one() -> None:
    held = hold_image(shot(1))
    assert hold_image(shot(1).replace("image/png", "image/x-png")) is held


@pytest.mark.parametrize("is_spilled", [False, True])
def test_images_with_colliding_hashes_are_not_confused(tmp_path: Path, is_spilled: bool) -> None:
    class Colliding(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 7

    store = BlobStore()
    store.settle(0, tmp_path)
    table = ImageTable(store)
    one = table.hold(Colliding(shot(1)))
    if is_spilled:
        assert store.spill_over() == len(shot(1))
    two = table.hold(Colliding(shot(2)))
    again = table.hold(Colliding(shot(1)))
    assert (one.text(), two.text()) == (shot(1), shot(2))
    assert again is one
    store.close()


def test_an_image_that_the_disk_has_lost_is_stored_again_when_it_recurs(
    tmp_path: Path,
) -> None:
    store = BlobStore()
    store.settle(0, tmp_path)
    table = ImageTable(store)
    lost = table.hold(shot(1))
    store.spill_over()
    lose_files(tmp_path)
    with pytest.raises(ContentLost):
        lost.text()
    again = table.hold(shot(1))
    assert (again.text(), again.digest) == (shot(1), lost.digest)
    assert table.hold(shot(1)) is again
    store.close()


def test_an_image_whose_bytes_are_an_address_is_not_confused_with_its_target() -> None:
    address = "https://example.com/b.png"
    bytes_alike = f"data:image/png;base64,{base64.b64encode(address.encode()).decode()}"
    table = ImageTable(blobs.store)
    table.allow_hosts(["example.com"])
    one, two = table.hold(bytes_alike), table.hold(address)
    three = table.hold(bytes_alike)
    assert [each.text() for each in (one, two, three)] == [bytes_alike, address, bytes_alike]
    assert table.hold(address).text() == address


def test_a_remote_image_is_stored_as_its_address() -> None:
    table = ImageTable(blobs.store)
    table.allow_hosts(["example.com"])
    image = table.hold("https://Example.com/a.png")
    assert (image.address, image.text()) == ("https://Example.com/a.png",) * 2


@pytest.mark.parametrize(
    "address",
    [
        "",
        "file:///etc/passwd",
        "data:text/html;base64,aWo=",
        "data:image/png,x",
        'data:image/"png;base64,aWo=',
        "data:image/\u00e4;base64,aWo=",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        hold_image(address)


@pytest.mark.parametrize("text", ["aW", "a?o=", "aWo=\n", "a\u00e4o=", 'aWo="', "=aWo"])
def test_invalid_base64_is_refused_and_not_stored(text: str) -> None:
    before = len(images)
    for _ in range(2):
        with pytest.raises(ValueError, match="its base64 is invalid"):
            hold_image("data:image/png;base64," + text)
    assert len(images) == before


@pytest.mark.parametrize(
    "address",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://images.example.evil.example/a.png",
        "https://images.example@evil.example/a.png",
        "https://images.example\\@evil.example/a.png",
        "https://images.example:8080/a.png",
        "https://evil.example/?https://images.example/a.png",
        "https:///a.png",
        "http://images.example /a.png",
    ],
)
def test_an_image_at_a_forbidden_host_is_refused(address: str) -> None:
    table = ImageTable(blobs.store)
    table.allow_hosts(["images.example", "[::1]:8000"])
    assert table.hold("https://images.example/a.png?b").url
    assert table.hold("http://[::1]:8000/a.png").url
    with pytest.raises(ValueError, match=r"interception\.image_hosts"):
        table.hold(address)
