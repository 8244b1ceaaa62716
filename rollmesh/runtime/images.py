"""The images that chats show, each stored once per process.

- An image is kept as long as a session that shows it. Equal images are one ImageRef.
- A data URL that was seen before is found by its hash, compared as a whole, and not decoded again
  (0.5 MB: 0.1 ms instead of 1.3 ms).
"""

import hashlib
import re
from collections.abc import Iterable
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec

from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import Blob, BlobStore

_DATA = re.compile(r"data:image/[A-Za-z0-9!#$&^_.+-]*;base64,")
"""Media type names as in RFC 6838, so that the address needs no escapes in JSON."""
_PLAIN = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+([/?][!#-\[\]-~]*)?")
"""No user, backslash or space, for which two parsers could find different hosts."""


class ImageRef(msgspec.Struct, frozen=True, weakref=True, omit_defaults=True):
    """An image that a message shows."""

    digest: str
    """Digest of its bytes, or of its address if it is remote."""
    url: str = ""
    """The address of a remote image."""
    data: Blob | None = None
    """The `data:` address, in base64, of any other image; no byte of it needs an escape in JSON."""

    @property
    def address(self) -> str | Blob:
        """The address in the form that engines take, which no call encodes again."""
        return self.url if self.data is None else self.data

    @property
    def num_bytes(self) -> int:
        """Length of the address."""
        return len(self.url) if self.data is None else self.data.num_bytes

    def text(self) -> str:
        """The address; ContentLost as Blob.read."""
        return self.url if self.data is None else self.data.read().decode()


class ImageTable:
    """All images of the process."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._by_digest: WeakValueDictionary[str, ImageRef] = WeakValueDictionary()
        self._by_address: WeakValueDictionary[int, ImageRef] = WeakValueDictionary()
        self._hosts: frozenset[str] = frozenset()

    def allow_hosts(self, hosts: Iterable[str]) -> None:
        """Accept remote images of these hosts, `host` or `host:port`, and no others, since engines
        fetch whatever address an agent sends."""
        self._hosts = frozenset(host.lower() for host in hosts)

    def hold(self, address: str) -> ImageRef:
        """The image of a `data:` address, or of one at an allowed host, which is not fetched here.

        ValueError if it is malformed, or at another host.
        """
        if not address.startswith("data:"):
            return self._hold_elsewhere(address)
        key, content = hash(address), address.encode()
        known = self._by_address.get(key)
        if known is not None and known.data and known.data.is_of(content):
            return known
        digest = hashlib.sha256(_read_data(address)).hexdigest()
        image = self._by_digest.get(digest)
        if image is None or image.data is None or image.data.is_lost:
            image = ImageRef(digest, data=self._store.hold(content))
            self._by_digest[digest] = self._by_address[key] = image
        return image

    def restore(self, digest: str, address: str | bytes) -> ImageRef:
        """The image of this digest, as another process found it; it is not decoded again."""
        image = self._by_digest.get(digest)
        if image is None:
            image = (
                ImageRef(digest, data=self._store.hold(address))
                if isinstance(address, bytes)
                else ImageRef(digest, address)
            )
            self._by_digest[digest] = image
        return image

    def __len__(self) -> int:
        """Number of images in use."""
        return len(self._by_digest)

    def _hold_elsewhere(self, address: str) -> ImageRef:
        if not address.startswith(("http://", "https://")):
            raise ValueError("expected a data: or http(s) address")
        self._check_host(address)
        digest = hashlib.sha256(address.encode()).hexdigest()
        image = self._by_digest.get(digest)
        if image is None or image.url != address:  # an image whose bytes happen to be this address
            image = self._by_digest[digest] = ImageRef(digest, address)
        return image

    def _check_host(self, address: str) -> None:
        # An engine's library parses the address again, and might find another host in it.
        host = urlsplit(address).netloc.lower() if _PLAIN.fullmatch(address) else ""
        if host not in self._hosts or not host:
            shown = ascii(host[:80])[1:-1] or "this address"
            why = f"images at {shown} are not fetched; send a data: address"
            raise ValueError(f"{why}, or have the host added to interception.image_hosts")


def _read_data(address: str) -> bytes:
    head = _DATA.match(address)
    if head is None:
        raise ValueError("expected data:image/...;base64,...")
    try:
        # As strict as base64's own decoder, and four times as fast.
        return msgspec.convert(address[head.end() :], bytes)
    except msgspec.ValidationError:
        raise ValueError("its base64 is invalid") from None


images = ImageTable(blobs.store)
hold_image = images.hold
