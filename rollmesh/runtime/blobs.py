"""The images that chats show, each held once in the process.

Owns a table of images by the hash of their content. Invariant: an image lives as long as a session
that was shown it, and no longer: whoever has its ImageRef holds it, and equal images are one
ImageRef, so a group's siblings share the screenshots they begin with. Driven by the readers of
messages.
"""

import base64
import hashlib
from weakref import WeakValueDictionary

import msgspec


class ImageRef(msgspec.Struct, frozen=True, weakref=True, omit_defaults=True):
    """An image that a message shows."""

    digest: str
    """Of its bytes, or of its address where it is elsewhere."""
    address: str = ""
    """`data:` with its base64, or http(s): as engines take it, so that no call encodes it anew."""


_held: WeakValueDictionary[str, ImageRef] = WeakValueDictionary()


def hold_image(address: str) -> ImageRef:
    """The image of a `data:` address, or one that only names where it is; ValueError if garbled."""
    content = address.encode()
    if address.startswith("data:"):
        content = _read_data(address)
    elif not address.startswith(("http://", "https://")):
        raise ValueError("expected a data: or http(s) address")
    digest = hashlib.sha256(content).hexdigest()
    return _held.setdefault(digest, ImageRef(digest, address))


def _read_data(address: str) -> bytes:
    head, _, text = address.removeprefix("data:").partition(",")
    media_type, _, coding = head.partition(";")
    if coding != "base64" or not media_type.startswith("image/"):
        raise ValueError("expected data:image/...;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("its base64 is garbled") from None
