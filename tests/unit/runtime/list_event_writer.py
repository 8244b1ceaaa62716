"""An event writer that keeps events in memory, encoded as a journal would store them."""

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.conversation.history import LONG_BYTES
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.session_log import AnyEvent, ImageShown, Text


class ListEventWriter:
    """An event writer that keeps encoded events in memory."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.texts: list[bytes] = []
        self.is_full = False
        self._owed: list[AnyEvent] = []
        self._shown: set[str] = set()

    def check(self) -> None:
        if self.is_full:
            raise SessionError(503, "journal_full", "full")

    def text(self, text: bytes | Blob) -> Text:
        if isinstance(text, bytes) and len(text) < LONG_BYTES:
            return text
        return self._keep(text if isinstance(text, bytes) else text.read())

    def same(self, text: bytes) -> Text:
        return self._keep(text) if text else b""

    def image(self, image: ImageRef) -> ImageShown | None:
        if image.digest in self._shown:
            return None
        self._shown.add(image.digest)
        address = image.address
        return ImageShown(
            image.digest, address if isinstance(address, str) else self._keep(address.read())
        )

    def put(self, event: AnyEvent) -> None:
        self._owed.append(event)

    def schedule_flush(self) -> None:
        if not self.is_full:
            self._write()

    async def written(self) -> None:
        if self.is_full:
            raise SessionError(507, "journal_full", "full")
        self._write()

    def _write(self) -> None:
        self.records += [msgspec.msgpack.encode(event) for event in self._owed]
        self._owed.clear()

    def events(self) -> list[AnyEvent]:
        """Return the events that another process would read."""
        kind: type[AnyEvent] = AnyEvent  # type: ignore[assignment]
        return [msgspec.msgpack.decode(raw, type=kind) for raw in self.records]

    def read(self, number: int) -> bytes:
        return self.texts[number]

    def next_process(self) -> "ListEventWriter":
        """Return the writer of the next process; queued events are lost."""
        other = ListEventWriter()
        other.records, other.texts = list(self.records), list(self.texts)
        return other

    def _keep(self, text: bytes) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)
