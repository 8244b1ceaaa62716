"""The images that chats show, each held once in the process.

Owns a table of images by the hash of their content. Invariant: an image lives as long as a session
that was shown it, and no longer: whoever has its ImageRef holds it, and equal images are one
ImageRef, so a group's siblings share the screenshots they begin with. Driven by the readers of
messages.
"""

import base64
import binascii
import hashlib
from weakref import WeakValueDictionary

import msgspec


class ImageRef(msgspec.Struct, frozen=True, weakref=True, omit_defaults=True):
    """An image that a message shows."""

    digest: str
    """Of its bytes, or of its address where it has none here."""
    media_type: str
    data: bytes = b""
    url: str = ""
    """Where the engine may fetch it; '' where `data` has it."""

    @property
    def address(self) -> str:
        """How engines are shown it."""
        if self.url:
            return self.url
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


_held: WeakValueDictionary[str, ImageRef] = WeakValueDictionary()


def hold_image(address: str) -> ImageRef:
    """The image of a `data:` address, or one that only names where it is; ValueError if garbled."""
    if not address.startswith("data:"):
        if not address.startswith(("http://", "https://")):
            raise ValueError("expected a data: or http(s) address")
        return _share(ImageRef(_digest(address.encode()), "", url=address))
    head, _, text = address[5:].partition(",")
    media_type, _, coding = head.partition(";")
    if coding != "base64" or not media_type.startswith("image/"):
        raise ValueError("expected data:image/...;base64,...")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("its base64 is garbled") from None
    return _share(ImageRef(_digest(data), media_type, data))


def _share(image: ImageRef) -> ImageRef:
    return _held.setdefault(image.digest, image)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
