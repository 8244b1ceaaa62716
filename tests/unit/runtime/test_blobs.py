"""Images are held once, and no longer than their holders."""

import base64
import gc
import weakref

import pytest

from rollmesh.runtime.blobs import hold_image


def test_equal_images_are_one_and_go_with_their_last_holder() -> None:
    address = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    one, two = hold_image(address), hold_image(address)
    assert one is two
    assert one.address == address
    seen = weakref.ref(one)
    del one, two
    gc.collect()
    assert seen() is None


def test_an_image_elsewhere_is_held_as_its_address() -> None:
    image = hold_image("https://example.com/a.png")
    assert image.address == "https://example.com/a.png"


@pytest.mark.parametrize(
    "address", ["", "file:///etc/passwd", "data:text/html;base64,aWo=", "data:image/png,x"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        hold_image(address)
